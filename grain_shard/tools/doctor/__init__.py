"""``python -m grain_shard doctor``: a report on this machine, to be read by others."""
