"""Batches made by a `concurrent.futures.Executor`: in other processes, or on other machines.

A task is the number of a batch and the pickled pipeline, which holds no mesh and no device. A
worker keeps the pipelines that it has unpickled, with their open files, for its next tasks.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import threading
import time
from concurrent.futures import CancelledError, Executor, Future

from absl import logging

from grain_shard.errors import GrainShardError, describe_error
from grain_shard.host_arrays import owned
from grain_shard.interrupts import Bell
from grain_shard.reading.batching import Batching
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.spans import READ, TASK, WORK, Span, record, span
from grain_shard.tasks import Producer, Raised
from grain_shard.trees import Batch
from grain_shard.worker_processes import pickled, sendable

# The pause before a lost task is submitted again, in seconds: another worker may have to start.
_PAUSE_S = 1.0
# A pipeline of some kB is sent along with each task; one that is larger than this holds its data.
_LARGE_BYTES = 2**20
# Pipelines that a worker keeps.
_KEPT = 8

# A batch, the counts of failed reads, and the seconds that it took the worker of this name.
Made = tuple[Batch, FaultCounts, float, str] | BaseException


class ExecutorBatches(Producer[int]):
    """A producer of batch numbers, and the function that has an executor make each batch.

    Args:
        executor: Runs the tasks. It is left as it is: the user shuts it down.
        batching: This host's batches.
        indices: The numbers of the batches.
        rules: The rules for failed reads. A task whose worker was lost is submitted again as often
            as a failed read is tried again.
        faults: Receives the counts of the workers.
    """

    def __init__(
        self,
        executor: Executor,
        batching: Batching,
        indices: range,
        rules: FaultRules,
        faults: Faults,
    ):
        self._executor, self._indices, self._faults = executor, iter(indices), faults
        self._name = type(executor).__name__
        self._pipeline = pickled((batching, rules))
        if len(self._pipeline) > _LARGE_BYTES:
            logging.warning(
                "grain_shard: each task for the executor carries the whole pipeline, %.1f MB. To"
                " send less, let the source read files that every worker can open, instead of"
                " arrays in memory.",
                len(self._pipeline) / 1e6,
            )
        self._tries = 1 + rules.times
        self._is_stopped = False
        self._changed = Bell()  # rung when a task is done, and when the batches are stopped

    def __next__(self) -> int:
        return next(self._indices)

    def stop(self) -> None:
        self._is_stopped = True
        self._changed.ring()

    def made(self, index: int) -> Batch:
        """Returns a batch in arrays without other references; several threads may call it.

        Raises:
            GrainShardError: The executor takes no task, or has lost this one too often.
            BaseException: The error of the batch, as the worker raised it.
        """
        tries = 0
        while True:
            future, tries = self._submitted(index), tries + 1
            try:
                with span(READ, part=TASK):
                    found = self._result(future)
                break
            except Exception as error:  # of the executor: a task returns its own
                if self._is_stopped or tries == self._tries:
                    raise GrainShardError(
                        f"the executor {self._name} did not make batch {index} (tries: {tries}):"
                        f" {describe_error(error)}\n  remedy: check that the executor's workers"
                        " run, have enough memory, and can import grain_shard and the modules of"
                        " the pipeline."
                    ) from error
                logging.warning(
                    "grain_shard: the executor lost batch %d. The batch is submitted again (try %d"
                    " of %d): %s",
                    index,
                    tries + 1,
                    self._tries,
                    describe_error(error),
                )
                self._changed.wait_for(lambda: self._is_stopped, _PAUSE_S)
        if isinstance(found, BaseException):
            raise found
        batch, counts, seconds, worker = found
        self._faults.add(counts)
        now = time.perf_counter()
        record(Span(WORK, worker, now - seconds, now))
        return owned(batch)

    def _submitted(self, index: int) -> Future[Made]:
        try:
            return self._executor.submit(make_batch, self._pipeline, index)
        except Exception as error:
            raise GrainShardError(
                f"the executor {self._name} accepts no task: {describe_error(error)}\n"
                "  remedy: shut the executor down only after the iterator is closed. If its workers"
                " died, make a new executor, and pass set_state() the iterator's last get_state()."
            ) from error

    def _result(self, future: Future[Made]) -> Made:
        future.add_done_callback(lambda _: self._changed.ring())
        self._changed.wait_for(lambda: self._is_stopped or future.done())
        if not future.done():
            future.cancel()
            raise CancelledError
        return future.result()


def make_batch(pipeline: bytes, index: int) -> Made:
    """Makes one batch, in a worker; returns it with facts about its making, or its error."""
    start, process = time.perf_counter(), f"process {os.getpid()} of {socket.gethostname()}"
    try:
        batching, rules = _unpickled(pipeline)
        batch, counts = counted_batch(batching, rules, index)
    except Exception as error:
        error.add_note(f"grain_shard: in {process}")
        return sendable(error)
    worker = f"thread {threading.get_ident()} of {process}"
    return batch, counts, time.perf_counter() - start, worker


def counted_batch(batching: Batching, rules: FaultRules, index: int) -> tuple[Batch, FaultCounts]:
    """Reads a batch in a worker; returns it with the counts of reads that failed."""
    faults = Faults(rules, is_worker=True)
    try:
        return batching.read_batch(index, faults), faults.counts()
    except StopIteration as error:
        Raised.of(error).throw()  # StopIteration would end the data of the worker


@functools.lru_cache(_KEPT)
def _unpickled(pipeline: bytes) -> tuple[Batching, FaultRules]:
    return pickle.loads(pipeline)
