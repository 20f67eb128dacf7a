"""P15, P16: the speed of sources that wait, and of sources that compute, with default options.

A source sleeps for each read, like a bucket, a database or a network file system. `.shard_to` is
compared with Grain's guide, and with itself at the best fixed number of threads. Two sources wait
for another process in place of sleeping: HTTP range requests, and ArrayRecord files on a slow
mount.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import grain_shard
from benchmarks import peers
from benchmarks.data import decode_record, record_files
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, interleave, largest
from benchmarks.range_server import RangeSource, serving
from benchmarks.slow_mount import mounted

GLOBAL_BATCH_SIZE = 256
RECORDS_STORED = 16_384
# Milliseconds of a read from a bucket, and of a read from a mounted bucket with some cache.
BUCKET_MS, MOUNT_MS = 50, 20
LATENCIES_MS = (0, 1, 5, 20, 100)
BEST = "best num_threads"
RECORD = np.arange(768, dtype=np.float32)  # a record of 3 KB

Pipeline = Callable[[grain.MapDataset], Iterator[Any]]


class Source:
    """A source of ten million 3 KB records, which sleeps for each read.

    Args:
        latency_ms: Milliseconds of a read.
    """

    def __init__(self, latency_ms: float):
        self._latency_s = latency_ms / 1e3

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.wait(index)
        return {"x": RECORD.copy(), "index": np.int64(index)}

    def wait(self, index: int) -> None:
        if self._latency_s:
            time.sleep(self._latency_s)


class BatchedSource(Source):
    """A `Source` that also reads many records in one call, in the time of one record."""

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        self.wait(indices[0])
        return [{"x": RECORD.copy(), "index": np.int64(index)} for index in indices]


KINDS = {"one by one": Source, "batched": BatchedSource}


def shuffled(source: Any) -> grain.MapDataset:
    return grain.MapDataset.source(source).seed(peers.SEED).shuffle()


def ours(ds: grain.MapDataset, **options: Any) -> Iterator[Any]:
    ds = ds.batch(GLOBAL_BATCH_SIZE)
    with iter(grain_shard.shard_to(ds, peers.data_mesh(), **options)) as batches:
        yield from batches


def guide(ds: grain.MapDataset) -> Iterator[Any]:
    """Returns the batches of Grain's guide: 16 threads read records, which are then batched."""
    return peers.device_put(ds.to_iter_dataset().batch(GLOBAL_BATCH_SIZE))


def records_per_second(ds: grain.MapDataset, pipeline: Pipeline, seconds: float) -> float:
    """Returns the records per second after the first batch, over at least `seconds`."""
    with closing(pipeline(ds)) as batches:  # pyright: ignore[reportArgumentType]
        jax.block_until_ready(next(batches))
        start = end = time.perf_counter()
        count = 0
        while end < start + seconds:
            jax.block_until_ready(next(batches))
            count, end = count + 1, time.perf_counter()
    return count * GLOBAL_BATCH_SIZE / (end - start)


def ms_to_first_batch(ds: grain.MapDataset, pipeline: Pipeline) -> float:
    """Returns the milliseconds from the start of building the pipeline to its first batch.

    The first batch counts when it is on the devices.
    """
    start = time.perf_counter()
    with closing(pipeline(ds)) as batches:  # pyright: ignore[reportArgumentType]
        jax.block_until_ready(next(batches))
        return (time.perf_counter() - start) * 1e3


def rates(
    datasets: Mapping[str, grain.MapDataset], run: Run, *, with_guide: bool
) -> Iterator[Round]:
    """Yields the records per second of each round, for each dataset and each way to read it.

    The ways are `.shard_to` with default options, `.shard_to` with each fixed number of threads,
    the best of these numbers, and, with `with_guide`, Grain's guide.
    """
    grid = (1, 2, 16, 128) if run.quick else (1, 2, 4, 8, 16, 32, 64, 128)
    pipelines: dict[str, Pipeline] = {"ours": ours}
    if with_guide:
        pipelines["guide"] = guide
    pipelines |= {str(n): functools.partial(ours, num_threads=n) for n in grid}
    sides = {
        f"{name}: {side}": functools.partial(
            records_per_second, ds, pipeline, seconds=2 if run.quick else 6
        )
        for name, ds in datasets.items()
        for side, pipeline in pipelines.items()
    }
    for figures in interleave(sides, run.rounds(quick=1, full=3), warm_up=False):
        best = {
            f"{name}: {BEST}": largest(figures[f"{name}: {n}"] for n in grid) for name in datasets
        }
        yield {**figures, **best}


def waiting_sources() -> dict[str, grain.MapDataset]:
    return {
        f"{kind}, {latency_ms} ms": shuffled(make(latency_ms))
        for kind, make in KINDS.items()
        for latency_ms in LATENCIES_MS
    }


def measure_waiting(run: Run) -> Iterable[Round]:
    return rates(waiting_sources(), run, with_guide=True)


def measure_first(run: Run) -> Iterable[Round]:
    sides = {
        f"{name}: {side}": functools.partial(ms_to_first_batch, ds, pipeline)
        for name, ds in waiting_sources().items()
        for side, pipeline in {"ours": ours, "guide": guide}.items()
    }
    return interleave(sides, run.rounds(quick=3, full=9))


def in_python(record: dict[str, Any]) -> dict[str, Any]:
    """Runs Python code for 50 us, with the interpreter's lock held, and returns the record."""
    end, spins = time.thread_time() + 50e-6, 0
    while time.thread_time() < end:
        spins += 1
    return record


def _jpeg(folder: Any) -> grain.MapDataset:
    try:
        from PIL import Image
    except ImportError as error:
        raise Skip(f"pillow cannot be imported ({error})") from None
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((256, 256)).save(buffer, "jpeg", quality=90)

    def decode(index: int) -> dict[str, Any]:
        return {"x": np.asarray(Image.open(io.BytesIO(buffer.getvalue())).resize((64, 64)))}

    return shuffled(range(10**7)).map(decode)


def _memory_mapped(folder: Any) -> grain.MapDataset:
    rows = np.memmap(folder / "rows", np.float32, "w+", shape=(50_000, 768))
    rows[:] = 1
    return shuffled(range(10**7)).map(lambda index: {"x": np.array(rows[index % len(rows)])})


def _array_records(folder: Any) -> grain.MapDataset:
    source = grain_shard.ArrayRecordSource(record_files(folder, 16_384))
    return shuffled(source).repeat().map(decode_record)


COMPUTING: dict[str, Callable[[Any], grain.MapDataset]] = {
    "50 us of Python a record": lambda folder: shuffled(Source(0)).map(in_python),
    "JPEG decoding": _jpeg,
    "a memory-mapped array": _memory_mapped,
    "local ArrayRecords": _array_records,
}


def measure_computing(run: Run) -> Iterable[Round]:
    datasets = {name: make(run.folder) for name, make in COMPUTING.items()}
    return rates(datasets, run, with_guide=False)


def measure_ranges(run: Run) -> Iterable[Round]:
    path = run.folder / "records"
    path.write_bytes(np.random.default_rng(0).bytes(RECORDS_STORED * RECORD.nbytes))
    with (
        serving(path, latency_ms=BUCKET_MS) as port,
        closing(RangeSource(port, RECORDS_STORED, RECORD.nbytes)) as source,
    ):
        ds = shuffled(source).repeat().map(decode_record)
        yield from _of_storage(ds, ds, run)


def measure_mount(run: Run) -> Iterable[Round]:
    folder = run.folder / "stored"
    folder.mkdir(exist_ok=True)
    names = [Path(path).name for path in record_files(folder, RECORDS_STORED, files=64)]
    with mounted(folder, run.folder / "mount", latency_ms=MOUNT_MS):
        paths = [str(run.folder / "mount" / name) for name in names]
        sources = grain_shard.ArrayRecordSource(paths), grain.sources.ArrayRecordDataSource(paths)
        ours_ds, guides_ds = (shuffled(s).repeat().map(decode_record) for s in sources)
        yield from _of_storage(ours_ds, guides_ds, run)


def _of_storage(
    ours_ds: grain.MapDataset, guides_ds: grain.MapDataset, run: Run
) -> Iterator[Round]:
    seconds = 5 if run.quick else 15
    sides = {
        "ours": functools.partial(records_per_second, ours_ds, ours, seconds),
        "guide": functools.partial(records_per_second, guides_ds, guide, seconds),
        "first: ours": functools.partial(ms_to_first_batch, ours_ds, ours),
        "first: guide": functools.partial(ms_to_first_batch, guides_ds, guide),
    }
    yield from interleave(sides, run.rounds(quick=1, full=3), warm_up=False)


GUIDE = "Grain's guide, option C"

STORAGE_COMPARISONS = [
    Comparison(
        "P15", "", GUIDE, "records/s", "ours", "guide", "ours / theirs", goal=Goal("at least", 3)
    ),
    Comparison(
        "P15", "time to the first batch", GUIDE, "ms", "first: ours", "first: guide",
        "ours / theirs", goal=Goal("at most", 0.5),
    ),
]  # fmt: skip


def _compared(number: str, name: str, theirs: str, against: str, goal: Goal) -> Comparison:
    return Comparison(
        number,
        what=name,
        against=against,
        unit="records/s",
        ours=f"{name}: ours",
        theirs=f"{name}: {theirs}",
        compared="ours / theirs",
        goal=goal,
    )


NAMES = [f"{kind}, {latency_ms} ms" for kind in KINDS for latency_ms in LATENCIES_MS]

GROUPS = [
    Group(
        "waiting",
        f"3 KB records of a source that waits {LATENCIES_MS[0]} to {LATENCIES_MS[-1]} ms a read",
        measure_waiting,
        [
            _compared(
                "P15",
                f"{kind}, {latency_ms} ms",
                "guide",
                GUIDE,
                Goal("at least", 3 if latency_ms >= 5 else 1),
            )
            for kind in KINDS
            for latency_ms in LATENCIES_MS
        ]
        + [
            _compared("P15", name, BEST, "the best num_threads", Goal("at least", 0.9))
            for name in NAMES
        ],
    ),
    Group(
        "waiting_first",
        "Time to the first batch of a source that waits",
        measure_first,
        [
            Comparison(
                "P15",
                what=name,
                against=GUIDE,
                unit="ms",
                ours=f"{name}: ours",
                theirs=f"{name}: guide",
                compared="ours / theirs",
                goal=Goal("at most", 0.5),
            )
            for name in NAMES
        ],
    ),
    Group(
        "computing",
        "Records of sources that compute, and do not wait",
        measure_computing,
        [
            _compared("P16", name, BEST, "the best num_threads", Goal("at least", 0.95))
            for name in COMPUTING
        ],
    ),
    Group(
        "ranges",
        f"3 KB records by HTTP range requests of {BUCKET_MS} ms",
        measure_ranges,
        STORAGE_COMPARISONS,
    ),
    Group(
        "mount",
        f"3 KB ArrayRecords, 64 files on a FUSE mount of {MOUNT_MS} ms",
        measure_mount,
        STORAGE_COMPARISONS,
    ),
]
