"""Makes host batches from the records of a pipeline, and computes fingerprints of pipelines."""
