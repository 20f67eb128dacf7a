"""A pipeline from a batch size per device, and the measure of any pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
from jax.sharding import Mesh

from grain_shard.chain import shard_to
from grain_shard.errors import require_int
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.measuring.measured_loop import measured_loop
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.spans import LOOP, PAD, PLACE, STAGES, Span


def create_sharded_pipeline(
    source: Any, mesh: Mesh, batch_size_per_device: int = 64
) -> ShardedDataset:
    """A pipeline of global batches that gives every shard so many rows, on any mesh.

    On a mesh of one device it is an ordinary loader, so a program needs no second path for it.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> for batch in create_sharded_pipeline([{"x": 1}, {"x": 2}, {"x": 3}], mesh, 2):
        ...     print(batch["x"], batch["valid_mask"])
        [1 2] [ True  True]
        [3 0] [ True False]

    Args:
        source: Records by index: a sequence, a Grain source, or a `grain.MapDataset` that shuffles
            and decodes them. Or a stream of them, a `grain.IterDataset`, on one host.
        mesh: The mesh of all processes. Its axis "data", or its only axis, shards the rows.
        batch_size_per_device: Rows of one shard; devices that differ only along other axes hold
            the same rows.

    Returns:
        What `shard_to` returns: the last batch is padded, and each has a ``valid_mask``.

    Raises:
        ShardingError: The mesh has several axes, none of them "data"; there is no record; or a
            stream does not say what it yields on each of several hosts (call `shard_to` then).
    """
    require_int("batch_size_per_device", batch_size_per_device, 1)
    if not isinstance(source, grain.MapDataset | grain.IterDataset):
        source = grain.MapDataset.source(source)
    shards = ShardingTree.of(mesh).layout().divisor
    return shard_to(source.batch(batch_size_per_device * shards), mesh)


@dataclass(frozen=True)
class Throughput:
    """What `measure_throughput` found; its text is a table. All times are averages per batch.

    Example:
        >>> print(Throughput(50, 50, 5, 81_920.0, 12.5e6, 0.25, 0.001, 0.003, {"read": 0.002}))
        batches measured     50 (after 5 of warm-up)
        examples/s           81,920
        MB/s                 12.5
        waiting for data     25.0% of the step
          wait               1.000 ms a batch
          step               3.000 ms a batch
        in the background
          read               2.000 ms a batch

    Attributes:
        num_batches: Batches that were measured.
        num_batches_asked: Batches that were to be measured; more if the dataset ended early.
        warmup: Batches that were taken before these and left out.
        examples_per_second: Rows of the global batches; where these have a "valid_mask", only
            those for which it is True, unless the step donated it.
        bytes_per_second: Of the global batches, padding included.
        wait_share: The part of each step that was spent waiting for its batch, 0 to 1.
        wait_s: From asking for a batch until it was on the devices, in seconds.
        step_s: From there until the step's result was, in seconds; 0 without a step.
        stages_s: What the pipeline's threads spent on a batch, by stage, in seconds: "read" (read
            and decode its records, or take it from its stream), "batch" (stack them), "pad",
            "place" (hand it to the devices). Without a stage that does not exist, or that runs in
            worker processes.
    """

    num_batches: int
    num_batches_asked: int
    warmup: int
    examples_per_second: float
    bytes_per_second: float
    wait_share: float
    wait_s: float
    step_s: float
    stages_s: Mapping[str, float]

    def __repr__(self) -> str:
        ended = self.num_batches < self.num_batches_asked
        asked = f" of {self.num_batches_asked}, then the dataset ended" if ended else ""
        rows = [
            ("batches measured", f"{self.num_batches}{asked} (after {self.warmup} of warm-up)"),
            ("examples/s", f"{self.examples_per_second:,.0f}"),
            ("MB/s", f"{self.bytes_per_second / 1e6:,.1f}"),
            ("waiting for data", f"{self.wait_share:.1%} of the step"),
            ("  wait", _milliseconds(self.wait_s)),
            ("  step", _milliseconds(self.step_s)),
            ("in the background", "" if self.stages_s else "not known"),
            *((f"  {stage}", _milliseconds(s)) for stage, s in self.stages_s.items()),
        ]
        return "\n".join(f"{name:<21}{value}".rstrip() for name, value in rows)


def measure_throughput(
    ds: Iterable[Any],
    num_batches: int = 50,
    warmup: int = 5,
    step: Callable[[Any], Any] | None = None,
) -> Throughput:
    """Measures how fast batches come, and whether a training step has to wait for them.

    A loop takes batches from the dataset. *Wait* ends when all of the batch is on the devices, not
    when ``next`` returns; *step* ends when the step's result is there. A training loop that lets
    the devices run behind its Python code is a little faster. Examples and bytes per second are by
    the wall clock over the whole loop.

    The stages of what `shard_to` made tell their own times meanwhile. They overlap with the step
    and with each other: `num_threads` batches are read, stacked and padded side by side, and where
    the processor is busy with all of them each takes longer than it would alone. On several hosts
    each tells those of its own.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        >>> throughput = measure_throughput(ds, step=lambda batch: batch["x"].sum())
        >>> throughput.num_batches, list(throughput.stages_s)
        (50, ['read', 'batch', 'pad', 'place'])

    Args:
        ds: The dataset: what `shard_to` returns, or any iterable of batches.
        num_batches: Batches to measure.
        warmup: Batches to leave out before them: compilation, and the buffers that fill while it
            lasts. Of a dataset that ends early, fewer are left out, so that one is measured.
        step: Called with each batch, e.g. a closure around the train step that keeps the state; it
            has to return something that the step computes, such as the loss, to be waited for.
            None measures the pipeline alone, and the loop does nothing but wait.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    loop = measured_loop(ds, num_batches, warmup, step)
    wait_s, step_s = (loop.total_s(lane) / loop.num_batches for lane in LOOP)
    # Clocks have a smallest step, and no figure may be one over nothing.
    least_s = time.get_clock_info("perf_counter").resolution
    seconds = max(loop.end - loop.start, least_s)
    return Throughput(
        num_batches=loop.num_batches,
        num_batches_asked=num_batches,
        warmup=loop.warmup,
        examples_per_second=sum(batch.examples() for batch in loop.batches) / seconds,
        bytes_per_second=sum(batch.num_bytes for batch in loop.batches) / seconds,
        wait_share=wait_s / max(wait_s + step_s, least_s),
        wait_s=wait_s,
        step_s=step_s,
        stages_s=_averages(loop.spans),
    )


def _averages(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds per batch by stage, in the order of the stages."""
    seconds = {stage: [s.end - s.start for s in spans if s.stage == stage] for stage in STAGES}
    # A batch is read and stacked in parts, or several are read at once; each is padded once.
    made = len(seconds[PAD])
    batches = {stage: made or len(times) for stage, times in seconds.items()}
    batches[PLACE] = len(seconds[PLACE])
    return {stage: sum(times) / batches[stage] for stage, times in seconds.items() if times}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms a batch"
