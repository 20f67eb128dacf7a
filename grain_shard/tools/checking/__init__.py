"""`check`: the proof that every reader of a pipeline gets the same batches."""
