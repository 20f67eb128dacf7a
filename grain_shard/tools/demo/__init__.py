"""The demo: trains a classifier of handwritten digits with a `shard_to` pipeline."""

VIRTUAL_DEVICES = 8  # number of CPU devices on a machine without an accelerator
MIN_ACCURACY = 0.97
