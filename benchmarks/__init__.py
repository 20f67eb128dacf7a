"""Compares the speed of grain_shard with other loaders: ``python -m benchmarks --help``."""
