"""Rehearse a multi-host JAX program on one (Linux) machine: one process for each host, on CPUs.

A script runs as on a pod: ``jax.distributed.initialize()`` needs no arguments, and collectives
cross the processes. A test calls a function on every host, and has what each of them returned::

    $ python -m grain_shard rehearse --hosts 4 --devices-per-host 2 train.py --steps 20
    [host 2] step 0: loss 4.12
    [host 0] step 0: loss 4.12

    >>> import jax
    >>> from grain_shard import rehearse
    >>> rehearse.run(jax.process_index, hosts=2)
    [0, 1]

When a host fails, the others are ended, and the report is about the one that failed first. However
a rehearsal ends, its hosts and their child processes end with it. There is one exception: SIGKILL
gives it no time to end them. They then go on until they next print.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from grain_shard.arguments import UsageError, positive_integer, positive_seconds
from grain_shard.errors import GrainShardError

_TAIL_LINES = 40

# Seconds that a host has between SIGTERM and SIGKILL. A host that is blocked uses all of them:
# after jax.distributed.initialize() JAX's preemption service catches SIGTERM, notes it for the
# program to ask for, and does not end the process.
_GRACE_S = 2.0

# What each process runs: the script or module, as `python` would run it. Only the end of a script
# that fails is different. In an ordinary exit JAX's atexit handler waits up to 5 minutes for the
# other hosts, which in turn wait for this one; so the process leaves by os._exit. It does so half a
# second late. For the others fail as soon as its connections break, and that was measured to be up
# to 15 ms before the end of its process can be seen. With the delay, the first process to end is
# the one that failed first. This program imports neither JAX nor this package, since the script may
# set variables that have to be there before JAX is imported. A script that used JAX and ran to its
# end, or failed, without having joined the other hosts leaves a file that says so.
_HOST_PROGRAM = """
import os, runpy, sys, time
del sys.argv[0]
alone = sys.argv.pop(0)
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
try:
    jax = sys.modules.get("jax")
    if jax and not jax.distributed.is_initialized() and jax.process_count() == 1:
        open(alone, "w").close()
finally:
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.5)
        os._exit(code)
"""

# What Gloo, the library by which CPUs of several hosts compute together, says of itself on stdout.
_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to .*\n?")
# How JAX says that a host ends as another one has gone, and the lines that come after: the error of
# the connection, and a stack of C++ functions. Other lines of the host may stand between them.
_LOST_ANOTHER = "Terminating process because the JAX distributed service detected fatal errors"
_STACK_OF_LOSS = re.compile(
    r"\*\*\* Check failure stack trace: \*\*\*"
    r"|    @ +0x[0-9a-f]+ "
    r"|Additional GRPC error information from remote target coordination_service "
    r"|:UNKNOWN:Error received from peer "
)

# The script that `run` gives to its hosts. It asks for __main__, since multiprocessing imports it
# again in the worker processes that a host starts.
_CALL_SCRIPT = """
import os, pickle, sys
if __name__ == "__main__":
    with open(sys.argv[1], "rb") as call:
        sys.path[:] = pickle.load(call)
        import cloudpickle, jax
        jax.distributed.initialize()
        function, args = pickle.load(call)
    value = cloudpickle.dumps(function(*args))
    with open(sys.argv[1] + "." + os.environ["SLURM_PROCID"], "wb") as returned:
        returned.write(value)
"""


@dataclasses.dataclass(frozen=True)
class RehearsalResult:
    """How a rehearsal went; lists have an entry a host.

    Attributes:
        returncodes: As in `subprocess.Popen.returncode`: -9 if signal 9 killed the host.
        outputs: What each host wrote to stdout and stderr.
        failed_host: The host that failed first, if any did.
        timed_out_hosts: The hosts that still ran when the time was over.
        not_joined: Whether several hosts used JAX, each as if it were the only one, since they had
            not called ``jax.distributed.initialize()``: all of them, which ran to their ends, or
            the one that failed first.
    """

    returncodes: list[int]
    outputs: list[str]
    failed_host: int | None
    timed_out_hosts: list[int]
    not_joined: bool = False

    @property
    def exit_code(self) -> int:
        """That of the first host to fail (128 + n if signal n killed it), or 0.

        It is 124 at a timeout, and 1 if the hosts did not join.
        """
        if self.failed_host is not None:
            code = self.returncodes[self.failed_host]
            return code if code >= 0 else 128 - code
        if self.timed_out_hosts:
            return 124
        return 1 if self.not_joined else 0

    def summary(self) -> str:
        """Which host failed or which hosts hung, how, and their last lines."""
        hosts = self.timed_out_hosts if self.failed_host is None else [self.failed_host]
        tails = [
            f"[host {host}] {line}"
            for host in hosts
            for line in self.outputs[host].splitlines()[-_TAIL_LINES:]
        ]
        head, remedy = self.verdict()[:1], self.verdict()[1:]
        return "\n".join([*head, *tails, *remedy])

    def verdict(self) -> list[str]:
        """The same without the lines of the hosts, for a reader who has seen them."""
        ends = []
        if self.failed_host is not None:
            end = f"host {self.failed_host} failed first, with exit code {self.exit_code}"
            if (code := self.returncodes[self.failed_host]) < 0:
                end += f" (signal {-code}: {signal.strsignal(-code)})"
            ends.append(end)
        elif self.timed_out_hosts:
            hosts = ", ".join(f"host {host}" for host in self.timed_out_hosts)
            ends.append(f"timed out, still running: {hosts}")
        if self.not_joined:
            if self.failed_host is None:
                end = (
                    f"each of the {len(self.returncodes)} processes ran the whole job by itself, as"
                    " no process called jax.distributed.initialize()."
                )
            else:
                end = (
                    f"host {self.failed_host} had not called jax.distributed.initialize(). Without"
                    " that call each process runs the whole job by itself, and they may get in each"
                    " other's way, as in a folder that all of them write to."
                )
            ends.append(
                f"{end} Remedy: call it (it needs no arguments) at the top of the script, before"
                " any other use of JAX."
            )
        return ends


class RehearsalError(GrainShardError, RuntimeError):
    """A host failed, or the time was over: `result` is how the rehearsal went."""

    def __init__(self, result: RehearsalResult):
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return self.result.summary()


def run(
    function: Callable[..., Any],
    *args: Any,
    hosts: int,
    devices_per_host: int = 1,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    end_others: bool = True,
) -> list[Any]:
    """Calls ``function(*args)`` on every host, after ``jax.distributed.initialize()``.

    Args:
        function: Any function, closures and those of a test module too: cloudpickle sends it.
            What it returns should be NumPy or plain Python: a `jax.Array` would start a JAX
            backend in this process.
        *args: Its arguments, the same on every host.
        hosts: The number of processes.
        devices_per_host: The number of CPU devices each has.
        timeout_s: End all hosts after this many seconds.
        env: Variables to set on every host, on top of this process's own.
        end_others: Whether the first host to fail ends the others. If not they go on, until they
            end by themselves or time out: to test how they take it.

    Returns:
        What the function returned on each host, in host order.

    Raises:
        RehearsalError: A host failed, or the time was over.

    Example:
        >>> def scaled_index(scale):
        ...     import jax
        ...     return scale * jax.process_index()
        >>> run(scaled_index, 10, hosts=2)
        [0, 10]
    """
    with tempfile.TemporaryDirectory(prefix="rehearse-") as directory:
        script, call = Path(directory, "call.py"), Path(directory, "call")
        script.write_text(_CALL_SCRIPT)
        call.write_bytes(pickle.dumps(sys.path) + _pickle_call(function, args))
        result = run_script(
            [str(script), str(call)],
            hosts=hosts,
            devices_per_host=devices_per_host,
            timeout_s=timeout_s,
            env=env,
            end_others=end_others,
        )
        if result.exit_code != 0:
            raise RehearsalError(result)
        return [pickle.loads(Path(f"{call}.{host}").read_bytes()) for host in range(hosts)]


def run_script(
    argv: Sequence[str],
    *,
    hosts: int,
    devices_per_host: int = 1,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    end_others: bool = True,
    echo: TextIO | None = None,
) -> RehearsalResult:
    """Runs a script on every host. A host's failure is in the result; it raises nothing.

    `argv` is what would follow ``python``: ``["train.py", "--steps", "20"]``, ``["-m", "train"]``.
    Each line that a host writes goes to `echo` as it arrives, prefixed with its host; the stack of
    C++ functions with which JAX ends a host that has lost another does not. What Gloo writes of
    itself is left out everywhere. All other arguments are those of `run`.
    """
    if hosts < 1 or devices_per_host < 1:
        raise ValueError(f"{hosts=}, {devices_per_host=}: each must be at least 1")
    deadline = time.monotonic() + timeout_s
    events: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    lines: list[list[str]] = [[] for _ in range(hosts)]
    running, timed_out_hosts = set(range(hosts)), []
    failed_host: int | None = None
    lost_another: set[int] = set()

    def record(host: int, line: str | None) -> None:
        line = line and _GLOO.sub("", line)
        if line:
            lines[host].append(line)
            if _LOST_ANOTHER in line:
                lost_another.add(host)
            is_stack = host in lost_another and _STACK_OF_LOSS.match(line)
            if echo is not None and not is_stack:
                print(f"[host {host}]", line.removesuffix("\n"), file=echo, flush=True)

    processes: list[_HostProcess] = []
    with contextlib.ExitStack() as cleanup:
        port = cleanup.enter_context(_reserved_port())
        notes = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rehearse-")))
        cleanup.callback(_end, processes)
        for host in range(hosts):
            variables = _host_environment(host, hosts, devices_per_host, port) | dict(env or {})
            words = [str(notes / str(host)), *argv]
            processes.append(_HostProcess(host, words, variables, events))
        while running and (failed_host is None or not end_others):
            if (remaining_s := deadline - time.monotonic()) <= 0:
                timed_out_hosts = sorted(running)
                break
            with contextlib.suppress(queue.Empty):
                host, line = events.get(timeout=remaining_s)
                record(host, line)
                if line is None:
                    running.remove(host)
                    if processes[host].reap() != 0 and failed_host is None:
                        failed_host = host
        alone = {int(note.name) for note in notes.iterdir()}
        is_alone = failed_host in alone or (not running and len(alone) == hosts)
        not_joined = hosts > 1 and is_alone
    while not events.empty():
        record(*events.get())
    returncodes = [process.reap() for process in processes]
    outputs = ["".join(host_lines) for host_lines in lines]
    return RehearsalResult(returncodes, outputs, failed_host, timed_out_hosts, not_joined)


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle  # here, since the command line does without

    with contextlib.ExitStack() as cleanup:
        # A test module is in no package, and the hosts may not find it: its functions are sent as
        # code. A function of a package is sent as its name, and the hosts import its module.
        if isinstance(function, types.FunctionType) and "." not in function.__module__:
            module = sys.modules[function.__module__]
            cloudpickle.register_pickle_by_value(module)
            cleanup.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps((function, args))


class _HostProcess:
    """One host's process, a thread that reads its lines and one that waits for its end.

    Into `events` they put ``(index, line)`` for each line and, at the end, ``(index, None)``.
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
        # With WNOWAIT the process stays a zombie until `reap`. So long the system gives its number,
        # which is also that of its group, to no other process, and signals reach the right one.
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
            # The children get SIGTERM first, and time: when they have ended, multiprocessing's
            # resource tracker frees their shared memory. Until then they keep the pipe open, so the
            # thread that reads from it ends when they have.
            os.killpg(self._process.pid, signal.SIGTERM)
            self._reader.join(_GRACE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
            # A daemon that has left the group may keep the pipe open for ever, hence the timeout.
            self._reader.join(_GRACE_S)
        return self._process.wait()


def _end(processes: Sequence[_HostProcess]) -> None:
    """Ends the hosts that still run: by SIGTERM and, after `_GRACE_S`, by SIGKILL."""
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C cuts the wait short, and all are killed even so
        for process in processes:
            process.reap()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else, and on which JAX's coordinator can listen."""
    with socket.socket() as reservation:
        # With this option, which JAX's coordinator sets too, both can have the port at once.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def _host_environment(host: int, hosts: int, devices_per_host: int, port: int) -> dict[str, str]:
    """This process's variables, and those that make a process one host of a SLURM job."""
    # A real cluster may have set these, to values that contradict ours.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line that `main` takes."""
    parser.description = (
        "Rehearse a multi-host JAX script on this machine, one process a host: in it "
        "jax.distributed.initialize() needs no arguments, and collectives cross the processes."
    )
    add = parser.add_argument
    add("--hosts", type=positive_integer, metavar="N", required=True, help="number of hosts")
    add(
        "--devices-per-host",
        type=positive_integer,
        metavar="N",
        default=1,
        help="CPU devices of each (default: 1)",
    )
    add(
        "--timeout",
        type=positive_seconds,
        metavar="SECONDS",
        default=600.0,
        help="seconds until all are ended (default: 600)",
    )
    add("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    add("script", help="the training script")
    add("args", nargs=argparse.REMAINDER, help="all that follows is the script's")


def main(args: argparse.Namespace) -> int:
    """Rehearses a script from the command line, and returns the exit code.

    That is 0; that of the first host to fail (128 + n if signal n killed it); 124 at a timeout; 1
    if no host joined the others; or 128 + n if signal n ended the rehearsal.

    Raises:
        UsageError: There is no such script.
    """
    if not args.module and not Path(args.script).exists():
        raise UsageError(f"there is no script {args.script!r}.")

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise _Stopped(number)

    previous = {
        number: signal.signal(number, stop)
        # SIGHUP among them: it reaches this process when its terminal is closed, but not the hosts,
        # which are in sessions of their own.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup(1) asks for that
    }
    try:
        result = run_script(
            [*(["-m"] if args.module else []), args.script, *args.args],
            hosts=args.hosts,
            devices_per_host=args.devices_per_host,
            timeout_s=args.timeout,
            echo=sys.stdout,
        )
    except _Stopped as stopped:
        name = "Ctrl-C" if stopped.number == signal.SIGINT else signal.Signals(stopped.number).name
        print(f"rehearse: stopped by {name}; no host runs any more", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if result.exit_code != 0:
        print("rehearse:", "\n".join(result.verdict()), file=sys.stderr)
    return result.exit_code


class _Stopped(BaseException):
    """A signal that ends the rehearsal."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number
