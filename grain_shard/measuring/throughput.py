"""`measure_throughput`: how fast batches come, and whether a training step has to wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grain_shard.measuring.measurement import Measurement, milliseconds
from grain_shard.spans import LOOP, PAD, PLACE, STAGES, STEP, WAIT


class Throughput(Measurement):
    """A measured loop as averages; its text is a table. All times are per batch.

    Example:
        >>> from grain_shard.spans import Span
        >>> loop = Span("wait", "main", 0.0, 0.001), Span("step", "main", 0.001, 0.004)
        >>> reading = Span("read", "host-0", 0.0, 0.002)
        >>> print(Throughput(1, 1, 5, 0.004, (reading, *loop), num_examples=32, num_bytes=50_000))
        batches measured     1 (after 5 of warm-up)
        examples/s           8,000
        MB/s                 12.5
        waiting for data     25.0% of the step
          wait               1.000 ms a batch
          step               3.000 ms a batch
        in the background
          read               2.000 ms a batch
    """

    @property
    def examples_per_second(self) -> float:
        """Valid rows of the global batches, by the wall clock over the whole loop."""
        return self.num_examples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the global batches, padding included, by the wall clock."""
        return self.num_bytes / self.seconds

    @property
    def wait_share(self) -> float:
        """The part of waiting and step together that was waiting, 0 to 1; 1 without a step."""
        return self.total_s(WAIT) / (self.total_s(*LOOP) or 1)

    @property
    def wait_s(self) -> float:
        """From asking for a batch until it was on the devices, in seconds."""
        return self.total_s(WAIT) / self.num_batches

    @property
    def step_s(self) -> float:
        """From there until the step's result was, in seconds; 0 without a step."""
        return self.total_s(STEP) / self.num_batches

    @property
    def stages_s(self) -> Mapping[str, float]:
        """What the pipeline's threads spent on a batch, by stage, in seconds.

        Batches that were made during the warm-up count, too. Without a stage that does not exist,
        or that runs in worker processes.
        """
        seconds = {
            stage: [s.end - s.start for s in self.recorded_spans if s.stage == stage]
            for stage in STAGES
        }
        # A batch may be read and stacked in parts, and several may be read at once; but each batch
        # is padded once, so that this tells how many were made.
        made = len(seconds[PAD])
        batches = {stage: made or len(times) for stage, times in seconds.items()}
        batches[PLACE] = len(seconds[PLACE])
        return {stage: sum(times) / batches[stage] for stage, times in seconds.items() if times}

    def __repr__(self) -> str:
        lines = [
            ("batches measured", f"{self.num_batches}{self.count_note()}"),
            ("examples/s", f"{self.examples_per_second:,.0f}"),
            ("MB/s", f"{self.bytes_per_second / 1e6:,.1f}"),
            ("waiting for data", f"{self.wait_share:.1%} of the step"),
            ("  wait", f"{milliseconds(self.wait_s)} a batch"),
            ("  step", f"{milliseconds(self.step_s)} a batch"),
            ("in the background", "" if self.stages_s else "not known"),
            *((f"  {stage}", f"{milliseconds(s)} a batch") for stage, s in self.stages_s.items()),
        ]
        return "\n".join(f"{name:<21}{value}".rstrip() for name, value in lines)


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
        >>> import grain, jax
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        >>> throughput = measure_throughput(ds, step=lambda batch: batch["x"].sum())
        >>> throughput.num_batches, list(throughput.stages_s)
        (50, ['read', 'batch', 'pad', 'place'])

    Args:
        ds: The dataset: what `shard_to` returns, or any iterable of batches, whose stages then tell
            nothing.
        num_batches: Batches to measure.
        warmup: Batches to leave out before them: compilation, and then the use of the buffers that
            filled while it lasted. Fewer, so that one is measured, if the dataset ends early.
        step: Called with each batch, e.g. a closure around the train step that keeps the state; it
            has to return something that the step computes, such as the loss, to be waited for.
            None measures the pipeline alone, and the loop does nothing but wait.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    return Throughput.of_loop(ds, num_batches, warmup, step)
