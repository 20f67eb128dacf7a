"""`WorkerProcesses`: Grain's worker processes, which always end, and whose errors reach the loop.

Grain's ``.mp_prefetch`` starts the processes, passes their arrays in shared memory, and frees both.
This module adds these things:

* An error of any class reaches the training loop. Some errors cannot be pickled, for example if
  their class is defined in the main script, or if they hold a lock. With Grain alone such an error
  is lost, and the loop hangs. An error that is not an `Exception` ends a worker of Grain alone, and
  appears only in that worker's log.
* Workers ignore the signals that a terminal or a scheduler sends to every process of a job, such as
  Ctrl-C, or the SIGTERM before a time limit. The loop may catch the signal and go on.
* A worker ends with the process that started it, even if that process is killed.
* A worker has the values of absl's flags.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import grain
import numpy as np

from grain_shard.errors import ShardingError, notes_of, noting, text_of
from grain_shard.grain_inside.flags import let_grain_read_its_flags
from grain_shard.threads.pickling import pickled, unpickled
from grain_shard.threads.producer import Producer

# A function that takes the number of a worker and the number of workers, and returns the worker's
# elements.
MakeElements = Callable[[int, int], Iterator[Any]]
# The remedy if a worker that imports the main script begins the loop, too.
_GUARD = (
    'put the loop of the main script under `if __name__ == "__main__":`, because each worker'
    " imports that script."
)
# In shared memory, each array of an element begins at a multiple of this many bytes.
_ALIGNMENT = 64
# Signals to a whole job. They are meant for the training script, so the workers ignore them.
_TO_THE_JOB = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
# An event for each unfinished call of `close`, which sets it at its end; and the most seconds that
# the interpreter's exit waits for each of them.
_closing: set[threading.Event] = set()
_EXIT_WAITS_S = 60.0


def _wait_until_closed() -> None:
    """Waits for the threads that are closing worker processes.

    At its own exit hook Grain closes its iterators, and fails if another thread closes one of them
    at the same time. With a higher priority, this hook runs before Grain's.
    """
    for ended in _closing.copy():
        ended.wait(_EXIT_WAITS_S)


multiprocessing.util.Finalize(None, _wait_until_closed, exitpriority=2)  # Grain's has 1


class WorkerProcesses(Producer[Any]):
    """The elements that worker processes make, taken from one worker after the other.

    The processes start with the first ``next``, by ``spawn``. An element is anything that can be
    pickled. Elements travel in shared memory.

    Args:
        make: Makes the elements of a worker. Each worker calls it for its first element.
        num_workers: Number of processes.
        buffer_size: The maximum number of elements of all workers together that wait or are
            unfinished. There may be more, because Grain keeps at least four elements for each
            worker.
    """

    def __init__(self, make: MakeElements, num_workers: int, *, buffer_size: int):
        refuse_in_worker()
        # For each worker Grain keeps 2 * per_worker + 2 elements: `per_worker` in the worker's
        # queue, `per_worker` in a queue of this process, one unfinished, and one on its way.
        per_worker = max(1, buffer_size // (2 * num_workers) - 1)
        self._make, self._is_closed = make, False
        self._options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=per_worker)
        self._elements: grain.DatasetIterator | None = None
        self._taken = 0

    def __next__(self) -> Any:
        """Returns the next element.

        Its arrays may be views of shared memory. The memory is freed together with the arrays.

        Raises:
            ShardingError: `make` cannot be pickled.
        """
        if self._is_closed:
            raise StopIteration
        elements = self._elements or self._started()
        try:
            with contextlib.nullcontext() if self._taken else _blocked_signals():
                packed, sizes = next(elements)
        except Exception as error:
            if (code := re.search(r"terminated .* exit code (-?\d+)", text_of(error))) is not None:
                error.add_note(f"grain_shard: {_why_it_ended(int(code[1]), self._taken > 0)}")
            raise
        self._taken += 1
        return _unpacked(packed, sizes)

    def _started(self) -> grain.DatasetIterator:
        let_grain_read_its_flags()
        share = _Share(pickled(self._make))
        self._elements = elements = iter(share.mp_prefetch(self._options, _begin_worker))
        return elements

    def close(self) -> None:
        """Ends the processes. The user's code in them has 25 seconds to return."""
        self._is_closed, elements, self._elements = True, self._elements, None
        if elements is not None:
            _closing.add(ended := threading.Event())
            try:
                with noting("while closing the worker processes"):
                    elements.close()
            finally:
                # Grain's iterators form reference cycles with the semaphores of their processes. If
                # these are garbage-collected while new semaphores are made, or while the
                # interpreter exits, the semaphores leak. So the cycles are collected now.
                del elements
                gc.collect()
                _closing.discard(ended)
                ended.set()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks signals to the job in the calling thread, and so in the processes that it starts.

    A worker unblocks the signals when it is ready to ignore them. Meanwhile other threads of the
    main process receive its signals.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_JOB)
    try:
        # The tracker of shared memory serves the workers, too, and unblocks signals at its start.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_JOB)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_worker(index: int, count: int) -> None:
    """Prepares a worker process. Grain calls it in each worker, before anything else."""
    let_grain_read_its_flags()
    for number in _TO_THE_JOB:
        # SIG_IGN would also hold in the programs that the user's functions start, such as ffmpeg.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # system calls go on after the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_JOB)
    threading.Thread(target=_end_with_parent, name="grain-shard-parent", daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # nobody else is left to end this worker


def _why_it_ended(exit_code: int, begun: bool) -> str:
    """Explains the exit code of a worker that ended before the loop did.

    Args:
        exit_code: A negative one is the number of the signal that killed the worker.
        begun: True if the workers have made an element.
    """
    if exit_code >= 0:  # the worker ended by itself
        if begun:
            return "a function or a library in the worker ended the process."
        if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
            return (
                "a worker ended before any batch. Each worker imports the main program from its"
                " file, and this program comes from standard input.\n  remedy: save the program"
                " to a file, and run that file."
            )
        return f"a worker ended before any batch. If no reason is above, {_GUARD}"
    names = {int(number): number.name for number in signal.Signals}
    killed = f"the signal {names.get(-exit_code, -exit_code)} killed the worker."
    if -exit_code == signal.SIGBUS:
        room = ""  # the size of the shared memory, where it can be asked for
        if os.path.isdir("/dev/shm"):
            shared = shutil.disk_usage("/dev/shm")
            room = f" It has {shared.total / 1e6:,.0f} MB, {shared.free / 1e6:,.0f} MB free now."
        return (
            f"{killed} Most likely the shared memory /dev/shm is full, in which batches travel."
            f"{room}\n  remedy: give the container more of it, by `docker run --shm-size=16g`, or"
            " in Kubernetes by a volume `emptyDir: {medium: Memory}` at /dev/shm. Or pass fewer"
            " num_workers or a smaller cpu_buffer_size."
        )
    if -exit_code == signal.SIGKILL:
        return (
            f"{killed} Most likely the machine or the container had no memory left: the kernel's"
            " log (`dmesg`) then has a line with 'oom'.\n  remedy: pass fewer num_workers or a"
            " smaller cpu_buffer_size, or allow more memory."
        )
    return (
        f"{killed} Most likely a library of the pipeline crashed in native code.\n  remedy: set"
        " PYTHONFAULTHANDLER=1, so that the worker prints where it crashed."
    )


def refuse_in_worker() -> None:
    """Raises a `ShardingError` in a worker that is importing the main script and so its loop."""
    main = sys.modules.get("__mp_main__")
    if main is not None and main is not sys.modules["__main__"]:
        raise ShardingError(
            "a worker process imported the main script, whose loop would start more workers.",
            remedy=_GUARD,
        )


class _Share(grain.IterDataset):
    """A dataset of the elements of one worker.

    Grain calls `set_slice` to pass the number of the worker and the number of workers.

    Args:
        make: The pickled function that makes the elements. Bytes, because Grain would copy the
            function for each worker.
    """

    def __init__(self, make: bytes):
        super().__init__()
        self._make, self._worker = make, (0, 1)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        self._worker = sl.start, sl.step

    def __iter__(self) -> _ShareIterator:
        return _ShareIterator(lambda: unpickled(self._make)(*self._worker))


class _ShareIterator(grain.DatasetIterator):
    """Yields the elements of one worker as bytes. Its errors can be sent to another process.

    It has no state, because `make` returns elements that begin at the right position.

    Args:
        make: Returns the elements. It is called only for the first element, because Grain also
            makes an iterator in the main process, from which it takes no element.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]):
        super().__init__()
        self._make = make
        self._elements: Iterator[Any] | None = None

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            self._elements = self._elements or self._make()
            return _packed(next(self._elements))
        except StopIteration:
            raise
        except BaseException as error:
            raise sendable_error(error) from None

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def _packed(element: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns an element as bytes, to be sent in shared memory.

    Grain sends arrays in shared memory, and everything else through a pipe, and a worker cannot end
    before the main process has read its pipe. So both results are arrays.

    Returns:
        The bytes of the element (its pickle, then its arrays) as uint8[n], and the number of bytes
        of each of these parts as an integer array.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(element, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(part, np.uint8) for part in (pickled, *(b.raw() for b in buffers))]
    sizes = np.array([len(part) for part in parts])
    starts = _starts(sizes)
    packed = np.empty(starts[-1], np.uint8)
    for start, part in zip(starts, parts, strict=False):
        packed[start : start + len(part)] = part
    return packed, sizes


def _unpacked(packed: np.ndarray, sizes: np.ndarray) -> Any:
    """Returns the element that `_packed` turned into bytes. Its arrays are views of these bytes."""
    ranges = zip(_starts(sizes), sizes, strict=False)
    pickled, *buffers = (packed[start : start + size].data for start, size in ranges)
    return pickle.loads(pickled, buffers=buffers)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Returns the start of each part in bytes, and the end of the last part, as an integer array.

    All of these numbers are multiples of `_ALIGNMENT`.

    Args:
        sizes: Bytes of each part, as an integer array.
    """
    return np.cumsum([0, *(-(-sizes // _ALIGNMENT) * _ALIGNMENT)])


def sendable_error(error: BaseException) -> BaseException:
    """Returns an error that can be sent to another process.

    That is the error itself if it is an `Exception` and can be pickled. Otherwise it is a
    RuntimeError with the class name, the text and the notes of the error. The cause of an error
    cannot be sent, so the traceback of the cause is added as a note.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        trace = "".join(traceback.format_exception(cause)).rstrip()
        error.add_note(f"grain_shard: the cause of this error, in a worker process:\n{trace}")
    if isinstance(error, Exception):  # any other error would end Grain's worker
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    substitute = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    for note in notes_of(error):
        substitute.add_note(note)
    return substitute.with_traceback(error.__traceback__)
