"""The process that runs cases, one after the other.

It is ended and started anew where a case takes longer than it may. What it and the processes that
it started print goes to a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

GRACE_S = 20.0  # in which a case that is interrupted ends the hosts that it has started
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "32"}


class Outcome(NamedTuple):
    """How a case ended.

    Attributes:
        counted: What it counted.
        failure: What went wrong; None if nothing did.
        printed: What was printed meanwhile.
        seconds: How long it took.
    """

    counted: Counter[str]
    failure: str | None
    printed: str
    seconds: float


class Worker:
    """Runs cases in a process of their own; to be ended in every case.

    Args:
        log: The file to which it prints.
    """

    def __init__(self, log: Path):
        self._log = log
        self._process: multiprocessing.process.BaseProcess | None = None

    def run(self, seed: int, number: int, limit_s: float) -> Outcome:
        connection = self._started()
        begun, printed_before = time.monotonic(), self._log.stat().st_size
        connection.send((seed, number))
        counted, failure = Counter(), f"it took longer than {limit_s:g} s; see below where it stood"
        if connection.poll(limit_s):
            try:
                counted, failure = connection.recv()
            except EOFError:
                self.end()
                failure = f"the process that ran it ended with code {self._exit_code}"
        else:
            self.end()
        with self._log.open(errors="replace") as log:
            log.seek(printed_before)
            return Outcome(counted, failure, log.read(), time.monotonic() - begun)

    def _started(self) -> Connection:
        if self._process is None:
            self._log.touch()
            context = multiprocessing.get_context("spawn")
            self._connection, its_end = context.Pipe()
            self._process = context.Process(target=work, args=(its_end, str(self._log)))
            os.environ.update(ENVIRONMENT)
            self._process.start()
            its_end.close()
        return self._connection

    def end(self) -> None:
        """Ends the process: with time to end its own ones, and all that is left by force."""
        process, self._process = self._process, None
        if process is None or process.pid is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # it prints where it stands
                os.kill(process.pid, signal.SIGINT)
            process.join(GRACE_S)
        finally:  # a second Ctrl-C cuts the wait short
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._exit_code = process.exitcode
        self._connection.close()


def work(connection: Connection, log: str) -> None:
    """Runs the cases that are asked for, until nobody asks any more."""
    os.setsid()  # so that Ctrl-C reaches the soak alone, and a signal to the group all of this
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from benchmarks.soak import cases

    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            _, case = cases.draw(*connection.recv())
            with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
                try:
                    outcome = case.run(Path(folder)), None
                except Exception as error:
                    outcome = Counter(), told(error)
            sys.stdout.flush()
            connection.send(outcome)


def told(error: Exception) -> str:
    """The error with its traceback; of hosts, all that each of them printed."""
    text = "".join(traceback.format_exception(error))
    result = getattr(error, "result", None)
    outputs = [] if result is None else result.outputs
    of_hosts = [f"\n--- host {host} printed\n{output}" for host, output in enumerate(outputs)]
    return text + "".join(of_hosts)
