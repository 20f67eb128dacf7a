"""Keeps libtpu from printing errors on a machine without a TPU.

``grain-shard[plan]`` installs libtpu, and JAX starts every backend that is installed. Without a TPU
libtpu looks for the names of its hosts, finds none, and prints five lines of errors. JAX then goes
on without libtpu. ``JAX_PLATFORMS=cpu`` keeps JAX from starting libtpu, but also from using GPUs.
So this module sets variables that give libtpu names of hosts. It then finds no TPU and prints
nothing.

An imported package must not change the environment of a user's program. Only the commands of this
package set the variables, in their own processes.
"""

from __future__ import annotations

import glob
import os

NO_TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}


def tpu_is_here() -> bool:
    """Returns True if there is a device file of a TPU.

    Up to v4 the file is /dev/accel*, for later TPUs /dev/vfio/[0-9]*.
    """
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def keep_libtpu_quiet() -> None:
    """Sets environment variables that keep libtpu from printing errors, if there is no TPU.

    Call this function before JAX starts.
    """
    if not tpu_is_here():
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
