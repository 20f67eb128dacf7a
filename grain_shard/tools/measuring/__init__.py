"""Measured loops, and the advice that follows; the public names are in `grain_shard.measuring`."""
