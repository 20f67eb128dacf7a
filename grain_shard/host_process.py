"""One host of a rehearsal: its process, its environment, and its end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

# From SIGTERM to SIGKILL. After jax.distributed.initialize() JAX's preemption service catches
# SIGTERM and leaves the rest to the program, so a host that is blocked uses all of it.
_GRACE_S = 2.0

# Runs a script or module as `python` does, up to its failure. An exit in good order would then
# wait for the other hosts (in JAX's atexit handler, up to 5 minutes), which wait for this one: it
# just leaves. It stays connected for half a second first: the others fail when a connection breaks,
# and a crash breaks it up to 15 ms (as measured) before the process can be waited for. Thus the
# first process to end is the first that failed. The program must import neither JAX nor this
# package, as a script may want to set variables before it does.
_HOST_PROGRAM = """
import os, runpy, sys, time
del sys.argv[0]
code = 0
try:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    code = error.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
except BaseException as error:
    tb = error.__traceback__
    while tb and tb.tb_frame.f_code.co_filename in ("<string>", "<frozen runpy>"):
        tb = tb.tb_next
    sys.excepthook(type(error), error.with_traceback(tb), tb)
    code = 1
if code:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)
    os._exit(code)
"""


class HostProcess:
    """One host's process, a thread that reads its lines and one that waits for its end.

    They put ``(index, line)`` and, once, ``(index, None)`` into `events`.
    """

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        events: queue.SimpleQueue[tuple[int, str | None]],
    ):
        self._index, self._events = index, events
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST_PROGRAM, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that a signal to its group reaches its children too
        )
        assert self._process.stdout is not None
        stdout = self._process.stdout
        self._reader = threading.Thread(target=self._read, args=(stdout,), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self._events.put((self._index, line))

    def _wait(self) -> None:
        # WNOWAIT leaves the process to `reap`: until then its number, and so that of its group,
        # cannot pass to a stranger, and is safe to signal.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._events.put((self._index, None))

    def terminate(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    def join(self, timeout_s: float) -> None:
        self._waiter.join(timeout_s)

    def reap(self) -> int:
        """Ends what is left of the process and of its children; returns its return code."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._waiter.join()
            # The children are asked first: multiprocessing's tracker ends with the last of them,
            # and then frees their shared memory. They keep the pipe open until they have ended.
            os.killpg(self._process.pid, signal.SIGTERM)
            self._reader.join(_GRACE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
            # Not for ever: a daemon that has left the group may keep the pipe open.
            self._reader.join(_GRACE_S)
        return self._process.wait()


def end(processes: Sequence[HostProcess]) -> None:
    """Ends all that still run: by SIGTERM and, after `_GRACE_S`, by SIGKILL."""
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C ends the wait, and not the killing
        for process in processes:
            process.reap()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else, and on which JAX's coordinator can listen."""
    with socket.socket() as reservation:
        # The coordinator sets this option too, so we need not give the port up first.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def host_environment(host: int, hosts: int, devices_per_host: int, port: int) -> dict[str, str]:
    """This process's variables, and those that make a process one host of a SLURM job."""
    # What a real cluster may have set, and would contradict ours.
    foreign = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_LOCAL_DEVICE_IDS")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    if any(name.lower().endswith("_proxy") for name in variables):
        variables["no_grpc_proxy"] = "127.0.0.1"  # else gRPC asks the proxy for it, and hangs
    # Collectives need 2 threads a device not to starve one another: on 2 cores, where XLA starts 2
    # in all, JAX 0.10.2 hung with 2 devices a host, with and without asynchronous dispatch.
    threads = max(os.cpu_count() or 1, 4 * devices_per_host)
    return variables | {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": str(hosts),
        "SLURM_NTASKS": str(hosts),
        "SLURM_PROCID": str(host),
        "SLURM_LOCALID": "0",
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_per_host),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PJRT_NPROC": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
