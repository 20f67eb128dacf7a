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
    shared = "/dev/shm"
    return {
        "cores": os.cpu_count(),
        "cores_for_us": len(affinity(0)) if affinity else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": _cgroup_limit(),
        "shared_memory_bytes": shutil.disk_usage(shared).total if os.path.isdir(shared) else None,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_OF_JAX)},
    }


def limits() -> dict[str, Any]:
    """Returns the limits of this process, with advice on a low one; None is no limit."""
    files, most_files = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    found: dict[str, Any] = {"open_files": files, "open_files_at_most": most_files, "advice": None}
    if hasattr(resource, "RLIMIT_NPROC"):
        found["threads"] = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if files is not None and files < _FEW_FILES:
        found["advice"] = (
            f"a source of more than some {files // 2} files needs more open files:"
            f" ulimit -n {most_files or 65536}"
        )
    return found


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


def extras() -> dict[str, Any]:
    """Returns the optional parts of this package: the use of each, and the modules it lacks."""
    return {
        name: {"for": use, "missing": missing(modules)} for name, (modules, use) in EXTRAS.items()
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _cgroup_limit() -> int | None:
    """The bytes of memory that a container may have."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return int(text) if text.isdecimal() else None
