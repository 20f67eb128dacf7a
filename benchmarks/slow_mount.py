"""Mounts a folder at a second place, where opening and reading a file takes some milliseconds.

    python -m benchmarks.slow_mount FOLDER MOUNT_POINT LATENCY_MS

The mount imitates Cloud Storage FUSE without a cache. It needs mfusepy, libfuse, and the right to
mount.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Skip

_MOUNTED_WITHIN_S = 10


@contextmanager
def mounted(folder: Path, mount_point: Path, latency_ms: float) -> Iterator[None]:
    """Mounts a folder in a process of its own, until the block ends.

    Args:
        folder: The folder.
        mount_point: The second place of the folder; it is made if it does not exist.
        latency_ms: Milliseconds that each opening and each read of a file takes.

    Raises:
        Skip: The folder cannot be mounted on this machine.
    """
    mount_point.mkdir(exist_ok=True)
    arguments = [str(folder), str(mount_point), str(latency_ms)]
    command = [sys.executable, "-m", "benchmarks.slow_mount", *arguments]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + _MOUNTED_WITHIN_S
            while not os.path.ismount(mount_point):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    assert process.stderr is not None
                    why = process.stderr.read().strip().splitlines()[-1:] or ["it says nothing"]
                    raise Skip(f"no folder can be mounted by FUSE here ({why[0]})")
                time.sleep(0.01)
            yield
        finally:
            process.terminate()  # libfuse then unmounts the folder


def _mount(folder: str, mount_point: str, latency_s: float) -> None:
    import mfusepy  # pyright: ignore[reportMissingImports]

    class Slow(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            found = os.lstat(folder + path)
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
            return {name: getattr(found, name) for name in names}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(folder + path)]

        def open(self, path: str, flags: int) -> int:
            time.sleep(latency_s)
            return os.open(folder + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(latency_s)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    # With direct_io the page cache answers no read.
    mfusepy.FUSE(Slow(), mount_point, foreground=True, ro=True, direct_io=True)


if __name__ == "__main__":
    _mount(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3)
