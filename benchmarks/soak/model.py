"""Models of pipelines in plain Python and NumPy: the record in each row of each batch.

A model gives the rows of one batch after the other: a list of records, with None for a row of
padding. `batch_of` turns these rows into the batch that a training step should get.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

Rows = list[Any]  # a record for each row; None for a row of padding
Sizes = Mapping[int, int]  # the global batch size by the first step that it holds for


class Model(Protocol):
    """A model of a pipeline. A place is a position between two batches, in a form of the model.

    Attributes:
        start: The place before the first batch.
        like: Any record, as an example of the structure.
    """

    start: Any
    like: Any

    def next(self, place: Any, sizes: Sizes) -> tuple[Rows, Any] | None:
        """Returns the rows of the batch after a place, and the next place; None at the end."""


def batches(model: Model, place: Any, sizes: Sizes) -> Iterator[tuple[Rows, Any]]:
    """Yields, for each batch after a place, its rows and the place after it."""
    while (found := model.next(place, sizes)) is not None:
        yield found
        _, place = found


def place_after(model: Model, whole: Sequence[tuple[Rows, Any]], count: int) -> Any:
    """Returns the place after the first `count` batches of `whole`, which has all batches."""
    return whole[count - 1][1] if count else model.start


def size_at(sizes: Sizes, step: int) -> int:
    steps = sorted(sizes)
    return sizes[steps[bisect.bisect_right(steps, step) - 1]]


class Place(NamedTuple):
    """A place of random access: the number of batches so far, and the epoch and record to come."""

    step: int
    epoch: int
    record: int


class RandomAccess:
    """The model of random access: records in order, epoch by epoch, cut into batches.

    Args:
        ds: The records, a plain Grain dataset.
        epochs: Number of epochs.
        drops: True to leave out short batches.
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
        """Returns the same model with padding in place of bad records.

        Args:
            is_bad: For each record of an epoch, True if it is bad.
        """
        model = copy.copy(self)
        model._records = [
            None if is_bad[i % self._num_records] else record
            for i, record in enumerate(self._records)
        ]
        return model

    def place_of(self, record: int, sizes: Sizes) -> Place | None:
        """Returns the place to which ``seek(record=...)`` leads; None if no batch has the record.

        Args:
            record: Index of the record, counted over all epochs.
            sizes: The batch sizes.
        """
        before = self.start
        for _, after in batches(self, before, sizes):
            first = after.epoch * self._num_records
            if first <= record < first + after.record:
                return Place(after.step - 1, *divmod(record, self._num_records))
        return None


class Whole:
    """The model of batches that plain Grain has made. A place is the number of a batch.

    Args:
        whole: All batches.
        size: Rows of a full batch, to which short ones are padded.
    """

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
    """The model of feeds: each feed gives the same number of rows to every batch.

    A feed that has ended gives padding. A place has the number of rows taken from each feed.

    Args:
        rows: The rows of each feed, made by plain Grain.
        drops: True if all feeds end as soon as one feed lacks a row.
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
    """The options of `.shard_to` on which the values of a batch depend."""

    multiple: int  # divides the number of padded rows
    mask_key: str | None = "valid_mask"
    pad_value: Any = 0


def host_batch_of(rows: Rows, like: Any, made: Made) -> dict[str, Any]:
    """Returns the whole padded batch as numpy arrays ``[rows, ...]``, in the records' dtypes.

    Args:
        rows: The records; None for a row of padding.
        like: Any record, as an example of the structure.
        made: The options.
    """
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
    """Returns the global batch as it should be on devices, as numpy arrays of JAX's dtypes."""

    def of_leaf(leaf: np.ndarray) -> np.ndarray:
        if leaf.dtype.kind in "US":
            return leaf
        return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(of_leaf, host_batch_of(rows, like, made))
