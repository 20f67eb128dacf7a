"""Feeds: streams whose batches do not depend on the number of hosts."""
