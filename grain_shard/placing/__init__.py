"""`DevicePlacement`: the parts of the chain, one by one, for any data."""
