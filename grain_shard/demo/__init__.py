"""The demo: the digits, trained through the whole chain."""
