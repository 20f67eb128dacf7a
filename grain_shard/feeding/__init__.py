"""Feeds: a stream cut into parts, so that global batches are the same on any number of hosts."""
