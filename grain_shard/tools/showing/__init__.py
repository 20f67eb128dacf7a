"""Batches as a reader sees them: in a terminal and in a notebook."""
