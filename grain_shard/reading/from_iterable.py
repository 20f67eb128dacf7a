"""`from_iterable`: makes a Grain stream of the batches of any data loader."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import grain
import jax
import numpy as np

from grain_shard.errors import ShardingError, shortened
from grain_shard.grain_inside import nodes
from grain_shard.host_arrays import owned
from grain_shard.state_json import NoState
from grain_shard.trees import Batch, leaves_of

Rows = Literal["global", "local"]
# Names of the methods that get and set the state of an iterator, or of the loader that makes it.
# Loaders of PyTorch and Hugging Face have the second pair.
_STATE_METHODS = ("get_state", "set_state"), ("state_dict", "load_state_dict")


def from_iterable(
    source: Iterable[Batch] | Callable[[], Iterable[Batch]], *, rows: Rows | None = None
) -> grain.IterDataset:
    """Returns the batches of any data loader as a Grain stream, to end with ``.shard_to(mesh)``.

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
        source: An iterable of batches, or a function that returns one, such as a generator
            function. A batch is a tree of numpy arrays, or of objects that numpy can convert, such
            as PyTorch's tensors. Every pass asks an iterable for a new iterator, and calls a
            function for a new iterable. An iterator or generator is used as it is. It allows only
            one pass, unless it has a state (see below) that takes it back to its beginning. Arrays
            are copied, so the loader may reuse its buffers.
        rows: The rows that the loader yields on each host. "local": the rows of the host's own
            devices, as from a loader with a sampler for each process. "global": the same whole
            batches on every host. If there is only one host, both are the same, and None is enough.

    Returns:
        A `grain.IterDataset`. Its iterators have a state if the source's iterators, or the source
        itself, have ``get_state`` and ``set_state``, as the iterators of a `grain.DataLoader` do,
        or ``state_dict`` and ``load_state_dict``, as a ``StatefulDataLoader`` of torchdata does. If
        no state can be saved, the log says so when the loop begins.

    Raises:
        ShardingError: `rows` has another value, or the source is a Grain dataset or another object
            with records by index, such as a PyTorch ``Dataset``.
        TypeError: The source cannot be iterated over.
    """
    if rows not in ("global", "local", None):
        raise ShardingError(
            f"rows={rows!r} is not one of global, local.",
            remedy='pass rows="local" if each host yields the rows of its own devices, or'
            ' rows="global" if every host yields the same whole batches.',
        )
    if isinstance(source, grain.MapDataset | grain.IterDataset):
        raise ShardingError(
            f"from_iterable got a {type(source).__name__}, which is a Grain dataset already.",
            remedy="call .shard_to(mesh) on the dataset, with rows=... if it is an IterDataset.",
        )
    _refuse_records(source)
    if not (hasattr(source, "__iter__") or hasattr(source, "__getitem__") or callable(source)):
        raise TypeError(
            f"from_iterable got {shortened(source)}, which is not iterable: pass an iterable of"
            " batches, or a function that returns such an iterable."
        )
    return IterableBatches(source, rows)


def _refuse_records(loader: Any) -> None:
    """Raises an error if an object is a dataset of records, not an iterable of batches.

    Python would iterate over the object by index, and each record would be taken for a batch.

    Raises:
        ShardingError: The object has a length and items, but no ``__iter__``.
    """
    by_index = isinstance(loader, grain.sources.RandomAccessDataSource)
    if by_index and not hasattr(loader, "__iter__"):
        name = getattr(loader, "__name__", type(loader).__name__)  # a class has a name of its own
        raise ShardingError(
            f"from_iterable got a {name}, which has __len__ and __getitem__ but no __iter__, so its"
            " items are taken for single records, not for batches.",
            remedy="call grain.MapDataset.source(ds).batch(B).shard_to(mesh), where ds is this"
            " object. If its items are whole batches, pass a function that yields them.",
        )


class IterableBatches(grain.IterDataset):
    """The stream that `from_iterable` returns.

    Args:
        source: An iterable of batches, or a function that returns one.
        rows: The rows that each host yields: "local" for the rows of its own devices, "global" for
            whole batches; None if the user did not say.

    Attributes:
        source: The argument `source`.
        has_begun: True once a batch was asked for.
        in_use: A lock, held while the source yields a batch and while its state is read or set.
        has_one_pass: True if the source is itself an iterator, which all passes share.
    """

    def __init__(self, source: Any, rows: Rows | None):
        super().__init__()
        self.source: Any = source
        self.rows: Rows | None = rows
        self.has_begun: bool = False
        self.in_use: threading.Lock = threading.Lock()
        self.has_one_pass: bool = isinstance(source, Iterator)
        # If the source can go back to its beginning, further passes are possible.
        self._methods = _state_methods(source) if self.has_one_pass else None
        self._beginning = self._methods and copy.deepcopy(self._methods[0]())

    def require_new_pass(self) -> None:
        """Raises an error if no further pass over the source is possible.

        Raises:
            ShardingError: The source is an iterator that cannot go back to its beginning, and a
                pass over it has begun.
        """
        if self.has_begun and self.has_one_pass and self._methods is None:
            raise ShardingError(
                f"{self} can be iterated over only once, and a first pass has begun. A second pass"
                " would miss the batches of the first.",
                remedy="pass a function that makes the iterator, as in"
                " from_iterable(make_batches, ...).",
            )

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        rows = f", rows={self.rows!r}" if self.rows else ""
        is_class = inspect.isclass(self.source)
        name = (self.source if is_class else type(self.source)).__name__
        return f"from_iterable({name}{rows})"

    def __iter__(self) -> grain.DatasetIterator:
        self.require_new_pass()
        if self.has_begun and self._methods is not None:
            with self.in_use:
                self._methods[1](copy.deepcopy(self._beginning))
        source = self.source
        # A class is called like a function. Its ``__iter__`` is for its objects, not for itself.
        is_class = inspect.isclass(source)
        iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
        loader: Any = source if iterable and not is_class else source()
        _refuse_records(loader)
        name = type(source if loader is source else iter(loader)).__name__
        return _Batches(loader, name, self)


class _Batches(grain.DatasetIterator):
    """Adapts the iterator of a loader to the interface of Grain's iterators.

    The lock `in_use` of the dataset is held during calls of the user's iterator, because two
    threads may call it: after ``set_state``, the old thread may still be inside ``next`` when a new
    thread begins.

    Args:
        loader: The loader, which makes the iterator.
        name: Name of the source in messages.
        ds: The dataset.
    """

    def __init__(self, loader: Any, name: str, ds: IterableBatches):
        super().__init__()
        self._loader, self._name, self._ds, self._in_use = loader, name, ds, ds.in_use
        self._iterator: Any = iter(loader)
        self._methods = _state_methods(self._iterator)
        self._is_loaders = self._methods is None  # True if the loader has the state
        if self._is_loaders:
            self._methods = _state_methods(loader)
        self._loaded: Any = None  # the state that the loader was set to; None after a batch
        # A user's own iterator that has a state stays open: the user may restore it and go on.
        is_own = self._iterator is not ds.source
        self._to_close = hasattr(self._iterator, "close") and (is_own or self._methods is None)

    def __next__(self) -> Batch:
        self._ds.has_begun = True
        # The arrays are copied under the lock, because the next call may overwrite them.
        with self._in_use:
            batch, self._loaded = next(self._iterator), None
            leaves, structure = leaves_of(batch)
            return owned(structure.unflatten(map(_as_numpy, leaves)))

    def get_state(self) -> Any:
        if self._methods is None:
            return NoState(self._name)
        with self._in_use:
            return self._methods[0]() if self._loaded is None else self._loaded

    def set_state(self, state: Any) -> None:
        if self._methods is None:
            NoState(self._name).refuse()
        with self._in_use:
            if self._is_loaders:
                # A loader applies the state when its next iterator begins. Until then the loader
                # may return another state, so `get_state` returns this copy.
                self._loaded = copy.deepcopy(state)
            self._methods[1](state)
            if self._is_loaders:
                self._iterator = iter(self._loader)

    def close(self) -> None:
        closes, self._to_close = self._to_close, False  # Grain closes again in its __del__
        if closes:
            self._iterator.close()


def _state_methods(of: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the methods that get and set the state of an iterator or loader; None without."""
    for names in _STATE_METHODS:
        get, set_ = (getattr(of, name, None) for name in names)
        if callable(get) and callable(set_) and _takes(get) and _takes(set_, {}):
            return get, set_
    return None


def _takes(method: Callable[..., Any], *args: Any) -> bool:
    # The `state_dict` of MosaicML's StreamingDataset needs arguments that only its loader knows.
    try:
        inspect.signature(method).bind(*args)
    except ValueError:  # a function of C without a signature
        return True
    except TypeError:
        return False
    return True


def _as_numpy(leaf: Any) -> Any:
    """Converts another library's tensor to a numpy array; returns any other leaf unchanged."""
    known = isinstance(leaf, np.ndarray | np.generic | jax.Array)
    return np.asarray(leaf) if hasattr(leaf, "__array__") and not known else leaf


def said_rows(ds: grain.MapDataset | grain.IterDataset) -> Rows | None:
    """Returns the ``rows=`` of the `from_iterable` sources of a pipeline.

    Returns:
        "global" or "local"; None unless every source is from `from_iterable` and has the same rows.
    """
    said: set[Rows | None] = {
        source.rows if isinstance(source, IterableBatches) else None for source in nodes.sources(ds)
    }
    return said.pop() if len(said) == 1 else None


def agreed_rows(ds: grain.MapDataset | grain.IterDataset, rows: Rows | None) -> Rows | None:
    """Returns the rows that a pipeline yields on each host, which its sources or the user declare.

    Args:
        ds: The pipeline.
        rows: The argument ``rows=`` of ``.shard_to``; None if it was left out.

    Returns:
        "global" for whole batches, "local" for the rows of the host's devices; None if undeclared.

    Raises:
        ShardingError: A source and the argument contradict each other.
    """
    said = said_rows(ds)
    if said is not None and rows not in (None, said):
        raise ShardingError(
            f"from_iterable got rows={said!r}, but .shard_to got rows={rows!r}.",
            remedy="leave rows out of .shard_to.",
        )
    return said or rows


def require_new_pass(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Raises an error if no further pass over a pipeline is possible.

    Raises:
        ShardingError: A source is an iterator that cannot go back to its beginning, and a pass over
            it has begun.
    """
    for source in nodes.sources(ds):
        if isinstance(source, IterableBatches):
            source.require_new_pass()


def require_another_pass(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Raises an error if a batch that is read before the loop begins would be lost for the loop.

    Raises:
        ShardingError: A source of the pipeline is itself an iterator, which all passes share.
    """
    for source in nodes.sources(ds):
        if isinstance(source, IterableBatches) and source.has_one_pass:
            raise ShardingError(
                "a batch must be read to learn the shapes. But the loop would then miss that batch,"
                f" because {source} can be iterated over only once.",
                remedy="pass a function that makes the iterator, as in"
                " from_iterable(make_batches, ...). If this host has no batch at all, pass"
                ' remainder="drop".',
            )
