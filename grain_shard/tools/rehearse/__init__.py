"""Many hosts on one machine; the public names are in `grain_shard.rehearse`."""
