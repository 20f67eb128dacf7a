"""Grain's worker processes, with an end, an interrupt and errors that arrive.

Grain's ``.mp_prefetch`` starts the processes, hands their arrays over in shared memory, and frees
both. Three things are added here:

* An error reaches the loop whatever its class. One that cannot be pickled (its class stands in the
  program itself, say, or it holds a lock) would be lost on the way, and the loop would hang. An
  error that is no Exception would end the worker, and only its log would have it.
* Ctrl-C is the loop's alone. A terminal sends it to the workers, too, each of which would die with
  a traceback of its own, although the loop may catch it and go on.
* A worker ends with the process that started it, also if that is killed.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.flags import mark_flags_as_parsed
from grain_shard.tasks import Producer, naming_closed

_GUARD = (
    'put the loop of the script below if __name__ == "__main__":, as spawned processes need it.'
)


class WithNote(NamedTuple):
    """An element of a worker process: arrays, and a note about them.

    Attributes:
        arrays: A tree of arrays, each of which travels in shared memory of its own.
        note: Anything that is no array, pickled, as ``uint8[n]``; None for no note. A worker that
            is to end waits until its pipe has been read, and shared memory needs no such wait.
    """

    arrays: Any
    note: np.ndarray | None = None

    @classmethod
    def of(cls, arrays: Any, note: Any) -> WithNote:
        """Puts both together; no note if it is None."""
        return cls(arrays, None if note is None else np.frombuffer(pickle.dumps(note), np.uint8))


class WorkerProcesses(Producer[tuple[Any, Any]]):
    """The elements that worker processes make of a dataset: the next one of each worker in turn.

    They start with the first ``next``, by ``spawn``.

    Args:
        ds: Yields `WithNote`. With several workers, Grain gives each its share by ``set_slice``.
        num_workers: How many processes.
        buffer_size: Elements that may wait or be in the making, of all workers together. Grain
            keeps four for each of them at least.
    """

    def __init__(self, ds: grain.IterDataset, num_workers: int, *, buffer_size: int):
        main = sys.modules.get("__mp_main__")
        if main is not None and main is not sys.modules["__main__"]:
            raise ShardingError(
                "a worker process imports the main script, whose loop would start workers again.",
                remedy=_GUARD,
            )
        mark_flags_as_parsed()
        # Grain keeps 2 * per_worker + 2 elements for each worker: in its queue and in another one
        # of this process, one that the worker makes and one that is on its way.
        per_worker = max(1, buffer_size // (2 * num_workers) - 1)
        options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=per_worker)
        self._begun, self._failure = False, cast(TracebackType | None, None)
        elements = iter(_SendableErrors(ds).mp_prefetch(options, _begin_worker))
        self._elements: grain.DatasetIterator | None = elements

    def __next__(self) -> tuple[Any, Any]:
        """Returns the next arrays and their note, or None for no note.

        The arrays may lie in shared memory, which is freed with them.
        """
        if self._elements is None:
            raise StopIteration
        try:
            arrays, note = next(self._elements)
        except Exception as error:
            self._failure = error.__traceback__
            if not self._begun and "Worker process was terminated" in str(error):
                error.add_note(
                    f"grain_shard: it ended before any batch. If no reason is above, {_GUARD}"
                )
            raise
        self._begun = True
        return arrays, None if note is None else pickle.loads(note.tobytes())

    def close(self) -> None:
        """Ends the processes once the user's code returns; after 25 seconds in any case."""
        elements, self._elements = self._elements, None
        if elements is not None:
            with naming_closed("the worker processes"):
                elements.close()
            # The frames of an error refer to those of Grain's threads, whose variables may hold the
            # arrays of an element. Shared memory that lives as long as the error would leak.
            for frame, _ in traceback.walk_tb(self._failure):
                for caller, _ in traceback.walk_stack(frame):
                    with contextlib.suppress(RuntimeError):  # it still runs
                        caller.clear()
            # Grain's iterators are in reference cycles, with the semaphores of their processes. If
            # the collector finds those while others are being made, they leak.
            del elements
            gc.collect()


def _begin_worker(index: int, count: int) -> None:
    """Called by Grain in each worker, before anything else."""
    mark_flags_as_parsed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="grain-shard-parent", daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # no loop is left to end the worker


class _SendableErrors(grain.IterDataset):
    """The same elements; their errors can be sent to another process."""

    def __init__(self, parent: grain.IterDataset):
        super().__init__(parent)

    def __iter__(self) -> grain.DatasetIterator:
        (parent,) = self.parents
        return _SendableErrorsIterator(iter(parent))


class _SendableErrorsIterator(grain.DatasetIterator):
    def __init__(self, source: grain.DatasetIterator):
        super().__init__(source)
        self._source = source

    def __next__(self) -> Any:
        try:
            return next(self._source)
        except StopIteration:
            raise
        except BaseException as error:
            raise sendable(error) from None

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)


def sendable(error: BaseException) -> BaseException:
    """Returns the error, with its cause as a note; or one that says the same, if it cannot be sent.

    The cause of an error is not sent along.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        told = "".join(traceback.format_exception(cause)).rstrip()
        error.add_note(f"grain_shard: it was raised from, in a worker process:\n{told}")
    if isinstance(error, Exception):  # of any other, Grain's worker dies
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told.with_traceback(error.__traceback__)
