"""The stages of the chain, one a file, in the order in which `shard_to` puts them."""
