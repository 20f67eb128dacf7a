"""Feeds: the parts of a stream, whose global batches are the same on any number of hosts."""
