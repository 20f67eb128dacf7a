"""``python -m grain_shard doctor``: what is on this machine, for whoever is to help from afar."""
