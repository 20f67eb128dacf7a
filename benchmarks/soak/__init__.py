"""Random pipelines, kills and faults, for as long as one likes: `python -m benchmarks.soak`."""
