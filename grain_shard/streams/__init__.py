"""Streams and feeds: pipelines whose batches are made one after the other."""
