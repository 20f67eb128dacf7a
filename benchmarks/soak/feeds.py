"""Cases of feeds, filtered, mixed and packed, compared with plain Grain's iterator of each feed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import numpy as np

import grain_shard
from benchmarks.soak import compare, model, records, shardings
from benchmarks.soak.shardings import Sharding

LENGTH = 16  # number of tokens of a packed row


@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of one feed, as a literal.

    Attributes:
        num_feeds: Number of feeds of the case.
        keep: A record is kept if this number does not divide its id; None keeps all records.
        mixed: Two weights, to mix the feed's records with the same records in shuffled order; None
            for no mixture.
        packed: Number of packing bins; None for no packing.
        read: Grain's `ReadOptions`: threads and buffer.
    """

    num_feeds: int
    keep: int | None
    mixed: tuple[int, int] | None
    packed: int | None
    read: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Feeds:
    """A case of feeds.

    Attributes:
        records: The dataset that is cut into feeds.
        stream: The stream of each feed.
        drops: True if all feeds end with the first feed that ends.
        first: Batch size, mesh and options of the first pipeline.
        then: Batch size, mesh and options of the pipeline that restores the state.
        stop: Number of batches before the state is taken.
        hosts: Number of simulated hosts.
        num_workers: Number of worker processes that run the feeds; 0 for none.
    """

    records: records.Records
    stream: Stream
    drops: bool
    first: Sharding
    then: Sharding
    stop: int
    hosts: int
    num_workers: int

    limit_s = 180

    @property
    def remainder(self) -> Any:
        return "drop" if self.drops else "pad"

    def run(self, folder: Path) -> Counter[str]:
        source = records.open_source(self.records, folder)
        expected = model.Feeds(rows_of_feeds(self.records, source, self.stream), self.drops)
        whole = list(model.batches(expected, expected.start, self.first.sizes))
        check_real(self, source, expected, whole)
        compare.same_rows_of_hosts(
            batched(self.records, source, self.stream, self.first),
            self.hosts,
            [rows for rows, _ in whole],
            expected,
            self.first,
            self.remainder,
            ends_known=False,
        )
        return Counter({"batches": len(whole), "feeds in workers": int(self.num_workers > 0)})

    def sharded(self, source: Any, sharding: Sharding, num_workers: int = 0) -> Any:
        ds = batched(self.records, source, self.stream, sharding)
        return sharding.apply(ds, remainder=self.remainder, num_workers=num_workers)


def batched(
    drawn: records.Records, source: Any, stream: Stream, sharding: Sharding
) -> grain.IterDataset:
    make_feed = functools.partial(make_stream, drawn, source, stream)
    return grain_shard.feeds(make_feed, num_feeds=stream.num_feeds).batch(sharding.sizes[0])


def rows_of_feeds(drawn: records.Records, source: Any, stream: Stream) -> list[model.Rows]:
    """Returns all rows of each feed, made by plain Grain."""
    return [list(stream_of_feed(drawn, source, stream, feed)) for feed in range(stream.num_feeds)]


def stream_of_feed(
    drawn: records.Records, source: Any, stream: Stream, feed: int
) -> grain.IterDataset:
    options = grain.sharding.ShardOptions(feed, stream.num_feeds)
    return make_stream(drawn, source, stream, options)


def make_stream(
    drawn: records.Records, source: Any, stream: Stream, feed: grain.sharding.ShardOptions
) -> grain.IterDataset:
    part = records.build(drawn, source)[feed.shard_index :: feed.shard_count]
    read = grain.ReadOptions(*stream.read)
    ds = part.to_iter_dataset(read)
    if stream.mixed is not None:
        shuffled = part.shuffle(seed=3).to_iter_dataset(read)
        ds = grain.IterDataset.mix([ds, shuffled], weights=stream.mixed)
    if stream.keep is not None:
        ds = ds.filter(functools.partial(is_kept, stream.keep))
    if stream.packed is not None:
        ds = grain.experimental.FirstFitPackIterDataset(
            ds.map(to_document), length_struct={"tokens": LENGTH}, num_packing_bins=stream.packed
        )
    return ds


def is_kept(keep: int, record: Any) -> bool:
    return bool(record["id"] % keep)


def to_document(record: Any) -> dict[str, np.ndarray]:
    """Returns the first tokens of a record, from 1 to 7, depending on its id."""
    return {"tokens": record["tokens"][: 1 + record["id"] % 7].astype(np.int32)}


def draw_stream(rng: random.Random, num_feeds: int) -> Stream:
    return Stream(
        num_feeds,
        keep=rng.choice([None, 2, 3, 5]),
        mixed=rng.choice([None, None, (1, 1), (3, 2)]),
        packed=rng.choice([None, None, 2, 5]),
        read=rng.choice([(0, 0), (1, 2), (4, 8), (16, 500)]),
    )


def draw(rng: random.Random) -> Feeds:
    stream = draw_stream(rng, num_feeds=rng.choice([1, 2, 3, 4, 8]))
    drawn = records.draw(rng, at_least=4 * stream.num_feeds)
    while True:  # until `.shard_to` accepts the case
        first, then = draw_sharding(rng, stream), draw_sharding(rng, stream)
        case = Feeds(
            drawn,
            stream,
            drops=rng.random() < 0.3,
            first=first,
            then=then,
            stop=rng.randint(0, 6),
            hosts=rng.choice([h for h in (1, 2, 4, 8) if first.drawn.size % h == 0]),
            num_workers=rng.choice([0] * 14 + [2]),
        )
        if all(fits(case, sharding) for sharding in (first, then)):
            return case


def draw_sharding(rng: random.Random, stream: Stream) -> Sharding:
    sizes = {0: stream.num_feeds * rng.randint(1, 6)}
    return dataclasses.replace(shardings.draw(rng), sizes=sizes)


def fits(case: Feeds, sharding: Sharding) -> bool:
    """Returns False for a case that `.shard_to` refuses: size, shards or options do not fit."""
    if case.stream.packed is not None and not sharding.drawn.is_of_all_leaves:
        return False
    return sharding.divides or not case.drops


def check_real(case: Feeds, source: Any, expected: model.Feeds, whole: list[Any]) -> None:
    """Compares the batches from the start, and after a restore."""
    with iter(case.sharded(source, case.first, case.num_workers)) as iterator:
        compare.same_batches("batch", iterator, expected, expected.start, case.first)
    stop = min(case.stop, len(whole))
    with iter(case.sharded(source, case.first)) as iterator:
        list(itertools.islice(iterator, stop))
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(case.sharded(source, case.then, case.num_workers)) as iterator:
        next(iterator, None)  # a state may be restored into an iterator that is in use
        iterator.set_state(state)
        place = model.place_after(expected, whole, stop)
        where = f"restored at {stop}, batch"
        compare.same_batches(where, iterator, expected, place, case.then)
