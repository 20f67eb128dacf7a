"""P13, P24: images per second for JPEGs of photographs, decoded in two worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any
from unittest import mock

import grain
import jax
from absl import flags

import grain_shard
from benchmarks import peers
from benchmarks.data import decode_photograph, photograph_files
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, interleave

IMAGES, GLOBAL_BATCH_SIZE, NUM_WORKERS = 512, 32, 2
# By default, Dask's workers give freed memory back to the system at once. Then every image and
# batch is written to new pages, which costs a worker 3 ms of processor time for each batch.
_WORKERS_KEEP_MEMORY = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**28,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}


def ours(paths: Sequence[str], **options: Any) -> Iterator[Any]:
    ds = (
        grain.MapDataset.source(grain_shard.ArrayRecordSource(paths))
        .seed(peers.SEED)
        .shuffle()
        .repeat()
        .map(decode_photograph)
        .batch(GLOBAL_BATCH_SIZE)
        .shard_to(peers.data_mesh(), **options)
    )
    with iter(ds) as batches:
        yield from batches


def on_dask(paths: Sequence[str]) -> Iterator[Any]:
    """Yields our batches, made by a Dask cluster of the same number of processes, over TCP."""
    try:
        from dask import config
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        raise Skip("dask is not installed (the bench extra has it)") from error
    with (
        # Dask also sets these variables in this process, for all processes that it starts later.
        mock.patch.dict(os.environ),
        config.set(_WORKERS_KEEP_MEMORY),
        LocalCluster(NUM_WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        # The results do not pass through Dask's scheduler.
        Client(cluster, direct_to_workers=True) as client,
    ):
        # Each worker has its next tasks while a batch is on its way.
        yield from ours(paths, executor=client.get_executor(), cpu_buffer_size=4 * NUM_WORKERS)


def guide(paths: Sequence[str]) -> Iterator[Any]:
    """Returns the batches of Grain's guide with worker processes and default ReadOptions."""
    if not flags.FLAGS.is_parsed():
        # Without parsed flags mp_prefetch fails in a plain script (grain#1355).
        flags.FLAGS.mark_as_parsed()
    ds = (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .seed(peers.SEED)
        .shuffle()
        .repeat()
        .map(decode_photograph)
        .batch(GLOBAL_BATCH_SIZE, drop_remainder=True)
        .to_iter_dataset()
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=NUM_WORKERS))
    )
    return peers.device_put(ds)


def images_per_second(batches: Any, batches_before: int, batches_timed: int) -> float:
    """Returns the images per second of an endless pipeline, in a steady state.

    Args:
        batches: The iterator, which is closed at the end.
        batches_before: Number of batches to take first, while workers start and buffers fill.
        batches_timed: Number of batches to measure.
    """
    with closing(batches):
        for _ in range(batches_before):
            jax.block_until_ready(next(batches))
        start = time.perf_counter()
        for _ in range(batches_timed):
            jax.block_until_ready(next(batches))
        return batches_timed * GLOBAL_BATCH_SIZE / (time.perf_counter() - start)


def measure(run: Run) -> Iterable[Round]:
    paths = photograph_files(run.folder, IMAGES)
    # Each of Grain's workers first makes 16 batches, which arrive almost at once. These 32 batches
    # are not measured.
    before, timed = 40, run.rounds(quick=40, full=120)
    return interleave(
        {
            "grain_shard": lambda: images_per_second(
                ours(paths, num_workers=NUM_WORKERS), before, timed
            ),
            "Dask": lambda: images_per_second(on_dask(paths), before, timed),
            "Grain's guide": lambda: images_per_second(guide(paths), before, timed),
        },
        run.rounds(quick=2, full=4),
        warm_up=not run.quick,  # a warm-up gains little: all sides start new processes each time
    )


GROUPS = [
    Group(
        "images",
        "JPEG photographs, 224x224, decoded in 2 worker processes",
        measure,
        [
            Comparison(
                "P13",
                what="",
                against="Grain's guide with mp_prefetch(2)",
                unit="images/s",
                ours="grain_shard",
                theirs="Grain's guide",
                compared="ours / theirs",
                goal=Goal("at least", 1.2),
            ),
            Comparison(
                "P24",
                what="two Dask workers",
                against="num_workers=2",
                unit="images/s",
                ours="Dask",
                theirs="grain_shard",
                compared="ours / theirs",
                goal=Goal("at least", 0.8),
            ),
        ],
    )
]
