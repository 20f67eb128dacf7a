"""P13, P24: JPEGs of real photographs, 224x224, decoded in two worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import grain
import jax
from absl import flags

import grain_shard
from benchmarks import peers
from benchmarks.data import decode_photograph, photograph_files
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, interleave

IMAGES, GLOBAL_BATCH_SIZE, NUM_WORKERS = 512, 32, 2


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
    """Ours, made by a Dask cluster of as many processes, over TCP."""
    try:
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        raise Skip("dask is not installed (the bench extra has it)") from error
    with (
        LocalCluster(NUM_WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster, direct_to_workers=True) as client,  # not by way of the scheduler
    ):
        # Each worker has its next tasks while a batch is on its way.
        yield from ours(paths, executor=client.get_executor(), cpu_buffer_size=4 * NUM_WORKERS)


def guide(paths: Sequence[str]) -> Iterator[Any]:
    """Grain's guide with its worker processes; the read options are Grain's default."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # or mp_prefetch fails in a plain script (grain#1355)
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
    """Of an endless pipeline, once its workers run and its buffers have had time to fill."""
    with closing(batches):
        for _ in range(batches_before):
            jax.block_until_ready(next(batches))
        start = time.perf_counter()
        for _ in range(batches_timed):
            jax.block_until_ready(next(batches))
        return batches_timed * GLOBAL_BATCH_SIZE / (time.perf_counter() - start)


def measure(run: Run) -> Iterable[Round]:
    paths = photograph_files(run.folder, IMAGES)
    # Grain's workers begin with 16 batches each, which are done at about the same time.
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
        warm_up=not run.quick,  # both sides start new processes every time
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
