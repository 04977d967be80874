"""Client for a running model server: health by a real completion."""
