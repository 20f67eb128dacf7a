"""The process of one host: its program, its variables, and its end."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

# Seconds that a host has between SIGTERM and SIGKILL. A host that is blocked uses all of them:
# after jax.distributed.initialize() JAX's preemption service catches SIGTERM, notes it for the
# program to ask for, and does not end the process.
_GRACE_S = 2.0

# Each process runs this: the script or module, as `python` would run it. It differs in five ways.
#
# * A signal makes it print the stack of its main thread.
# * A line is written in one piece, when it is complete. PYTHONUNBUFFERED alone makes
#   `print("step", 3)` write four pieces, with room between them for a line of C++ or of a worker.
# * As soon as the script has imported JAX, each computation is told to end before the next begins.
#   Otherwise a process with a single CPU device could begin its computations in any order, and mix
#   up collectives that an accelerator keeps in order.
# * A script that fails does not end as usual: in an ordinary exit JAX's atexit handler waits up to
#   5 minutes for the other hosts, which in turn wait for this one; so the process leaves by _exit.
#   It leaves half a second late. The reason: the other hosts fail as soon as its connections
#   break, which was measured to be up to 15 ms before the end of its process can be seen. A host
#   that only says that another one has failed leaves later still. With these delays the first
#   process to end is the one that failed first.
# * A script that has compiled something ends when its devices have finished. A process that ends
#   while collectives of its devices are under way may hang. The devices of a process run their
#   common computations in order, so this program runs one more and waits for it.
#
# This program imports neither JAX nor this package, since the script may set variables that have to
# be there before JAX is imported. A script that used JAX and ran to its end, or failed, without
# having joined the other hosts leaves an empty file as a note.
_HOST_PROGRAM = """
import faulthandler, importlib.util, os, runpy, signal, sys, time

class InOrder:
    compiled = False

    def find_spec(self, name, path=None, target=None):
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self.run = spec.loader.exec_module
            spec.loader.exec_module = self.exec_module
        return spec

    def exec_module(self, module):
        self.run(module)
        module.config.update("jax_cpu_enable_async_dispatch", False)
        module.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event, *args, **fields):
        self.compiled |= event == "/jax/core/compile/backend_compile_duration"

in_order = InOrder()
sys.meta_path.insert(0, in_order)
faulthandler.register(signal.SIGQUIT, all_threads=False)
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True, write_through=False)
del sys.argv[0]
alone = sys.argv.pop(0)
code, late_s = 0, 0.5
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
    while error is not None:
        if type(error).__name__ == "AgreementError":
            late_s = 3
        error = error.__cause__ or error.__context__
try:
    jax = sys.modules.get("jax")
    if jax and not jax.distributed.is_initialized() and jax.process_count() == 1:
        open(alone, "w").close()
    if in_order.compiled and not code:
        mesh = jax.make_mesh((jax.local_device_count(),), ("x",), devices=jax.local_devices())
        sharding = jax.NamedSharding(mesh, jax.P("x"))
        with jax.set_mesh(mesh):
            jax.numpy.zeros(mesh.size, device=sharding).block_until_ready()
finally:
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(late_s)
        os._exit(code)
"""
# The time, in seconds, that a host gets to print its stack.
_SAY_S = 0.5


class HostProcess:
    """One host's process, a thread that reads its lines and one that waits for its end.

    Into `events` they put ``(index, line)`` for each line and, at the end, ``(index, None)``.
    """

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        events: queue.Queue[tuple[int, str | None]],
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
        # With WNOWAIT the process stays a zombie until `reap`. Until then the system gives its
        # number, which is its group's number too, to no other process, and signals reach the
        # right one.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._events.put((self._index, None))

    def send_signal(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Sends a signal to the process if it runs; by `os.killpg` also to its children."""
        if self._process.returncode is None:
            send(self._process.pid, number)

    def join(self, timeout_s: float) -> None:
        self._waiter.join(timeout_s)

    def reap(self) -> int:
        """Ends the process and its children, if they still run; returns its return code."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._waiter.join()
            # The children get SIGTERM first, and time: when they have ended, multiprocessing's
            # resource tracker frees their shared memory. Until then they keep the pipe open, so the
            # thread that reads from it ends when they have.
            os.killpg(self._process.pid, signal.SIGTERM)
            self._reader.join(_GRACE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
            # A daemon that has left the group may keep the pipe open for ever, hence the timeout.
            self._reader.join(_GRACE_S)
        return self._process.wait()


def say_where(processes: Sequence[HostProcess]) -> None:
    """Has the hosts that still run print the stack of their main thread."""
    for process in processes:
        process.send_signal(signal.SIGQUIT)
    time.sleep(_SAY_S)


def end(processes: Sequence[HostProcess]) -> None:
    """Ends the hosts that still run: by SIGTERM and, after `_GRACE_S`, by SIGKILL."""
    try:
        for process in processes:
            process.send_signal(signal.SIGTERM, os.killpg)
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C cuts the wait short, and all are killed even so
        for process in processes:
            process.reap()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a port on which JAX's coordinator can listen, and no other program."""
    with socket.socket() as reservation:
        # JAX's coordinator sets this option, too, so both sockets can bind the port at once.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def host_environment(host: int, hosts: int, devices_per_host: int, port: int) -> dict[str, str]:
    """This process's variables, and the variables that make a process one host of a SLURM job."""
    # A real cluster may have set these variables, to values that contradict the rehearsal's.
    foreign = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_LOCAL_DEVICE_IDS")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    if any(name.lower().endswith("_proxy") for name in variables):
        variables["no_grpc_proxy"] = "127.0.0.1"  # else gRPC goes through the proxy, and hangs
    # Collectives of several devices block threads while they wait for each other. XLA starts a
    # thread for each core, and JAX 0.10.2 hung on 2 cores with 2 devices a host, so ask for more.
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
