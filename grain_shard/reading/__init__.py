"""Reads of one host: records, rows, batches, and the fingerprints of pipelines."""
