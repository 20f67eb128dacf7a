"""Eight virtual CPU devices, for the tests and for the examples in docstrings."""

import os

# XLA's CPU backend starts a thread a core, and a collective of eight devices on two of them can
# starve itself.
os.environ.setdefault("PJRT_NPROC", "32")

import jax

jax.config.update("jax_num_cpu_devices", 8)
