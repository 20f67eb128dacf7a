"""The batches that one thread read alone, and their comparison with other ways to read them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.errors import ShardingError, StateError, describe_error, describe_leaf, shortened
from grain_shard.iteration.host_batches import HostBatches
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.random_access import ENDLESS
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.sharding.layout import BatchLayout
from grain_shard.tools.checking.values import same_values, shown_apart
from grain_shard.trees import Batch, flatten, is_text

# The limit of bytes of the batches that are kept for the comparison, and the number of batches that
# are kept even if they exceed it.
_BYTES, _LEAST = 2**30, 3
# An endless pipeline counts as one with this many batches.
_FAR = 10_000

Leaves = Mapping[str, np.ndarray]  # the leaves of a batch by path: [rows, ...], or scalars


def leaves_of(batch: Batch) -> Leaves:
    """Returns the leaves of a batch as arrays in host memory.

    Args:
        batch: A batch, on devices or on the host. Numbers on the host get the dtype that they would
            have on a device.
    """
    paths, leaves, _ = flatten(jax.device_get(batch))
    found: dict[str, np.ndarray] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        array = np.asarray(leaf)
        if not is_text(array):
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        found[path] = array
    return found


def rows_in(leaves: Leaves) -> int:
    """Returns the number of rows of a batch."""
    return next((len(array) for array in leaves.values() if array.ndim), 0)


class Difference(NamedTuple):
    """The first difference between two readings of one batch.

    Attributes:
        path: Path of the leaf; None for a whole record.
        row: Row of the batch; None if the whole leaf differs, in shape or dtype.
        got: The value of one reading, as text.
        alone: The value for one thread that read alone, as text.
        leaf: Dtype and shape of the leaf; "" for a whole record.
    """

    path: str | None
    row: int | None
    got: str
    alone: str
    leaf: str


def difference(got: Leaves, alone: Leaves, rows: np.ndarray | None = None) -> Difference | None:
    """Returns the first difference between two readings of a batch; None if they are the same.

    Args:
        got: The leaves of one reading, with all rows of the batch, or only some of them.
        alone: The leaves of the other reading, with all rows.
        rows: int64[n], the rows of the batch that `got` has, ascending; None for all.
    """
    for path in dict.fromkeys([*alone, *got]):  # the paths of both, each once
        a, b = got.get(path), alone.get(path)
        if a is None or b is None:
            present = describe_leaf(b if a is None else a)
            texts = ("no such leaf", present) if a is None else (present, "no such leaf")
            return Difference(path, None, *texts, present)
        if rows is not None and b.ndim:  # a scalar has no rows
            b = b[rows]
        if same_values(a, b):
            continue
        leaf = describe_leaf(b)
        if a.shape != b.shape or (a.dtype != b.dtype and not (is_text(a) and is_text(b))):
            return Difference(path, None, describe_leaf(a), leaf, leaf)
        if not a.ndim:
            return Difference(path, None, *shown_apart(a, b), leaf)
        row = next(i for i in range(len(a)) if not same_values(a[i : i + 1], b[i : i + 1]))
        batch_row = row if rows is None else int(rows[row])
        return Difference(path, batch_row, *shown_apart(a[row], b[row]), leaf)
    return None


def difference_of_records(got: Any, alone: Any) -> Difference:
    """Returns the difference between two readings of one record, which may be of any class."""
    with contextlib.suppress(Exception):  # a class that JAX and NumPy do not know
        a, b = leaves_of(got), leaves_of(alone)
        for path in [path for path in b if path in a]:
            if not same_values(a[path], b[path]):
                texts = shown_apart(a[path], b[path])
                return Difference(path, None, *texts, describe_leaf(b[path]))
    text = describe_error(got) if isinstance(got, Exception) else shortened(got)
    return Difference(None, None, text, shortened(alone), "")


class BatchRange(NamedTuple):
    """Consecutive batches, and the way to the first of them.

    Attributes:
        steps: Numbers of the batches.
        state: The state before the first of them, as JSON, to restore it; None to seek its number.
    """

    steps: range
    state: str | None = None


class Reference:
    """Batches of a pipeline that one thread has read alone, and the states before them.

    Args:
        alone: The pipeline.
        most: The maximum number of batches to read. If a batch is large, fewer are read.
        until: Time of `time.monotonic` after which no further batch is read.

    Attributes:
        batches: The leaves of each batch, by its number.
        states: The state before each batch, as JSON; None if the pipeline has no state.
        ranges: The batches that were read: the first ones, the last ones, and some in the middle.
        wanted: Number of batches that were to be read.

    Raises:
        ShardingError: The pipeline has no batch.
    """

    def __init__(self, alone: ShardedDataset, most: int, until: float):
        self.batches: dict[int, Leaves] = {}
        self.states: dict[int, str | None] = {}
        with iter(alone) as batches:
            if not self._read(batches, range(1), math.inf):
                raise ShardingError(
                    "the pipeline has no batch to check.",
                    remedy="check that the source has records, and that a .filter keeps some.",
                )
            size = sum(array.nbytes for array in self.batches[0].values()) or 1
            windows = _windows(alone.num_batches(), min(most, max(_LEAST, _BYTES // size)))
            self.wanted: int = sum(map(len, windows))
            read = [BatchRange(self._read(batches, window, until)) for window in windows]
        # A range is empty if the time ran out before its first batch.
        self.ranges: list[BatchRange] = [some for some in read if some.steps]

    def _read(self, batches: ShardedIterator, window: range, until: float) -> range:
        """Reads the batches of a window. Returns the numbers of the batches that were read."""
        for step in window:
            if step in self.batches:  # the first batch, which was read to learn its size
                continue
            if time.monotonic() > until:
                return range(window.start, step)
            if step and step == window.start:
                batches.seek(step)
            state, batch = _state(batches), next(batches, None)
            if batch is None:  # the end of a stream, which has fewer batches
                self.wanted = step
                return range(window.start, step)
            self.batches[step], self.states[step] = leaves_of(batch), state
        return window

    @property
    def batch_rows(self) -> int:
        """Number of rows of the first batch, with padding."""
        return rows_in(self.batches[0])

    def name(self, step: int, row: int | None) -> str:
        """Returns the name of a row, or of a batch, in messages."""
        batch, text = f"batch {step:,}", self.states[step]
        state = {} if text is None else json.loads(text)
        if row is None or "record" not in state:
            return batch if row is None else f"row {row:,} of {batch}"
        record = state["record"] + row
        return f"record {record:,} of epoch {state['epoch']} (row {row:,} of {batch})"

    def restores(self) -> list[BatchRange]:
        """Returns the second half of each range, to be reached by a restore; [] without states."""
        halves = [steps[len(steps) // 2 :] for steps, _ in self.ranges]
        found = [BatchRange(half, self.states[half.start]) for half in halves]
        return [some for some in found if some.state is not None]


def _state(batches: ShardedIterator) -> str | None:
    try:
        return json.dumps(batches.get_state())
    except StateError:
        return None


def _windows(num_batches: int | None, most: int) -> list[range]:
    """Returns numbers of batches to read: the first ones, the last ones, and some in the middle.

    Args:
        num_batches: Number of batches in all; None if unknown. Then only the first ones are read.
        most: The maximum number of batches to read.
    """
    if num_batches is None or num_batches <= most:
        return [range(most if num_batches is None else num_batches)]
    end = min(num_batches, _FAR) if num_batches > ENDLESS else num_batches
    last, middle = most // 4, most // 4
    first = most - last - middle
    start = min(max(first, (end - middle) // 2), end - last - middle)
    windows = range(first), range(end - last, end), range(start, start + middle)
    return [window for window in windows if window]


class Comparison:
    """Compares batches with the reference, until one differs or time runs out.

    Args:
        reference: The batches that one thread read alone.
        until: Time of `time.monotonic` after which no further batch is read.

    Attributes:
        step: The number of the last batch that was compared.
        found: The difference of this batch, which ends the comparison; None if there is none.
        batches: Number of batches that were compared.
        rows: Number of rows that were compared.
        wanted: Number of batches to compare.
    """

    def __init__(self, reference: Reference, until: float):
        self.reference, self.until = reference, until
        self.step = 0
        self.found: Difference | None = None
        self.batches = self.rows = self.wanted = 0

    def add(self, step: int, leaves: Leaves | None, rows: np.ndarray | None = None) -> bool:
        """Compares one batch. Returns True to go on with the next one.

        Args:
            step: The number of the batch.
            leaves: Its leaves; None if the pipeline ended.
            rows: int64[n], the rows of the batch that are in `leaves`; None for all.
        """
        alone = self.reference.batches[step]
        if leaves is None:
            self.found = Difference("batch", None, "the end", "a batch", "")
        else:
            self.found = difference(leaves, alone, rows)
            self.rows += rows_in(leaves)
        self.batches += 1
        self.step = step
        return self.found is None and time.monotonic() < self.until

    def read(self, ds: ShardedDataset, ranges: Sequence[BatchRange] | None = None) -> None:
        """Reads ranges of batches, by default the ranges of the reference, and compares them."""
        ranges = self.reference.ranges if ranges is None else ranges
        self.wanted = sum(len(steps) for steps, _ in ranges)
        with iter(ds) as batches:
            for steps, state in ranges:
                if state is not None:
                    batches.set_state(json.loads(state))
                elif steps.start:
                    batches.seek(steps.start)
                for step in steps:
                    batch: Any = next(batches, None)
                    leaves = None if batch is None else leaves_of(batch)
                    del batch  # or the devices would hold one batch more than the user allows
                    if not self.add(step, leaves):
                        return

    def read_host(self, host: HostBatches, layout: BatchLayout) -> bool:
        """Reads the batches of one host, and compares them with its rows of the global batches.

        Args:
            host: The batches of the host.
            layout: The rows that the host holds.

        Returns:
            True to go on with the next host.
        """
        full_rows = self.reference.batch_rows
        sizes_vary = bool(host.host_batch_sizes)  # empty if all full batches have one size
        for steps, _ in self.reference.ranges:
            self.wanted += len(steps)
            start = host.position_at(step=steps.start, record=None) if steps.start else None
            opened = host.open(start)  # its batches are pairs (batch, position)
            try:
                for step in steps:
                    item = next(opened.batches, None)
                    if item is None and host.ends_by_vote:
                        break  # this host has no rows left, and in a job would only add padding
                    num_rows = rows_in(self.reference.batches[step])
                    # A short last batch has the shards of a full batch, whose last rows it lacks.
                    # With several batch sizes each batch has shards of its own size.
                    rows = layout.rows(num_rows if sizes_vary else full_rows)
                    leaves = None if item is None else leaves_of(item[0])
                    if not self.add(step, leaves, rows[rows < num_rows]):
                        return False
            finally:
                opened.batches.close()
        return True

    def __str__(self) -> str:
        if not self.batches:
            return ""
        cut = f" of {self.wanted:,}" if self.batches < self.wanted else ""
        noun = "batch" if self.batches == 1 and not cut else "batches"
        return f"{self.batches:,}{cut} {noun}, {self.rows:,} rows"
