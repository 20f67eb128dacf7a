"""Measures training loops, and gives advice. The public names are in `grain_shard.measuring`."""
