"""`run` and `run_script`: run a function or a script on several hosts of this machine."""

from __future__ import annotations

import contextlib
import pickle
import queue
import re
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from grain_shard.tools.rehearse.host_process import (
    HostProcess,
    end,
    host_environment,
    reserved_port,
    say_where,
)
from grain_shard.tools.rehearse.result import RehearsalError, RehearsalResult

# A line that Gloo prints on stdout. Gloo is the library for collectives of CPUs on several hosts.
_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to .*\n?")
# If a host loses another host, some versions of JAX print the error of the connection and a stack
# of C++ functions, whose lines match `_STACK_OF_LOSS`. The host's own lines may be between them.
_STACK_OF_LOSS = re.compile(
    r"\*\*\* Check failure stack trace: \*\*\*"
    r"|    @ +0x[0-9a-f]+ "
    r"|Additional GRPC error information from remote target coordination_service "
    r"|:UNKNOWN:Error received from peer "
)

# The script that each host of `run` runs. It checks for __main__, because multiprocessing imports
# the script again in the worker processes of a host.
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
        function: Any function, also a closure or a function of a test module, because cloudpickle
            sends it. It should return NumPy or plain Python: a `jax.Array` would start a JAX
            backend in this process.
        *args: The arguments of the function, the same on every host.
        hosts: Number of hosts, each a process.
        devices_per_host: Number of CPU devices of each host.
        timeout_s: Seconds after which all hosts are ended.
        env: Environment variables for every host, in addition to the variables of this process.
        end_others: True if the first host to fail ends all hosts. With False the hosts run until
            they end by themselves or time out, so a test can see how they react to the failure.

    Returns:
        The results of the function, in the order of the hosts.

    Raises:
        RehearsalError: A host failed, or the hosts timed out.

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
        # The script loads sys.path first, because the function may need it to be loaded.
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
        # Each host has written its result beside the file `call`.
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
    """Runs a script on every host, and returns the outputs and return codes of the hosts.

    If a host fails, the result says so; no error is raised.

    Args:
        argv: The arguments of Python: ``["train.py", "--steps", "20"]`` or ``["-m", "train"]``.
        hosts: Number of hosts, each a process.
        devices_per_host: Number of CPU devices of each host.
        timeout_s: Seconds after which all hosts are ended.
        env: Environment variables for every host, in addition to the variables of this process.
        end_others: True if the first host to fail ends all hosts. With False the hosts run until
            they end by themselves or time out.
        echo: The file to which each line of a host is written as it arrives, after "[host 0]" and
            so on; None for no output. It leaves out the stack of C++ functions that JAX prints if a
            host ends because another host has ended. Lines of Gloo (the library for collectives of
            CPUs) are left out of this file and of the result.

    Raises:
        ValueError: `hosts` or `devices_per_host` is less than 1.
    """
    if hosts < 1 or devices_per_host < 1:
        raise ValueError(f"{hosts=}, {devices_per_host=}: each must be at least 1")
    deadline = time.monotonic() + timeout_s
    events: queue.Queue[tuple[int, str | None]] = queue.Queue()
    lines: list[list[str]] = [[] for _ in range(hosts)]
    running = set(range(hosts))
    timed_out_hosts: list[int] = []
    failed_host: int | None = None

    def record(host: int, line: str | None) -> None:  # None means that the process has ended
        line = line and _GLOO.sub("", line)
        if line:
            lines[host].append(line)
            is_stack = processes[host].lost_another and _STACK_OF_LOSS.match(line)
            if echo is not None and not is_stack:
                print(f"[host {host}]", line.removesuffix("\n"), file=echo, flush=True)

    processes: list[HostProcess] = []
    with contextlib.ExitStack() as cleanup:
        port = cleanup.enter_context(reserved_port())
        notes = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rehearse-")))
        cleanup.callback(end, processes)
        for host in range(hosts):
            variables = host_environment(host, hosts, devices_per_host, port) | dict(env or {})
            host_argv = [str(notes / str(host)), *argv]  # the path of its notes comes first
            processes.append(HostProcess(host, host_argv, variables, events))
        # Take lines and ends of processes, until all hosts or the first to fail have ended, or time
        # runs out. The exit of this block ends the hosts that still run.
        while running and (failed_host is None or not end_others):
            if (remaining_s := deadline - time.monotonic()) <= 0:
                timed_out_hosts = sorted(running)
                say_where([processes[host] for host in timed_out_hosts])
                break
            with contextlib.suppress(queue.Empty):
                host, line = events.get(timeout=remaining_s)
                record(host, line)
                if line is None:
                    running.remove(host)
                    if processes[host].reap() != 0 and failed_host is None:
                        failed_host = host
        # The hosts that used JAX without joining the others, and the last batch of each host.
        alone = {int(note.stem) for note in notes.glob("*.alone")}
        places = {int(n.stem): n.read_text().rstrip() for n in sorted(notes.glob("*.place"))}
        # A host that failed alone ends the others, before they can be seen to be alone.
        not_joined = hosts > 1 and (failed_host in alone or (not running and len(alone) == hosts))
    while not events.empty():  # the last lines of hosts that were ended
        record(*events.get())
    returncodes = [process.reap() for process in processes]
    outputs = ["".join(host_lines) for host_lines in lines]
    return RehearsalResult(returncodes, outputs, failed_host, timed_out_hosts, not_joined, places)


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle  # imported only here: the command line does not need it

    with contextlib.ExitStack() as cleanup:
        # Hosts may not find a module that is not in a package, such as a test. So its functions are
        # sent as code. A function of a package is sent as a name, and the hosts import its module.
        if isinstance(function, types.FunctionType) and "." not in function.__module__:
            module = sys.modules[function.__module__]
            cloudpickle.register_pickle_by_value(module)
            cleanup.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps((function, args))
