"""`apart`: proves that two pipelines, such as training and test data, share no record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from grain_shard.digest import element_digest
from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.routes import below_mixture, route, source_in
from grain_shard.iteration.sharded_dataset import sharded

_EPOCHS = 3
_CHUNK = 2**16  # the maximum number of indices that are followed to the sources at a time


class Unknown(Exception):
    """It is not known whether the pipelines share a record. The text says why."""


class SourceRecords:
    """The records of one source that a pipeline reads.

    Attributes:
        source: The source, or the dataset at the beginning of the pipeline.
        is_read: bool[len(source)], True for the records that the pipeline reads.
        is_part: True if a zip joins the source with others, so that it has a part of each record.
    """

    def __init__(self, source: Any, is_part: bool):
        self.source: Any = source
        self.is_read = np.zeros(len(source), bool)
        self.is_part: bool = is_part

    @property
    def indices(self) -> list[int]:
        """The indices of the records that are read."""
        return np.flatnonzero(self.is_read).tolist()

    def __str__(self) -> str:
        return f"the source {type(self.source).__name__}"


def apart(ds: Any, other: Any, until: float) -> tuple[int, int, ShardingError | None]:
    """Compares the records that two pipelines read in three epochs, and names common records.

    Records of the same source are compared by their index. Records of two sources are compared by
    their files and positions if both sources have a method ``where``, and otherwise by their
    contents.

    Args:
        ds: A dataset after ``.shard_to``, or a `grain.MapDataset`.
        other: The other pipeline, one of the same kinds.
        until: Time by `time.monotonic` after which no further record is looked at.

    Returns:
        The number of records of each pipeline that were compared; and the error that names common
        records, or None.

    Raises:
        Unknown: The pipelines cannot be compared, or the time ran out.
    """
    of_ds, of_other = records_read(ds, until), records_read(other, until)
    shared = [name for a in of_ds for b in of_other for name in _shared(a, b, until)]
    if shared and (_leaves_out(ds) or _leaves_out(other)):
        raise Unknown("both read some records, which a filter or a dropped remainder may leave out")
    counts = [sum(len(records.indices) for records in found) for found in (of_ds, of_other)]
    if not shared:
        return counts[0], counts[1], None
    examples = ", ".join(shared[:3]) + (" and others" if len(shared) > 3 else "")
    error = ShardingError(
        f"both pipelines read {len(shared)} records within {_EPOCHS} epochs: {examples}.",
        remedy="split the records first: train, test = grain_shard.split(source, [0.8, 0.2],"
        " seed=0). Then call .shuffle and .repeat on each part. A slice of shuffled records holds"
        " other records in each epoch.",
    )
    return counts[0], counts[1], error


def records_read(ds: Any, until: float) -> list[SourceRecords]:
    """Returns the records that a pipeline reads in three epochs, for each of its sources.

    Raises:
        Unknown: The records of the pipeline have no index, or the time ran out.
    """
    found: dict[int, SourceRecords] = {}
    for records in _by_index(ds):
        # The length of an endless pipeline is not the length of an epoch. So the lengths of its
        # sources also limit the number of records that are followed.
        records_left = _EPOCHS * sum(len(source) for source in nodes.sources(records))
        start, stop = 0, _EPOCHS * len(records)
        while start < stop and records_left > 0:
            indices = np.arange(start, min(start + _CHUNK, start + records_left, stop))
            records_left -= _follow(records, indices, found)
            start += len(indices)
            _check_time(until)
    return list(found.values())


def _by_index(ds: Any) -> Iterator[grain.MapDataset]:
    """Yields the random-access datasets of which a pipeline is made."""
    # Skip the datasets of this package that stand above others.
    while (sharded(ds) or hasattr(ds, "host_rows")) and ds.parents:
        (ds,) = ds.parents
    if (rows := getattr(ds, "host_rows", None)) is not None:  # the batches of feeds
        for number in range(rows.num_streams):
            yield from _by_index(rows.streams.make(number))
    elif isinstance(ds, grain.MapDataset):
        yield ds
    elif isinstance(ds, grain.IterDataset) and (made_of := nodes.made_of(ds)):
        for below in made_of:
            yield from _by_index(below)
    else:
        raise Unknown(f"the records of {ds} have no index")


def _leaves_out(ds: Any) -> bool:
    """Returns True if a pipeline may read a record that it does not hand out."""
    end = sharded(ds)
    if end is not None and end.host.padding.drops_short:
        return True
    # The streams of feeds are not among the parents of their batches.
    if end is not None and not end.parents[0].parents:
        batches: Any = end.parents[0]
        ds = batches.host_rows.streams.make(0)
    return nodes.is_filtered(ds)


def _follow(
    ds: Any, indices: np.ndarray, found: dict[int, SourceRecords], is_part: bool = False
) -> int:
    """Marks the source records of which some elements of a dataset are made.

    It calls itself for the parents of the dataset, down to the sources.

    Args:
        ds: The dataset.
        indices: int64[n], the indices of the elements.
        found: The sources that were reached so far, by their ids; it is updated.
        is_part: True if a zip is above the dataset, which then has only a part of each record.

    Returns:
        The number of records that were reached.

    Raises:
        Unknown: The dataset does not tell which elements of its parents it reads.
    """
    # `below` is the source, or the first node on the way down that `route` does not follow.
    way = route(ds, indices)
    below, indices = way.ds, way.indices
    if (mixed := below_mixture(below, indices)) is not None:
        numbers, indices = mixed  # the number of the parent, and the index in it, for each element
        parts = [(parent, indices[numbers == i]) for i, parent in enumerate(below.parents)]
        return sum(_follow(parent, own, found, is_part) for parent, own in parts if len(own))
    if nodes.is_batched(below) and (node := nodes.batch_node(below)) is not None:
        # Each batch has the next `global_batch_size` records of its epoch, as far as there are any.
        num_records = len(node.records)
        epochs, batches = np.divmod(indices, len(below))
        positions = batches[:, None] * node.global_batch_size + np.arange(node.global_batch_size)
        positions += epochs[:, None] * num_records
        in_epoch = positions < (epochs[:, None] + 1) * num_records
        return _follow(node.records, positions[in_epoch], found, is_part)
    if type(below) in nodes.SHUFFLES:  # a shuffle within windows, which `route` does not follow
        shuffled = np.array([nodes.index_below(below)(i) for i in indices.tolist()], np.int64)
        return _follow(below.parents[0], shuffled, found, is_part)
    if nodes.is_zip(below):  # the parents share each record, so the records count once
        return max(_follow(parent, indices, found, True) for parent in below.parents)
    if nodes.is_map_filter(below):  # keeps the indices: a dropped element is None
        return _follow(below.parents[0], indices, found, is_part)
    if below.parents:
        raise Unknown(f"it is unknown which records {below} reads")
    source = source_in(below)
    records = found.setdefault(id(source), SourceRecords(source, is_part))
    records.is_read[indices % len(source)] = True  # indices past the end are of later epochs
    return len(indices)


def _shared(a: SourceRecords, b: SourceRecords, until: float) -> list[str]:
    """Returns a text for each record that is in both of two sources."""
    if a.source is b.source:
        return [f"record {i} of {a}" for i in np.flatnonzero(a.is_read & b.is_read).tolist()]
    if hasattr(a.source, "where") and hasattr(b.source, "where"):
        return sorted(_locations(a) & _locations(b))
    for records in (a, b):
        if records.is_part:
            raise Unknown(
                f"{records} is one of several in a zip, and the other pipeline has its own"
            )
        # Such numbers may stand for different records, for example for different files.
        if isinstance(records.source, grain.MapDataset) and isinstance(records.source[0], int):
            raise Unknown("each pipeline begins with numbers of its own, such as MapDataset.range")
    seen = {_contents(b, i, until) for i in b.indices}
    found = [i for i in a.indices if _contents(a, i, until) in seen]
    return [f"record {i} of {a} (by its contents)" for i in found]


def _locations(records: SourceRecords) -> set[str]:
    places = map(records.source.where, records.indices)
    return {f"record {position} of {os.path.realpath(path)}" for path, position in places}


def _contents(records: SourceRecords, index: int, until: float) -> tuple[str, str]:
    """Returns a digest of a record, and its texts, which the digest may count only in part."""
    _check_time(until)
    try:
        record = records.source[index]
        texts = [leaf for leaf in jax.tree.leaves(record) if isinstance(leaf, str | os.PathLike)]
        return element_digest(record), repr(texts)
    except Exception as error:
        raise Unknown(f"record {index} of {records} cannot be compared: {error!r}") from error


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise Unknown("the time ran out")
