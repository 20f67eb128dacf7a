"""Programs that tests run, each in a process of its own.

`run` takes a fork of a process that has imported JAX and Grain, which a program would do for a
second. The fork is the main module of its process, and ends as any program does.
"""

import atexit
import functools
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import HOSTS_S

ROOT = str(Path(__file__).parents[1])
# Reads the arguments of one program after the other. Of each it writes the process's number, and
# later its exit code.
_FORKS = """
import grain, jax, os, sys
for line in sys.stdin:
    sys.argv = line.rstrip("\\n").split("\\0")
    if (pid := os.fork()) == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
del grain, jax, line, pid
__file__ = sys.argv[0]
for number, name in enumerate((os.devnull, __file__ + ".out", __file__ + ".err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
sys.path[0] = os.path.dirname(__file__)
os.chdir(sys.path[0])
del os.environ["OPENBLAS_NUM_THREADS"], os, sys, number, name
exec(compile(open(__file__).read(), __file__, "exec"))
"""


def script(*parts):
    """A program of these parts. `decode` decides what reading a record of its pipeline does."""
    return textwrap.dedent("""\
            import os, signal, sys, threading, time
            import grain, jax, numpy as np
            import grain_shard
            jax.config.update("jax_num_cpu_devices", 2)

            def mesh():
                return jax.make_mesh((2,), ("data",))

            def pipeline(decode=lambda i: {"id": np.int32(i), "x": np.zeros(1000)}, **options):
                ds = grain.MapDataset.range(100_000).map(decode).batch(8)
                return ds.shard_to(mesh(), **options)

            def feeds():
                def make_feed(feed):
                    records = grain.MapDataset.range(100_000).map(lambda i: {"id": i})
                    return records[feed.shard_index :: feed.shard_count].to_iter_dataset()

                return grain_shard.feeds(make_feed, num_feeds=2).batch(8)

            """) + "".join(map(textwrap.dedent, parts))


def command(line):
    """Exit code of ``python -m grain_shard``, run in this process with a line of arguments."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with (
            mock.patch.multiple(sys, argv=["grain_shard", *line.split()]),
            pytest.raises(SystemExit) as end,
        ):
            runpy.run_module("grain_shard", run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
    return end.value.code


def without_grains_warning(err):
    """Returns what a process logged, less a line that Grain logs if JAX has no trace of workers."""
    return re.sub(r"WARNING:absl:Grain multiprocess worker profiling requires .*\n", "", err)


def start(code, path, **options):
    """A program, as a new interpreter whose output can be read while it runs."""
    path.write_text(code)
    return python(str(path), cwd=path.parent, **options)


def python(*arguments, **options):
    """A new interpreter with these arguments, whose output can be read while it runs."""
    env = os.environ | {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"} | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.Popen(command, env=env, text=True, **pipes)


@functools.cache
def _forks():
    """The process that is forked, in which OpenBLAS starts no thread."""
    options = {"stdin": subprocess.PIPE, "stderr": None, "env": {"OPENBLAS_NUM_THREADS": "1"}}
    process = python("-c", _FORKS, bufsize=1, **options)
    atexit.register(process.communicate)  # closes its stdin
    return process


def run(code, path, *arguments):
    """Exit code, stdout and stderr; fails if it hangs, and leaves no process behind."""
    path.write_text(code)
    forks = _forks()
    forks.stdin.write("\0".join([str(path), *arguments]) + "\n")
    pid = int(forks.stdout.readline())
    has_ended, _, _ = select.select([forks.stdout], [], [], HOSTS_S)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    exit_code = int(forks.stdout.readline())
    out, err = (Path(f"{path}.{end}").read_text() for end in ("out", "err"))
    if not has_ended:
        pytest.fail(f"hangs; so far:\n{out}\n{err}")
    # Grain unlinks shared memory in a thread of its own, and late. What is left at the end, the
    # resource tracker unlinks, and says so in two lines; with Grain alone, too.
    lines = without_grains_warning(err).splitlines(keepends=True)
    leaks = {k for k, line in enumerate(lines) if "leaked shared_memory objects" in line}
    return exit_code, out, "".join(line for k, line in enumerate(lines) if not {k, k - 1} & leaks)
