"""qwen-serve: the unit that serves the model, ready when a real completion came back."""
