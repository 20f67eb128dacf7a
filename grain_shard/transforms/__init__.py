"""`shard_to`, and the four stages of its chain, one a file."""
