"""pytest imports no client: each runs in a virtual environment of its own."""

collect_ignore_glob = ["*.py"]
