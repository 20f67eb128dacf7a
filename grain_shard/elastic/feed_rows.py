"""The rows of one feed, in order, with a state after each; and what the rows of all look like."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from grain_shard.errors import ShardingError, StateError, describe_leaf
from grain_shard.trees import Batch, as_arrays, flatten, is_text

# Where a feed stands, as plain JSON: {} at its beginning, {"state": that of Grain's iterator}, or
# this once it has no row left.
Entry = Mapping[str, Any]
ENDED: Entry = {"ended": True}
MISSING = object()  # in the place of a row that a feed no longer has


class FeedReader:
    """Takes rows of one feed. Opened by the first row that is taken, in the thread that takes it.

    Args:
        make: Makes the feed's dataset.
        entry: Where to start.
    """

    def __init__(self, make: Callable[[], grain.IterDataset], entry: Entry):
        self._make, self._entry = make, entry
        self._iterator: grain.DatasetIterator | None = None
        self._ended = entry == ENDED

    def take(self, num_rows: int) -> list[Any]:
        """The next rows; fewer, or none, once the feed has ended.

        Raises:
            StateError: The feed cannot start from its entry.
        """
        rows: list[Any] = []
        if self._ended or not num_rows:
            return rows
        if self._iterator is None:
            self._iterator = self._open()
        for _ in range(num_rows):
            try:
                rows.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                self.close()
                break
        return rows

    def entry(self) -> Entry:
        """Where the feed stands now."""
        if self._ended:
            return ENDED
        return self._entry if self._iterator is None else {"state": self._iterator.get_state()}

    def close(self) -> None:
        """Ends the threads and processes of the feed's own pipeline."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def _open(self) -> grain.DatasetIterator:
        iterator = iter(self._make())
        if "state" in self._entry:
            try:
                iterator.set_state(self._entry["state"])
            except (KeyError, TypeError, IndexError) as error:
                raise StateError(
                    f"the feed cannot take this state: {type(error).__name__}: {error}.\n"
                    "  remedy: restore with the pipeline that saved it."
                ) from error
        return iterator


@contextlib.contextmanager
def named(feed: int, num_feeds: int) -> Iterator[None]:
    """Adds to an error the feed that it comes from."""
    try:
        yield
    except BaseException as error:
        name_feed(error, feed, num_feeds)
        raise


def name_feed(error: BaseException, feed: int, num_feeds: int) -> None:
    """Adds to an error the feed that it comes from; other hosts are told it, too."""
    error.add_note(f"grain_shard: in feed {feed} of {num_feeds}")


class _Like(NamedTuple):
    """What every row looks like."""

    structure: Any
    paths: list[str]
    zeros: list[np.ndarray]


class RowStacker:
    """Stacks the rows of feeds; all must look like the first one."""

    def __init__(self):
        self._lock = threading.Lock()  # several threads may learn
        self._like: _Like | None = None

    def stack(self, rows: Sequence[Any], feeds: Sequence[int]) -> Batch:
        """A batch of the rows, in arrays ``[len(rows), ...]`` that nothing else refers to.

        Args:
            rows: Trees of arrays and scalars; `MISSING` for a row of zeros.
            feeds: The feed that each comes from.

        Raises:
            ShardingError: A row has another tree, shape or dtype than the first one.
        """
        like = self._like
        assert like is not None, "no row has been seen yet"
        flat = []
        for row, feed in zip(rows, feeds, strict=True):
            leaves, structure = (like.zeros, like.structure)
            if row is not MISSING:
                leaves, structure = jax.tree.flatten(row)
            if structure != like.structure:
                _refuse_structure(like, row, feed)
            flat.append(leaves)
        columns = zip(*flat, strict=True)
        return like.structure.unflatten(
            [_stack_leaf(like, i, column, feeds) for i, column in enumerate(columns)]
        )

    def learn(self, row: Any) -> None:
        """Takes a row for the one that all must look like, if there is none yet.

        Raises:
            ShardingError: It cannot be a row.
        """
        with self._lock:
            if self._like is None:
                paths, leaves, _ = flatten(row)
                zeros = [np.zeros_like(array) for array in as_arrays(paths, leaves)]
                self._like = _Like(jax.tree.structure(row), paths, zeros)


def _stack_leaf(like: _Like, i: int, column: Sequence[Any], feeds: Sequence[int]) -> np.ndarray:
    zero = like.zeros[i]
    kinds = {(np.shape(value), getattr(value, "dtype", None)) for value in column}
    if kinds != {(zero.shape, zero.dtype)}:
        column = as_arrays([like.paths[i]] * len(column), column)
        for array, feed in zip(column, feeds, strict=True):
            # The dtype of text carries a width, which may differ from row to row.
            text = is_text(array) and is_text(zero)
            if array.shape != zero.shape or not (text or array.dtype == zero.dtype):
                raise ShardingError(
                    f"a row of feed {feed} has another shape or dtype than the first row that"
                    f" was read, {describe_leaf(zero)}.",
                    path=like.paths[i],
                    leaf=describe_leaf(array),
                    remedy="give all rows of all feeds one shape and dtype: pad or cast in .map.",
                )
    if zero.shape and not is_text(zero):
        # Not np.stack, which makes a view of each row first.
        return np.concatenate(column).reshape(len(column), *zero.shape)
    return np.stack(column)


def _refuse_structure(like: _Like, row: Any, feed: int) -> None:
    paths, leaves, _ = flatten(row)
    as_arrays(paths, leaves)  # a None is named by its path
    differing = sorted(set(paths) ^ set(like.paths))
    raise ShardingError(
        f"a row of feed {feed} is another tree than the first row that was read (only on one"
        f" side: {', '.join(differing) or 'the containers'}).",
        path=differing[0] if differing else None,
        remedy="return the same tree from every feed.",
    )
