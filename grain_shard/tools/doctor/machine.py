"""Facts of the programs, the machine and its limits that take no time to find."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from grain_shard.tools.extras import EXTRAS, missing
from grain_shard.tools.libtpu import tpu_is_here

_PACKAGES = (
    *("grain-shard", "jax", "jaxlib", "grain", "numpy", "array-record", "orbax-checkpoint"),
    "flax",
)
_OF_JAX = ("JAX_", "XLA_", "LIBTPU_", "CUDA_VISIBLE_DEVICES", "PJRT_")
_FEW_FILES = 4096


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and the packages; None for one that is not installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    ours = {"python": platform.python_version(), "system": system}
    return ours | {package: _version(package) for package in _PACKAGES}


def machine() -> dict[str, Any]:
    """Returns cores, memory in bytes, and the variables of the environment that JAX reads."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    container, shared = Path("/sys/fs/cgroup/memory.max"), "/dev/shm"
    limit = container.read_text().strip() if container.exists() else ""
    return {
        "cores": os.cpu_count(),
        "cores_for_us": len(affinity(0)) if affinity else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": int(limit) if limit.isdecimal() else None,
        "shared_memory_bytes": shutil.disk_usage(shared).total if os.path.isdir(shared) else None,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_OF_JAX)},
    }


def limits() -> dict[str, Any]:
    """Returns the limits of open files, with advice on a low one; None is no limit."""
    unlimited = resource.RLIM_INFINITY
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, most = (None if value == unlimited else value for value in limit)
    advice = None
    if files is not None and files < _FEW_FILES:
        advice = (
            f"a source of more than some {files // 2} files needs more open files:"
            f" ulimit -n {most or 65536}"
        )
    return {"open_files": files, "open_files_at_most": most, "advice": advice}


def accelerators() -> dict[str, Any]:
    """Returns the device files of accelerators and the packages by which JAX uses them."""
    tpu, nvidia = tpu_is_here(), Path("/dev/nvidiactl").exists()
    libtpu = _version("libtpu")
    cuda = _version("jax-cuda13-plugin") or _version("jax-cuda12-plugin")
    advice = None
    if tpu and libtpu is None:
        advice = 'pip install "jax[tpu]"'
    elif nvidia and cuda is None:
        advice = 'pip install "jax[cuda13]"'
    elif libtpu is not None and not tpu:
        advice = (
            "With no TPU here libtpu has every JAX program print errors, which mean nothing;"
            " JAX_PLATFORMS=cpu stops them."
        )
    return {"TPU": tpu, "libtpu": libtpu, "NVIDIA_GPU": nvidia, "CUDA": cuda, "advice": advice}


def extras() -> dict[str, str]:
    """Returns the optional parts of this package: the use of each, and the modules it lacks."""
    found = {}
    for name, (modules, use) in EXTRAS.items():
        lacks = ", ".join(missing(modules))
        there = f'lacks {lacks}: pip install "grain-shard[{name}]"' if lacks else "there"
        found[name] = f"{there} (for {use})"
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
