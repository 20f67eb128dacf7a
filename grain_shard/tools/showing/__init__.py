"""Shows batches, as tables in a terminal and in a notebook."""
