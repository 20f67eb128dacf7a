"""What should come out, in plain Python and NumPy: which record is in which row of which batch.

A model hands out the rows of one batch after the other: a list of records, with None for a row of
padding. `batch_of` makes of it what a training step should get.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

Rows = list[Any]  # a record each, None for padding
Sizes = Mapping[int, int]  # from a step to the global batch size from there on


class Model(Protocol):
    """Where a pipeline begins, and from any place on its next batch."""

    start: Any
    like: Any  # some record, for the structure

    def next(self, place: Any, sizes: Sizes) -> tuple[Rows, Any] | None:
        """The rows of the next batch and the place after it; None at the end."""


def batches(model: Model, place: Any, sizes: Sizes) -> Iterator[tuple[Rows, Any]]:
    """All that follows a place: the rows of each batch, and the place after it."""
    while (found := model.next(place, sizes)) is not None:
        yield found
        _, place = found


def place_after(model: Model, whole: Sequence[tuple[Rows, Any]], count: int) -> Any:
    """Where one stands after so many of all batches."""
    return whole[count - 1][1] if count else model.start


def size_at(sizes: Sizes, step: int) -> int:
    steps = sorted(sizes)
    return sizes[steps[bisect.bisect_right(steps, step) - 1]]


class Place(NamedTuple):
    """The batches that were handed out, and the next record."""

    step: int
    epoch: int
    record: int


class RandomAccess:
    """Records in order, epoch by epoch, cut into batches.

    Args:
        ds: The records, of plain Grain.
        epochs: How many there are.
        drops: Whether a batch that is short is left out.
    """

    start = Place(0, 0, 0)

    def __init__(self, ds: Any, epochs: int, drops: bool):
        self._num_records, self._epochs, self._drops = len(ds), epochs, drops
        self._records = [ds[i] for i in range(epochs * len(ds))]
        self.like = self._records[0]

    def next(self, place: Place, sizes: Sizes) -> tuple[Rows, Place] | None:
        step, epoch, record = place
        size = size_at(sizes, step)
        while epoch < self._epochs:
            count = min(size, self._num_records - record)
            if count and (count == size or not self._drops):
                first = epoch * self._num_records + record
                rows = self._records[first : first + count]
                return rows + [None] * (size - count), Place(step + 1, epoch, record + count)
            epoch, record = epoch + 1, 0
        return None

    def without(self, is_bad: Sequence[bool]) -> RandomAccess:
        """The same with padding in the places of some records of an epoch."""
        model = copy.copy(self)
        model._records = [
            None if is_bad[i % self._num_records] else record
            for i, record in enumerate(self._records)
        ]
        return model

    def place_of(self, record: int, sizes: Sizes) -> Place | None:
        """Where a run is sent to that is to begin with a record, counted over all epochs."""
        before = self.start
        for _, after in batches(self, before, sizes):
            first = after.epoch * self._num_records
            if first <= record < first + after.record:
                return Place(after.step - 1, *divmod(record, self._num_records))
        return None


class Whole:
    """Batches that are known by their number alone: whatever plain Grain makes."""

    start = 0

    def __init__(self, whole: Sequence[Any], size: int):
        self._batches, self._size = whole, size
        self.like = rows_of(whole[0])[0]

    def next(self, place: int, sizes: Sizes) -> tuple[Rows, int] | None:
        if place == len(self._batches):
            return None
        rows = rows_of(self._batches[place])
        return rows + [None] * (self._size - len(rows)), place + 1


class Feeds:
    """As many rows from each feed for every batch, and padding for a feed that has ended.

    Args:
        rows: Of each feed, by plain Grain.
        drops: Whether the first feed that lacks a row ends all.
    """

    def __init__(self, rows: Sequence[Rows], drops: bool):
        self._rows, self._drops = rows, drops
        self.start = (0,) * len(rows)
        self.like = next((row for of_feed in rows for row in of_feed), None)

    def next(self, place: tuple[int, ...], sizes: Sizes) -> tuple[Rows, tuple[int, ...]] | None:
        each = sizes[0] // len(self._rows)
        taken = [of[at : at + each] for of, at in zip(self._rows, place, strict=True)]
        shortest = min(map(len, taken))
        if not any(taken) or (self._drops and shortest < each):
            return None
        rows = [row for of in taken for row in of + [None] * (each - len(of))]
        return rows, tuple(at + len(of) for at, of in zip(place, taken, strict=True))


def rows_of(batch: Any) -> Rows:
    leaves, tree = jax.tree.flatten(batch)
    return [
        jax.tree.unflatten(tree, [leaf[row] for leaf in leaves]) for row in range(len(leaves[0]))
    ]


class Made(NamedTuple):
    """How rows become a batch: the options of `.shard_to` of which its values depend."""

    multiple: int  # of the padded rows
    mask_key: str | None = "valid_mask"
    pad_value: Any = 0
    microbatches: int | None = None


def host_batch_of(rows: Rows, like: Any, made: Made) -> dict[str, Any]:
    """The whole padded batch, in NumPy's dtypes, ``[rows, ...]``."""
    rows = rows + [None] * (-len(rows) % made.multiple)
    batch = {name: stacked(rows, like, name, made.pad_value) for name in like}
    if made.mask_key is not None:
        batch[made.mask_key] = np.array([row is not None for row in rows])
    return batch


def stacked(rows: Rows, like: Any, name: str, pad_value: Any) -> Any:
    value = pad_value.get(name, 0) if isinstance(pad_value, Mapping) else pad_value

    def of_leaf(example: Any, *leaves: Any) -> np.ndarray:
        return np.stack([np.asarray(leaf) for leaf in leaves])

    def padding(leaf: Any) -> Any:
        return "" if isinstance(leaf, str) else np.full_like(np.asarray(leaf), value)

    pad = jax.tree.map(padding, like[name])
    return jax.tree.map(of_leaf, pad, *(pad if row is None else row[name] for row in rows))


def batch_of(rows: Rows, like: Any, made: Made) -> dict[str, Any]:
    """The global batch as it is on devices: their dtypes, and microbatches in front."""

    def of_leaf(leaf: np.ndarray) -> np.ndarray:
        if leaf.dtype.kind not in "US":
            leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if made.microbatches is None:
            return leaf
        return leaf.reshape(made.microbatches, -1, *leaf.shape[1:])

    return jax.tree.map(of_leaf, host_batch_of(rows, like, made))
