"""`Worker`: runs cases in a process of its own, one after the other.

If a case takes too long, its process is ended, and the next case gets a new one. All output of the
process and its children goes to a file.
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

GRACE_S = 20.0  # seconds in which an interrupted case can end the hosts that it has started
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "32"}


class Outcome(NamedTuple):
    """The outcome of a case.

    Attributes:
        counted: Counts of the things that the case checked, by name.
        failure: The error as text; None if the case passed.
        printed: The output of the case.
        seconds: Seconds that the case took.
    """

    counted: Counter[str]
    failure: str | None
    printed: str
    seconds: float


class Worker:
    """Runs cases in another process. The caller must call `end` at last, also after an error.

    Args:
        log: The file for the output of the process.
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
        """Ends the process and its children.

        The process first gets a signal, and time to end its children. Then every process that still
        runs is killed.
        """
        process, self._process = self._process, None
        if process is None or process.pid is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # prints the stacks of its threads
                os.kill(process.pid, signal.SIGINT)
            process.join(GRACE_S)
        finally:  # also if a second Ctrl-C ends the wait early
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._exit_code = process.exitcode
        self._connection.close()


def work(connection: Connection, log: str) -> None:
    """Runs the cases whose seed and number arrive, until the connection is closed.

    It answers each case with its counts and its error.
    """
    # In a session of its own this process gets no Ctrl-C, and a signal to its group also reaches
    # its children.
    os.setsid()
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
    """Returns the error with its traceback as text, and the output of each host if it has any."""
    text = "".join(traceback.format_exception(error))
    result = getattr(error, "result", None)
    outputs = [] if result is None else result.outputs
    of_hosts = [f"\n--- host {host} printed\n{output}" for host, output in enumerate(outputs)]
    return text + "".join(of_hosts)
