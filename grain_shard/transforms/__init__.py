"""The stages of the chain, one per file, applied by `shard_to` one after the other."""
