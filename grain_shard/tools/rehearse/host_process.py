"""`HostProcess`: the process of one host: its program, its environment and how it ends."""

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

# The line with which JAX ends a host because another host has ended.
LOST_ANOTHER = "Terminating process because the JAX distributed service detected fatal errors"
# Seconds between SIGTERM and SIGKILL for a host. A blocked host does not end on SIGTERM: after
# jax.distributed.initialize() JAX's preemption service catches the signal, and leaves it to the
# program to ask for it.
_GRACE_S = 2.0

# The program of each process. It runs the script or module as `python` would, with six changes:
#
# * SIGQUIT makes the process print the stack of its main thread.
# * A line of output is written in one piece, when it is complete. With PYTHONUNBUFFERED alone,
#   `print("step", 3)` would write four pieces, and a line of C++ or of a worker could come between
#   them.
# * From the import of JAX on, each computation ends before the next one begins. Otherwise a process
#   with a single CPU device could start its computations in any order, and mix up collectives. An
#   accelerator keeps their order.
# * A script that raises an error ends the process by _exit. In an ordinary exit, JAX's atexit
#   handler would wait up to 5 minutes for the other hosts, which in turn wait for this one. (After
#   `sys.exit` the process ends as it would without a rehearsal.) The process exits two seconds
#   late. By then the other hosts have heard of an error of its iterator. Without the delay they
#   would fail as soon as its connections break, up to 15 ms (measured) before the end of its
#   process can be seen. A host that only reports the failure of another host (AgreementError)
#   exits 5 seconds late. With these delays, and the delay in `_wait`, the process that failed first
#   also ends first.
# * After a script that has compiled something, the process ends only when its devices have
#   finished, because it may hang if it ends during a collective. The devices of a process run their
#   common computations in order. So this program runs one more on all devices, and waits for it.
# * A file says which batch the host's loop got last. It shows where hosts wait for each other.
#
# This program itself imports neither JAX nor this package, because the script may set variables
# that must be set before the import of JAX. If the script used JAX but never joined the other
# hosts, the program leaves an empty file as a note for the rehearsal.
_HOST_PROGRAM = """
import faulthandler, importlib.util, os, runpy, signal, sys, time

class Changes:
    compiled, iterators, place = False, 0, ""

    def __init__(self):
        self.of = {"jax": self.keep_order, "grain_shard.stats.meter": self.count_batches}

    def find_spec(self, name, path=None, target=None):
        change = self.of.pop(name, None)
        spec = change and importlib.util.find_spec(name)
        if spec:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))
        return spec

    def keep_order(self, jax):
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event, *args, **fields):
        self.compiled |= event == "/jax/core/compile/backend_compile_duration"

    def count_batches(self, module):
        handed_out = module.Meter.handed_out

        def count(meter, *size):
            handed_out(meter, *size)
            if not hasattr(meter, "rehearsed"):
                self.iterators += 1
                meter.rehearsed = self.iterators, 0
            number, taken = meter.rehearsed
            meter.rehearsed = number, taken + 1
            self.say(f"got batch {taken + 1:,} of iterator {number}")

        module.Meter.handed_out = count
        self.file = os.open(notes + ".place", os.O_WRONLY | os.O_CREAT)

    def say(self, place):
        self.place = place
        os.pwrite(self.file, place.ljust(200).encode(), 0)

faulthandler.register(signal.SIGQUIT, all_threads=False)
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True, write_through=False)
del sys.argv[0]
notes = sys.argv.pop(0)
changes = Changes()
sys.meta_path.insert(0, changes)
left, code, late_s = None, 0, 2
try:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    left = error
except BaseException as error:
    tb = error.__traceback__
    while tb and tb.tb_frame.f_code.co_filename in ("<string>", "<frozen runpy>"):
        tb = tb.tb_next
    sys.excepthook(type(error), error.with_traceback(tb), tb)
    code = 1
    while error is not None:
        if type(error).__name__ == "AgreementError":
            late_s = 5
        error = error.__cause__ or error.__context__
try:
    if changes.place:
        changes.say(changes.place + ", and its script has ended")
    jax = sys.modules.get("jax")
    if jax and not jax.distributed.is_initialized() and jax.process_count() == 1:
        open(notes + ".alone", "w").close()
    if changes.compiled and not code and not getattr(left, "code", None):
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
if left is not None:
    raise left
"""
# Seconds that a host gets to print its stack.
_SAY_S = 0.5
# If a host lost another host, its end is reported this many seconds late, so that the end of the
# other host comes first. It is also the longest wait for the last lines of a host, whose children
# may keep the pipe open.
_LATE_S = 0.5


class HostProcess:
    """The process of one host, with a thread that reads its lines and a thread that waits for it.

    The threads put ``(index, line)`` into `events` for each line, and ``(index, None)`` when the
    process has ended.

    Args:
        index: Index of the host.
        argv: A path for the notes of the process, then the script and its arguments, or "-m", a
            module and its arguments. The process writes the file path + ".alone" if the script
            used JAX without joining the other hosts, and path + ".place" for the last batch.
        environment: All environment variables of the process.
        events: The queue for lines and ends.
    """

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        events: queue.Queue[tuple[int, str | None]],
    ):
        self._index, self._events = index, events
        self.lost_another = False  # whether the host has printed `LOST_ANOTHER`
        self._is_reaped = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST_PROGRAM, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a signal to the process's group then reaches its children too
        )
        stdout = self._process.stdout
        self._reader = threading.Thread(target=self._read, args=(stdout,), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self.lost_another |= LOST_ANOTHER in line
                self._events.put((self._index, line))

    def _wait(self) -> None:
        # With WNOWAIT the process stays a zombie until `reap`. So the system does not give its
        # number, which is also its group's number, to another process, which a signal would reach.
        # macOS has no `waitid` before Python 3.13. There `reap` comes within a second after the end
        # of the process, too soon for its number to be reused.
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self._reader.join(_LATE_S)
        if self.lost_another:
            time.sleep(_LATE_S)
        self._events.put((self._index, None))

    def send_signal(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Sends a signal to the process, unless it was reaped.

        Args:
            number: Number of the signal.
            send: `os.kill` for the process alone, `os.killpg` for the process and its children.
        """
        if not self._is_reaped:
            # Without `waitid` the process may be gone, and macOS refuses a signal to a group of
            # zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self._process.pid, number)

    def join(self, timeout_s: float) -> None:
        self._waiter.join(timeout_s)

    def reap(self) -> int:
        """Kills the process and its children if they still run, and returns the return code.

        It is the return code of `subprocess.Popen`: -n if signal n ended the process.
        """
        if not self._is_reaped:
            self.send_signal(signal.SIGKILL)
            self._waiter.join()
            # The children first get SIGTERM and some time. When they have ended, multiprocessing's
            # resource tracker frees their shared memory. They keep the pipe of stdout open, so the
            # reading thread ends when all of them have ended.
            self.send_signal(signal.SIGTERM, os.killpg)
            self._reader.join(_GRACE_S)
            self.send_signal(signal.SIGKILL, os.killpg)
            # A daemon that left the process's group may keep the pipe open for ever.
            self._reader.join(_GRACE_S)
            self._is_reaped = True
        return self._process.wait()


def say_where(processes: Sequence[HostProcess]) -> None:
    """Makes the hosts print the stack of their main thread, and gives them half a second for it."""
    for process in processes:
        process.send_signal(signal.SIGQUIT)
    time.sleep(_SAY_S)


def end(processes: Sequence[HostProcess]) -> None:
    """Ends the hosts that still run: by SIGTERM and, 2 seconds later, by SIGKILL."""
    try:
        for process in processes:
            process.send_signal(signal.SIGTERM, os.killpg)
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # even if a second Ctrl-C ends the wait early
        for process in processes:
            process.reap()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port for JAX's coordinator, which no other program gets until the block ends."""
    with socket.socket() as reservation:
        # JAX's coordinator sets this option, too, so it can bind the port while this socket has it.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def host_environment(host: int, hosts: int, devices_per_host: int, port: int) -> dict[str, str]:
    """Returns the environment of one host: this process's variables, and variables of a SLURM job.

    JAX reads the SLURM variables in ``jax.distributed.initialize()``. Variables of a real cluster
    to which this process belongs are left out.
    """
    # On a real cluster, variables with these prefixes may be set, and contradict the rehearsal.
    foreign = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_LOCAL_DEVICE_IDS")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    if any(name.lower().endswith("_proxy") for name in variables):
        variables["no_grpc_proxy"] = "127.0.0.1"  # otherwise gRPC would use a proxy, and hang
    # A collective blocks a thread per device while the devices wait for each other. XLA starts only
    # one thread per core, and JAX 0.10.2 hung on 2 cores with 2 devices per host. So XLA is told to
    # start at least four threads per device.
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
