"""Reads of one host: sources, records, rows, and the fingerprints of pipelines."""
