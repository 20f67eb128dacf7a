"""The loop's iterator, and the background stages that work ahead of it."""
