"""libtpu where there is no TPU: why it complains, and what keeps it quiet.

JAX starts every backend that it finds, libtpu's among them once that is installed, as
``grain-shard[plan]`` does. With no TPU on the machine libtpu looks for the names of its hosts,
finds none, and says so in five lines; JAX then goes on without it. ``JAX_PLATFORMS=cpu`` has JAX
not ask it. Where GPUs may be in use, the variables here give libtpu the names that it looks for: it
then finds no TPU without a word.

A package that is imported has no business with the environment of a program. The commands of this
one set the variables in their own processes.
"""

from __future__ import annotations

import glob
import os

_NAMES = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}


def tpu_is_here() -> bool:
    """Looks for the device file of a TPU: v4 and before have accel*, later ones vfio."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def keep_libtpu_quiet() -> None:
    """Sets the variables that libtpu would miss if there is no TPU. Call it before JAX starts."""
    if not tpu_is_here():
        for name, value in _NAMES.items():
            os.environ.setdefault(name, value)
