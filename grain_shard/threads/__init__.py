"""Background threads and worker processes: how they start, wait, pass on results and end."""
