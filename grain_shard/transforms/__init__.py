"""`shard_to`, and the four stages of its chain, each in a file of its own."""
