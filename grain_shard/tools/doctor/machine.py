"""What can be said at once of the programs, the machine and its limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from grain_shard import __version__
from grain_shard.tools.libtpu import tpu_is_here

_PACKAGES = (
    "jax",
    "jaxlib",
    "grain",
    "numpy",
    "array-record",
    "orbax-checkpoint",
    "flax",
    "optax",
    "rich",
)
_OF_JAX = ("JAX_", "XLA_", "LIBTPU_", "CUDA_VISIBLE_DEVICES", "PJRT_")
_FEW_FILES = 4096


class _Extra(NamedTuple):
    modules: tuple[str, ...]
    what_for: str


_EXTRAS = {
    "demo": _Extra(("sklearn", "tqdm"), "python -m grain_shard demo"),
    "plot": _Extra(("matplotlib",), "profile(...).plot(), plan --picture"),
    "plan": _Extra(("matplotlib", "libtpu"), "plan --topology: the topologies of TPUs"),
    "notebooks": _Extra(("jupyterlab", "ipywidgets", "nbclient"), "the notebooks"),
}


def versions() -> dict[str, Any]:
    """Python's version and those of the packages; None for one that is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "grain-shard": __version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """Cores, memory and shared memory in bytes, and what the environment tells JAX."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return {
        "cores": os.cpu_count(),
        "cores_for_this_process": len(affinity(0)) if affinity else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": _cgroup_limit(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total
        if os.path.isdir("/dev/shm")
        else None,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_OF_JAX)},
    }


def limits() -> dict[str, Any]:
    """What the system allows this process, and what of it is little; None is no limit."""
    files, most_files = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    found: dict[str, Any] = {"open_files": files, "open_files_at_most": most_files, "advice": None}
    if hasattr(resource, "RLIMIT_NPROC"):
        found["processes_and_threads"] = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if files is not None and files < _FEW_FILES:
        found["advice"] = (
            f"a source of more than some {files // 2} files needs more open files:"
            f" ulimit -n {most_files or 65536}"
        )
    return found


def accelerators() -> dict[str, Any]:
    """What there is of libtpu and CUDA: the hardware, and the packages by which JAX uses it."""
    cuda = [
        f"{package} {metadata.version(package)}"
        for package in ("jax-cuda12-plugin", "jax-cuda13-plugin")
        if find_spec(package.replace("-", "_")) is not None
    ]
    return {
        "tpu_device_files": tpu_is_here(),
        "libtpu": metadata.version("libtpu") if find_spec("libtpu") is not None else None,
        "nvidia_device_files": Path("/dev/nvidiactl").exists(),
        "cuda_plugin": ", ".join(cuda) or None,
    }


def extras() -> dict[str, Any]:
    """The optional parts of this package: what each is for, and what it lacks."""
    return {
        name: {
            "for": extra.what_for,
            "missing": [module for module in extra.modules if find_spec(module) is None],
        }
        for name, extra in _EXTRAS.items()
    }


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _cgroup_limit() -> int | None:
    """The bytes of memory that a container may have."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
