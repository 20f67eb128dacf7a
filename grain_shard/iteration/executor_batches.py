"""Batches made by a `concurrent.futures.Executor`: in other processes, or on other machines.

Each task carries the number of a batch and the pipeline. The pipeline holds no mesh and no device.
In another process the pipeline is a copy. A worker keeps the copies, with their open files, for
later tasks.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import threading
import time
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

import cloudpickle
import jax
from absl import logging

from grain_shard.errors import GrainShardError, Raised, describe_error
from grain_shard.host_arrays import owned
from grain_shard.reading.batching import Batching
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.spans import READ, TASK, WORK, Span, record, span
from grain_shard.threads.pickling import pickled, unpickled
from grain_shard.threads.producer import Producer
from grain_shard.threads.worker_processes import sendable_error
from grain_shard.trees import Batch

# Seconds before a lost task is submitted again, because another worker may have to start first.
_PAUSE_S = 1.0
# A pickled pipeline of more bytes than this gives a warning, because each task carries the
# pipeline. Most likely the source holds the data itself. A pipeline that reads files has some kB.
_LARGE_BYTES = 2**20
# The maximum number of unpickled pipelines that a worker keeps.
_KEPT = 8

# The result of a task: the leaves of a batch, its structure, counts of failed reads, the seconds of
# work, and the name of the worker; or the pipeline's error. Another process sends the structure as
# bytes, because most executors cannot send a class of the main script, such as a NamedTuple.
Made = tuple[list[Any], Any, FaultCounts, float, str] | BaseException


class ExecutorBatches(Producer[int]):
    """Batches that an executor makes.

    As a producer it hands out only the numbers of the batches. The threads that get a number call
    `made`, which gets the batch from the executor.

    Args:
        executor: Runs the tasks. The user shuts it down.
        batching: This host's batches.
        indices: The numbers of the batches.
        faults: Adds up the failed reads that the workers count, and has the rules for them. A task
            whose worker was lost is submitted again as often as a failed read is tried again.
    """

    def __init__(self, executor: Executor, batching: Batching, indices: range, faults: Faults):
        self._executor, self._indices, self._faults = executor, iter(indices), faults
        self._name = type(executor).__name__
        pipeline = batching, faults.rules
        packed = pickled(pipeline)
        self._pipeline = _Pipeline(packed, pipeline)
        if len(packed) > _LARGE_BYTES:
            logging.warning(
                "grain_shard: each task for the executor carries the whole pipeline, %.1f MB. To"
                " send less, let the source read files that every worker can open, instead of"
                " arrays in memory.",
                len(packed) / 1e6,
            )
        self._tries = 1 + faults.rules.times
        self._is_stopped = False
        self._changed = threading.Condition()  # a task is done, or the batches are stopped

    def __next__(self) -> int:
        return next(self._indices)

    def stop(self) -> None:
        self._is_stopped = True
        self._notify()

    def _notify(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def made(self, index: int) -> Batch:
        """Has the executor make a batch, and waits for it. Several threads may call this at once.

        If the executor loses the task, the task is submitted again after a pause.

        Args:
            index: The number of the batch.

        Returns:
            The batch. No other object refers to its arrays.

        Raises:
            GrainShardError: The executor refuses the task, or has lost it in every try; or the
                batches were stopped.
            BaseException: The error that the pipeline raised in the worker.
        """
        tries = 0
        while True:
            future, tries = self._submitted(index), tries + 1
            try:
                with span(READ, part=TASK):
                    made = self._result(future)
                break
            except Exception as error:  # of the executor: a task returns the pipeline's errors
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
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopped, _PAUSE_S)
        if isinstance(made, BaseException):
            raise made
        leaves, structure, counts, seconds, worker = made
        self._faults.add(counts)
        # The clock of another process is not this one's, so the work counts as ending now.
        now = time.perf_counter()
        record(Span(WORK, worker, now - seconds, now))
        if isinstance(structure, bytes):  # from another process; see `Made`
            structure = pickle.loads(structure)
        return owned(structure.unflatten(leaves))

    def _submitted(self, index: int) -> Future[Made]:
        try:
            return self._executor.submit(make_batch, self._pipeline, index)
        except Exception as error:
            raise GrainShardError(
                f"the executor {self._name} accepts no task: {describe_error(error)}\n"
                "  remedy: close the iterator before you shut the executor down. If the executor's"
                " workers died, pass a new executor to .shard_to, make a new iterator, and pass its"
                " set_state() the last state of this iterator."
            ) from error

    def _result(self, future: Future[Made]) -> Made:
        future.add_done_callback(self._notify)
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or future.done())
        if not future.done():
            future.cancel()
            raise CancelledError
        return future.result()


class _Pipeline:
    """The pipeline of a task. Threads of this process use it as it is, other workers a copy.

    Args:
        packed: The pickled pair (batches, rules for failed reads).
        pair: The pair itself; None in a copy.
    """

    def __init__(self, packed: bytes, pair: tuple[Batching, FaultRules] | None = None):
        self._packed, self._pair, self.is_here = packed, pair, pair is not None

    def opened(self) -> tuple[Batching, FaultRules]:
        return self._pair or _kept(self._packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pipeline, (self._packed,)


def make_batch(pipeline: _Pipeline, index: int) -> Made:
    """Makes one batch in a worker of the executor; see `Made` for the result."""
    start, process = time.perf_counter(), f"process {os.getpid()} of {socket.gethostname()}"
    try:
        batch, counts = counted_batch(*pipeline.opened(), index)
        leaves, structure = jax.tree.flatten(batch)
    except Exception as error:
        error.add_note(f"grain_shard: in {process}")
        return error if pipeline.is_here else sendable_error(error)
    worker = f"thread {threading.get_ident()} of {process}"
    if not pipeline.is_here:
        structure = cloudpickle.dumps(structure)
    return leaves, structure, counts, time.perf_counter() - start, worker


def counted_batch(batching: Batching, rules: FaultRules, index: int) -> tuple[Batch, FaultCounts]:
    """Reads a batch in a worker; returns it with the counts of failed reads.

    Raises:
        BaseException: The error of the pipeline. A StopIteration becomes a RuntimeError, because it
            would end the worker.
    """
    faults = Faults(rules, is_worker=True)
    try:
        return batching.read_batch(index, faults), faults.counts()
    except StopIteration as error:
        Raised.of(error).throw()  # as a RuntimeError


@functools.lru_cache(_KEPT)
def _kept(packed: bytes) -> tuple[Batching, FaultRules]:
    return unpickled(packed)
