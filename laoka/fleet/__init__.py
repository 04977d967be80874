"""Many host reports against one lock, and how they are shown."""
