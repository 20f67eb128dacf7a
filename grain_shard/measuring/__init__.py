"""How fast a pipeline is, and what it waits for."""
