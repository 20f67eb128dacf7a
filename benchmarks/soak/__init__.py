"""The soak: tests random pipelines, kills and faults for any time, `python -m benchmarks.soak`."""
