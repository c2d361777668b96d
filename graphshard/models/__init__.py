"""Models cut into segments."""
