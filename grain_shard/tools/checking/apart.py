"""`apart`: proves that two pipelines, such as training and test data, share no record."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.routes import below_mixture, route, source_in
from grain_shard.iteration.sharded_dataset import sharded

_EPOCHS = 3
_CHUNK = 2**16  # indices that are followed down to the sources at a time


class Read:
    """The records of one source that a pipeline reads.

    Attributes:
        source: The source, or the dataset at the beginning of the pipeline.
        is_read: bool[len(source)], True for the records that the pipeline reads.
    """

    def __init__(self, source: Any):
        self.source: Any = source
        self.is_read = np.zeros(len(source), bool)


def apart(ds: Any, other: Any, until: float) -> tuple[int, int, ShardingError | None]:
    """Compares the records that two pipelines read in three epochs.

    Records of the same source are compared by their index. Records of two sources are compared by
    their files and positions if both sources have a method ``where``, and otherwise by their
    contents.

    Args:
        ds: A dataset after ``.shard_to``, or a `grain.MapDataset`.
        other: Another one.
        until: Time by `time.monotonic` after which no further record is read for its contents.

    Returns:
        The number of records of each pipeline that were compared; and the error that names records
        of both, or None.

    Raises:
        ShardingError: The records of a pipeline have no index.
        TimeoutError: The time was over before all contents were compared.
    """
    here, there = records_read(ds), records_read(other)
    shared = [name for a in here for b in there for name in _shared(a, b, until)]
    counts = [sum(int(read.is_read.sum()) for read in reads) for reads in (here, there)]
    if not shared:
        return counts[0], counts[1], None
    some = ", ".join(shared[:3]) + (", ..." if len(shared) > 3 else "")
    error = ShardingError(
        f"both pipelines read {len(shared)} records within {_EPOCHS} epochs: {some}.",
        remedy="cut the records by train, test = grain_shard.split(source, [0.8, 0.2], seed=0), and"
        " call .shuffle and .repeat on the parts. A slice of shuffled records holds other records"
        " in each epoch.",
    )
    return counts[0], counts[1], error


def records_read(ds: Any) -> list[Read]:
    """Returns the records that a pipeline reads in three epochs, for each of its sources.

    Raises:
        ShardingError: The records of the pipeline have no index.
    """
    reads: dict[int, Read] = {}
    for records in _by_index(ds):
        budget = 0  # the records of three epochs of all sources
        for start in range(0, _EPOCHS * len(records), _CHUNK):
            indices = np.arange(start, min(start + _CHUNK, _EPOCHS * len(records)))
            budget -= _follow(records, indices, reads)
            if start == 0:
                budget += _EPOCHS * sum(len(read.is_read) for read in reads.values())
            if budget <= 0:
                break
    return list(reads.values())


def _by_index(ds: Any) -> Iterator[grain.MapDataset]:
    """Yields the random-access datasets of which a pipeline is made."""
    while (sharded(ds) or hasattr(ds, "plan")) and ds.parents:  # a dataset of this package
        (ds,) = ds.parents
    if (plan := getattr(ds, "plan", None)) is not None:  # the batches of feeds
        for number in range(plan.num_streams):
            yield from _by_index(plan.streams.make(number))
    elif isinstance(ds, grain.MapDataset):
        yield ds
    elif isinstance(ds, grain.IterDataset) and (made_of := nodes.made_of(ds)):
        for part in made_of:
            yield from _by_index(part)
    else:
        raise ShardingError(
            f"the records of {ds} have no index, so it is unknown which records it reads.",
            remedy="compare pipelines that begin with a grain.MapDataset.",
        )


def _follow(ds: Any, indices: np.ndarray, reads: dict[int, Read]) -> int:
    """Marks the records to which indices of a dataset lead, and returns their number."""
    way = route(ds, indices)
    below, indices = way.ds, way.indices
    if (mixed := below_mixture(below, indices)) is not None:
        parents = enumerate(below.parents)
        return sum(_follow(parent, mixed[1][mixed[0] == i], reads) for i, parent in parents)
    if (node := nodes.batch_node(below)) is not None:
        num_records = len(node.records)
        epochs, batches = np.divmod(indices, len(below))
        places = batches[:, None] * node.global_batch_size + np.arange(node.global_batch_size)
        places += epochs[:, None] * num_records
        in_epoch = places < (epochs[:, None] + 1) * num_records
        return _follow(node.records, places[in_epoch], reads)
    if below.parents and all(len(parent) == len(below) for parent in below.parents):
        # A zip, a filter, or a dataset of the user: element i is made of the elements i.
        return sum(_follow(parent, indices, reads) for parent in below.parents)
    source = source_in(below)
    read = reads.setdefault(id(source), Read(source))
    read.is_read[indices % len(source)] = True
    return len(indices)


def _shared(a: Read, b: Read, until: float) -> list[str]:
    """Returns texts that name the records in both of two sources."""
    kind = type(a.source).__name__
    if a.source is b.source:
        both = np.flatnonzero(a.is_read & b.is_read).tolist()
        return [f"record {i} of the source {kind}" for i in both]
    if hasattr(a.source, "where") and hasattr(b.source, "where"):
        here, there = (
            {str(r.source.where(i)) for i in np.flatnonzero(r.is_read).tolist()} for r in (a, b)
        )
        return sorted(here & there)
    seen = set[bytes]()
    for i in np.flatnonzero(b.is_read).tolist():
        seen.add(_contents(b.source[i]))
        _check_time(until)
    found = []
    for i in np.flatnonzero(a.is_read).tolist():
        if _contents(a.source[i]) in seen:
            found.append(f"record {i} of the source {kind} (by its contents)")
        _check_time(until)
    return found


def _contents(record: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(record)).digest()


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError
