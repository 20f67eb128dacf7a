"""What an iterator says of itself while it runs."""
