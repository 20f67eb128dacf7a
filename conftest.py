"""Eight virtual CPU devices, for the tests and for the examples in docstrings."""

import gc
import os
import signal

# XLA's CPU backend starts a thread a core, and a collective of eight devices on two of them can
# starve itself.
os.environ.setdefault("PJRT_NPROC", "32")
# Where libtpu is installed, for the tests of plans, JAX would look for a TPU with it, here and in
# the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)

# A run in the background of a shell ignores Ctrl-C, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Leaves what was imported out of the garbage collector's search.

    Else a collection looks at 300,000 objects, which takes 0.2 s, and many tests collect.
    """
    gc.collect()
    gc.freeze()
