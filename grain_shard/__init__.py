"""End a Grain pipeline with ``.shard_to(mesh)``."""
