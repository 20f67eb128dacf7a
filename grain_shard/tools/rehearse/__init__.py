"""Runs many hosts on one machine. The public names are in `grain_shard.rehearse`."""
