"""Layouts, specs and shardings: the rows of each host, and the global arrays made of them."""
