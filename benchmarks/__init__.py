"""How fast grain_shard is, beside its peers: ``python -m benchmarks --help``."""
