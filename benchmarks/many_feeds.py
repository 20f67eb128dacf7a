"""P17: many feeds on one host with default options; packed text as feeds and as one stream."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import grain_shard
from benchmarks import feeds, peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, alone, interleave

NUM_FEEDS, GLOBAL_BATCH_SIZE = 64, 256
BEST = "the best ReadOptions"
# Grain's ReadOptions that are tried for each feed: (threads, records to buffer).
OPTIONS = ((0, 0), (1, 2), (1, 8), (4, 16))

TEXT_FEEDS, TEXT_BATCH_SIZE, TOKENS = 16, 32, 512
NUM_WORKERS, SHARED_MEMORY = 2, Path("/dev/shm")
MakeFeed = Callable[[grain.sharding.ShardOptions], grain.IterDataset]
WARM_UP = 8  # number of batches before the measured ones


class ReadByGrain(grain.IterDataset):
    """A feed that is read by Grain's own threads, because it hides its dataset from grain_shard."""

    def __init__(self, ds: grain.IterDataset):
        super().__init__()
        self._ds = ds

    def __iter__(self) -> grain.DatasetIterator:
        return iter(self._ds)


def trivial_rows(options: tuple[int, int] | None) -> grain.IterDataset:
    """Returns a pipeline of 64 feeds whose rows cost almost nothing.

    Args:
        options: Grain's ReadOptions for each feed (threads, buffer). Grain's threads then read.
            With None the threads of grain_shard read, which all feeds share.
    """

    def make_feed(feed: grain.sharding.ShardOptions) -> grain.IterDataset:
        records = grain.MapDataset.range(10**7)[feed.shard_index :: feed.shard_count]
        rows = records.map(lambda i: {"x": np.int32(i)})
        if options is None:
            return rows.to_iter_dataset()
        return ReadByGrain(rows.to_iter_dataset(grain.ReadOptions(*options)))

    ds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(GLOBAL_BATCH_SIZE)
    return grain_shard.shard_to(ds, peers.data_mesh())


def figures(options: tuple[int, int] | None, seconds: float) -> dict[str, float]:
    """Runs the 64 feeds for some seconds, and returns three figures by name.

    "first" is the seconds to the first batch, "ms" the milliseconds per later batch, and "threads"
    the largest number of threads of the process.
    """
    start = time.perf_counter()
    with iter(trivial_rows(options)) as batches:
        jax.block_until_ready(next(batches))
        start, first = time.perf_counter(), time.perf_counter() - start
        count, most_threads, now = 0, 0, start
        while now < start + seconds:
            jax.block_until_ready(next(batches))
            most_threads = max(most_threads, threading.active_count())
            count, now = count + 1, time.perf_counter()
    return {"first": first, "ms": (now - start) / count * 1e3, "threads": float(most_threads)}


def measure_many(run: Run) -> Iterator[Round]:
    seconds = 2 if run.quick else 6
    figures(None, seconds=0.1)  # warm-up: the first batch of a process imports and compiles
    for _ in range(run.rounds(quick=3, full=9)):
        ours = figures(None, seconds)
        fixed = [figures(options, seconds)["ms"] for options in OPTIONS]
        yield {**ours, BEST: min(fixed)}


def named_packed(feed: grain.sharding.ShardOptions, prefix: str, make: MakeFeed) -> Any:
    """Makes a feed, and first gives the shared memory of this worker process names with a prefix.

    So this run's shared memory can be told from that of other programs.
    """
    from multiprocessing import shared_memory

    shared_memory._SHM_NAME_PREFIX = f"/{prefix}"  # pyright: ignore[reportAttributeAccessIssue]
    return make(feed)


def started_workers() -> dict[str, float]:
    """Runs packed text in 16 feeds with worker processes, and returns three figures by name.

    "first" is the seconds to the first batch, "children" the number of child processes, and "left"
    the number of shared memory objects that are left at the end.
    """
    prefix = f"b{os.getpid() % 10**6}_"
    make = functools.partial(feeds.packed, sources=feeds.documents(), length=TOKENS, counted=[])
    before, start = child_processes(), time.perf_counter()
    ds = grain_shard.feeds(
        functools.partial(named_packed, prefix=prefix, make=make), num_feeds=TEXT_FEEDS
    ).batch(TEXT_BATCH_SIZE)
    with iter(grain_shard.shard_to(ds, peers.data_mesh(), num_workers=NUM_WORKERS)) as batches:
        jax.block_until_ready(next(batches))
        first = time.perf_counter() - start
        for _ in range(WARM_UP):
            next(batches)
        children = len(child_processes() - before)
    time.sleep(1)  # a thread of Grain frees the last shared memory
    left = sum(name.startswith(prefix) for name in os.listdir(SHARED_MEMORY))
    return {"first": first, "children": float(children), "left": float(left)}


def child_processes() -> set[int]:
    """Returns the ids of this process's child processes, multiprocessing's tracker included."""
    of_threads = Path("/proc/self/task").glob("*/children")
    return {int(pid) for children in of_threads for pid in children.read_text().split()}


def measure_workers(run: Run) -> Iterator[Round]:
    if not SHARED_MEMORY.exists():
        raise Skip("needs Linux's /dev/shm")
    for _ in range(run.rounds(quick=3, full=7)):
        yield started_workers()


def packed_text(kind: str) -> Iterator[Any]:
    """Returns the batches of packed text as "feeds", as "one stream", or by "Grain alone"."""
    make = functools.partial(feeds.packed, sources=feeds.documents(), length=TOKENS, counted=[])
    if kind == "feeds":
        ds = grain_shard.feeds(make, num_feeds=TEXT_FEEDS).batch(TEXT_BATCH_SIZE)
        return iter(grain_shard.shard_to(ds, peers.data_mesh()))
    stream = make(grain.sharding.ShardOptions(0, 1)).batch(TEXT_BATCH_SIZE)
    if kind == "Grain alone":
        return peers.device_put(stream)
    return iter(grain_shard.shard_to(stream, peers.data_mesh(), rows="global"))


def tokens_per_second(kind: str, steps: int) -> float:
    """Returns the tokens per second over some steps, without the tokens of padding."""
    with closing(packed_text(kind)) as batches:  # pyright: ignore[reportArgumentType]
        for _ in range(WARM_UP):
            next(batches)
        start, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += int(np.count_nonzero(np.asarray(next(batches)["tokens_segment_ids"])))
        return tokens / (time.perf_counter() - start)


def measure_text(run: Run) -> Iterable[Round]:
    steps = 40  # few steps and many rounds, so that other work of the machine affects both sides
    sides: Mapping[str, Callable[[], float]] = {
        kind: functools.partial(tokens_per_second, kind, steps)
        for kind in ("feeds", "one stream", "Grain alone")
    }
    return interleave(sides, run.rounds(quick=15, full=45))


GROUPS = [
    Group(
        "many_feeds",
        f"{NUM_FEEDS} feeds with Grain's default ReadOptions",
        measure_many,
        [
            alone("P17", "threads", "threads", "threads", Goal("at most", 80)),
            alone("P17", "first batch", "s", "first", Goal("at most", 0.5)),
            Comparison(
                "P17",
                what="a batch",
                against=f"{BEST}, read by Grain",
                unit="ms",
                ours="ms",
                theirs=BEST,
                compared="ours / theirs",
                goal=Goal("at most", 0.6),
            ),
        ],
    ),
    Group(
        "packed_text",
        f"Packed text, {TEXT_FEEDS} feeds",
        measure_text,
        [
            Comparison(
                "P17",
                what="",
                against="the same Grain pipeline as one stream",
                unit="tokens/s",
                ours="feeds",
                theirs="one stream",
                compared="ours / theirs",
                goal=Goal("at least", 1.6),
            ),
            Comparison(
                "P17",
                what="one stream",
                against="the same Grain pipeline with Grain's device_put",
                unit="tokens/s",
                ours="one stream",
                theirs="Grain alone",
                compared="ours / theirs",
                goal=Goal("at least", 1.0),
            ),
        ],
    ),
    Group(
        "feed_workers",
        f"{TEXT_FEEDS} feeds with {NUM_WORKERS} worker processes",
        measure_workers,
        [
            alone("P17", "first batch", "s", "first", Goal("at most", 4)),
            alone("P17", "children", "processes", "children", Goal("at most", 4)),
            alone("P17", "shared memory left", "objects", "left", Goal("exactly", 0)),
        ],
    ),
]
