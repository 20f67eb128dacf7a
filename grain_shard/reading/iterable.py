"""`from_iterable`: the batches of any loader as a stream for Grain's nodes and the chain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import grain
import jax
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.host_arrays import owned
from grain_shard.reading.state_json import NoState
from grain_shard.trees import Batch, leaves_of

Rows = Literal["global", "local"]


def from_iterable(
    source: Iterable[Batch] | Callable[[], Iterable[Batch]], *, rows: Rows | None = None
) -> grain.IterDataset:
    """Returns a stream of a loader's batches, for a ``.shard_to(mesh)`` to follow.

    The loader may be a `grain.DataLoader`, a PyTorch ``DataLoader``, ``as_numpy_iterator`` of
    tf.data, a list or a generator. The stream is padded, placed and prefetched like any other. On
    several hosts the streams end together, and an error is raised if hosts that should yield
    different rows yield the same rows.

    Example:
        >>> import numpy as np
        >>> def make_batches():
        ...     for i in range(2):
        ...         yield {"x": np.arange(4 - i) + 10 * i}
        >>> for batch in from_iterable(make_batches):
        ...     print(batch["x"])
        [0 1 2 3]
        [10 11 12]

    Args:
        source: An iterable of batches, which are trees of numpy arrays or of objects that numpy can
            convert (PyTorch's tensors); or a function that returns such an iterable, such as a
            generator function. Every pass asks a loader for a new iterator, and a function for a
            new iterable. An iterator or generator is used as it is, so it allows one pass. Arrays
            are copied, so their maker may fill them again.
        rows: The rows that each of several hosts yields. "local": the rows of the host's own
            devices, as from a loader with a sampler for each process. "global": the same whole
            batches on every host. On one host both are the same, and None is enough.

    Returns:
        A `grain.IterDataset`. Its iterators have a state if the source's iterators have
        ``get_state`` and ``set_state``, as the iterators of a `grain.DataLoader` do.

    Raises:
        ShardingError: `rows` is something else, or the source is a Grain dataset.
        TypeError: The source cannot be iterated over.
    """
    if rows not in ("global", "local", None):
        raise ShardingError(
            f"rows={rows!r} is not one of global, local.",
            remedy='say what each host yields: "local" for the rows of its own devices, "global"'
            " for the same whole batches.",
        )
    if isinstance(source, grain.MapDataset | grain.IterDataset):
        raise ShardingError(
            f"a {type(source).__name__} is a Grain dataset already.",
            remedy="call .shard_to(mesh) on it; a stream takes rows= there.",
        )
    if not (hasattr(source, "__iter__") or hasattr(source, "__getitem__") or callable(source)):
        raise TypeError(
            f"a {type(source).__name__} is not iterable; pass an iterable of batches, or a function"
            " that makes one."
        )
    return IterableBatches(source, rows)


class IterableBatches(grain.IterDataset):
    """The dataset that `from_iterable` makes.

    Args:
        source: As for `from_iterable`.
        rows: As for `from_iterable`.

    Attributes:
        has_begun: True once a pass over it has begun.
        in_use: The lock that is held during each ``next``.
        has_one_pass: True if an element that one iterator took is gone for the others.
    """

    def __init__(self, source: Any, rows: Rows | None):
        super().__init__()
        self._source, self.rows = source, rows
        self.has_begun: bool = False
        self.in_use: threading.Lock = threading.Lock()
        self.has_one_pass: bool = isinstance(source, Iterator)
        self._can_go_back = self.has_one_pass and _is_stateful(source)
        # An iterator that can go back to its beginning allows further passes.
        self._beginning = copy.deepcopy(source.get_state()) if self._can_go_back else None

    def require_new_pass(self) -> None:
        """Refuses another pass over an iterator that cannot go back.

        Raises:
            ShardingError: A pass over it has begun.
        """
        if self.has_begun and self.has_one_pass and not self._can_go_back:
            raise ShardingError(
                f"{self} can be gone through only once, and a pass over it has begun: another would"
                " miss the batches that were taken.",
                remedy="pass a function that makes the iterator, as in"
                " from_iterable(make_batches, ...).",
            )

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        rows = f", rows={self.rows!r}" if self.rows else ""
        return f"from_iterable({type(self._source).__name__}{rows})"

    def __iter__(self) -> grain.DatasetIterator:
        self.require_new_pass()
        if self.has_begun and self._can_go_back:
            with self.in_use:
                self._source.set_state(copy.deepcopy(self._beginning))
        iterable = hasattr(self._source, "__iter__") or hasattr(self._source, "__getitem__")
        iterator = iter(self._source if iterable else self._source())
        name = type(self._source if iterable else iterator).__name__
        return _Batches(iterator, name, self, is_own=iterator is not self._source)


class _Batches(grain.DatasetIterator):
    """Adapts any iterator to the interface of Grain's iterators.

    Args:
        iterator: The iterator.
        name: Name of the source in messages.
        ds: The dataset, whose lock `in_use` is held during ``next``. If the iterator is the user's
            own, two threads may call it: after ``set_state`` the old thread may still be inside
            ``next`` when the new thread begins.
        is_own: True if the iterator was made for this object, and no other object refers to it.
    """

    def __init__(self, iterator: Iterator[Batch], name: str, ds: IterableBatches, *, is_own: bool):
        super().__init__()
        self._iterator: Any = iterator
        self._name, self._ds, self._in_use = name, ds, ds.in_use
        self._stateful = _is_stateful(iterator)
        # A stateful iterator may be asked to go back after this, so its owner closes it.
        self._to_close = hasattr(iterator, "close") and (is_own or not self._stateful)

    def __next__(self) -> Batch:
        self._ds.has_begun = True
        with self._in_use:  # also for the copy: the next call may fill the arrays again
            leaves, structure = leaves_of(next(self._iterator))
            return owned(structure.unflatten(map(_as_numpy, leaves)))

    def get_state(self) -> Any:
        with self._in_use:
            return self._iterator.get_state() if self._stateful else NoState(self._name)

    def set_state(self, state: Any) -> None:
        if not self._stateful:
            NoState(self._name).refuse()
        with self._in_use:
            self._iterator.set_state(state)

    def close(self) -> None:
        closes, self._to_close = self._to_close, False  # Grain closes again in its __del__
        if closes:
            self._iterator.close()


def _is_stateful(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def _as_numpy(leaf: Any) -> Any:
    """Returns another library's tensor as numpy, and all else unchanged."""
    known = isinstance(leaf, np.ndarray | np.generic | jax.Array)
    return np.asarray(leaf) if hasattr(leaf, "__array__") and not known else leaf


def is_from_iterable(ds: Any) -> bool:
    """Returns whether `from_iterable` made the dataset."""
    return isinstance(ds, IterableBatches)


def said_rows(ds: grain.MapDataset | grain.IterDataset) -> Rows | None:
    """Returns the rows that all sources of a pipeline declare; None unless all agree."""
    said = {source.rows if is_from_iterable(source) else None for source in nodes.sources(ds)}
    return said.pop() if len(said) == 1 else None


def agreed_rows(ds: grain.MapDataset | grain.IterDataset, rows: Rows | None) -> Rows | None:
    """Returns the rows that a pipeline yields on each host, by its sources or the user's argument.

    Raises:
        ShardingError: Sources and argument contradict each other.
    """
    said = said_rows(ds)
    if said is not None and rows not in (None, said):
        raise ShardingError(
            f"from_iterable says rows={said!r}, and .shard_to says rows={rows!r}.",
            remedy="leave rows out of .shard_to.",
        )
    return said or rows


def require_new_pass(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Refuses a new pass over a pipeline whose sources allow only one, if that has begun.

    Raises:
        ShardingError: A source is used up.
    """
    for source in nodes.sources(ds):
        if is_from_iterable(source):
            source.require_new_pass()


def require_another_pass(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Refuses to read a batch before the loop does if the loop could then not read it again.

    Raises:
        ShardingError: A source of the pipeline allows only one pass.
    """
    for source in nodes.sources(ds):
        if is_from_iterable(source) and source.has_one_pass:
            raise ShardingError(
                f"only a batch tells what batches look like, and {source} can be gone through only"
                " once: its first batch would be gone for the loop.",
                remedy="pass a function that makes the iterator, as in"
                " from_iterable(make_batches, ...). On a host that has no batch at all,"
                ' remainder="drop" needs none.',
            )
