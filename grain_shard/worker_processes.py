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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, cast

import cloudpickle
import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.flags import mark_flags_as_parsed
from grain_shard.tasks import Producer, naming_closed

_GUARD = (
    'put the loop of the main script under if __name__ == "__main__": because each worker imports'
    " that script."
)
# Makes the elements of one worker, from its number and the number of workers.
MakeElements = Callable[[int, int], Iterator[Any]]
# An array that travels begins at a multiple of this many bytes.
_ALIGNMENT = 64


class WorkerProcesses(Producer[Any]):
    """The elements that worker processes make, taken from one worker after the other.

    The processes start with the first ``next``, by ``spawn``. An element is anything that can be
    pickled. Elements travel in shared memory.

    Args:
        make: Makes the elements of a worker. Each worker calls it for its first element.
        num_workers: Number of processes.
        buffer_size: Most elements of all workers together that wait or are in the making. Grain
            keeps at least four elements for each worker.
    """

    def __init__(self, make: MakeElements, num_workers: int, *, buffer_size: int):
        main = sys.modules.get("__mp_main__")
        if main is not None and main is not sys.modules["__main__"]:
            raise ShardingError(
                "a worker process imported the main script, whose loop would start more workers.",
                remedy=_GUARD,
            )
        # Grain keeps 2 * per_worker + 2 elements for each worker: in its queue and in another one
        # of this process, one that the worker makes and one that is on its way.
        per_worker = max(1, buffer_size // (2 * num_workers) - 1)
        self._make, self._is_closed = make, False
        self._options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=per_worker)
        self._elements: grain.DatasetIterator | None = None
        self._begun, self._failure = False, cast(TracebackType | None, None)

    def __next__(self) -> Any:
        """Returns the next element. Its arrays may lie in shared memory, which is freed with them.

        Raises:
            ShardingError: `make` cannot be pickled.
        """
        if self._is_closed:
            raise StopIteration
        if self._elements is None:
            mark_flags_as_parsed()
            share = _Share(pickled(self._make))
            self._elements = iter(share.mp_prefetch(self._options, _begin_worker))
        try:
            packed, sizes = next(self._elements)
        except Exception as error:
            self._failure = error.__traceback__
            if not self._begun and "Worker process was terminated" in str(error):
                error.add_note(
                    f"grain_shard: a worker ended before any batch. If no reason is above, {_GUARD}"
                )
            raise
        self._begun = True
        return _unpacked(packed, sizes)

    def close(self) -> None:
        """Ends the processes once the user's code returns; after 25 seconds in any case."""
        self._is_closed, elements, self._elements = True, self._elements, None
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


def pickled(pipeline: Any) -> bytes:
    """Pickles a pipeline for another process.

    Raises:
        ShardingError: It cannot be pickled.
    """
    try:
        return cloudpickle.dumps(pipeline)
    except Exception as error:
        raise ShardingError(
            f"the pipeline cannot be sent to a worker process: {type(error).__name__}: {error}.",
            remedy="open files, connections and locks in the worker: inside make_feed, or in the"
            " source's first read. An open file, connection or lock cannot be pickled.",
        ) from error


class _Share(grain.IterDataset):
    """The elements of one worker. Grain passes its number and the number of workers as a slice.

    Args:
        make: The function that makes the elements, pickled because Grain would otherwise copy it
            for each worker.
    """

    def __init__(self, make: bytes):
        super().__init__()
        self._make, self._worker = make, (0, 1)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        self._worker = sl.start, sl.step

    def __iter__(self) -> _ShareIterator:
        return _ShareIterator(lambda: pickle.loads(self._make)(*self._worker))


class _ShareIterator(grain.DatasetIterator):
    """Makes the elements, and errors that can be sent to another process.

    It has no state, because `make` knows where the elements begin.

    Args:
        make: Makes the elements. It is called only when the first element is asked for, because
            Grain makes an iterator in the loop's process, too.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]):
        super().__init__()
        self._make, self._elements = make, None

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            self._elements = self._elements or self._make()
            return _packed(next(self._elements))
        except StopIteration:
            raise
        except BaseException as error:
            raise sendable(error) from None

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def _packed(element: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of an element, its arrays last, and how many bytes each of these has.

    Both are arrays: a worker that is to end waits until its pipe has been read, and shared memory
    needs no such wait.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(element, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(part, np.uint8) for part in (pickled, *(b.raw() for b in buffers))]
    sizes = np.array([len(part) for part in parts])
    starts = _starts(sizes)
    packed = np.empty(starts[-1], np.uint8)
    for start, part in zip(starts, parts, strict=False):
        packed[start : start + len(part)] = part
    return packed, sizes


def _unpacked(packed: np.ndarray, sizes: np.ndarray) -> Any:
    ranges = zip(_starts(sizes), sizes, strict=False)
    pickled, *buffers = (packed[start : start + size].data for start, size in ranges)
    return pickle.loads(pickled, buffers=buffers)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Returns the start of each part, and the end of the last one, for parts of these sizes."""
    return np.cumsum([0, *(-(-sizes // _ALIGNMENT) * _ALIGNMENT)])


def sendable(error: BaseException) -> BaseException:
    """Returns the error with its cause as a note, or a RuntimeError with its text if it cannot go.

    The cause of an error is not sent along.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        told = "".join(traceback.format_exception(cause)).rstrip()
        error.add_note(f"grain_shard: the cause of this error, in a worker process:\n{told}")
    if isinstance(error, Exception):  # any other error would end Grain's worker
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told.with_traceback(error.__traceback__)
