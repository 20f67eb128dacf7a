"""The demo: the digits, trained through the whole chain."""

VIRTUAL_DEVICES = 8  # where there is no accelerator
MIN_ACCURACY = 0.97
