"""`profile`: what a training loop and its pipeline do over time, and which of them holds it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from grain_shard.errors import GrainShardError
from grain_shard.measuring.bottleneck import find_bottleneck
from grain_shard.measuring.measurement import Measurement, milliseconds
from grain_shard.spans import WAIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Timeline(Measurement):
    """A measured loop over time. Its text says what to change; in Jupyter it is a picture, too.

    Example:
        >>> from grain_shard.spans import Span
        >>> reading = Span("read", "host-0", 0.0, 0.75)
        >>> loop = Span("wait", "main", 0.0, 0.75), Span("step", "main", 0.75, 1.0)
        >>> timeline = Timeline(1, 1, 0, 1.0, (reading, *loop))
        >>> timeline.bottleneck, timeline.wait_share
        ('read', 0.75)
    """

    @property
    def wait_share(self) -> float:
        """The part of the loop's time that it spent waiting for batches, 0 to 1."""
        return self.busy(WAIT)

    @property
    def bottleneck(self) -> str:
        """What holds the loop up.

        A stage ("read", "batch", "pad", "place"), the "step" itself, the "buffer" (too small for
        batches that differ much in what they take), the "workers" (processes, which are not seen),
        the "handover" (whatever comes between the devices and the loop), or "unseen" (a dataset
        whose stages tell nothing).
        """
        return find_bottleneck(self).name

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, in sentences."""
        return find_bottleneck(self).advice

    def plot(self) -> Figure:
        """Draws the lanes over time, as a matplotlib figure.

        Raises:
            GrainShardError: matplotlib is not installed.
        """
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise GrainShardError(
                "a timeline is drawn by matplotlib, which is not installed.\n"
                '  remedy: pip install "grain-shard[plot]", or print the timeline for its text.'
            ) from error
        from grain_shard.measuring.timeline_plot import draw

        return draw(self, self.bottleneck)

    def __str__(self) -> str:
        found = find_bottleneck(self)
        lines = [
            f"{self.num_batches} batches{self.count_note()},"
            f" {milliseconds(self.seconds / self.num_batches)} each;"
            f" the loop waits {self.wait_share:.1%} of the time",
            "",
            f"{'lane':<8}{'threads':>7}{'total':>14}{'a batch':>14}{'busy':>8}",
        ]
        for lane, total_s in self.lanes_s.items():
            threads, busy = self.threads(lane), f"{self.busy(lane):.0%}"
            a_batch = milliseconds(total_s / self.num_batches)
            lines.append(f"{lane:<8}{threads:>7}{f'{total_s:.3f} s':>14}{a_batch:>14}{busy:>8}")
        lines += ["", f"bottleneck: {found.name}; {found.reason}"]
        lines += [f"  - {advice}" for advice in found.advice]
        if self.pipeline is not None and self.pipeline.num_workers:
            lines.append(
                "not seen: reading, stacking and padding in the worker processes (num_workers="
                f"{self.pipeline.num_workers})."
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        try:
            display(self.plot())
        except GrainShardError as error:
            print(error)
        print(self)


def profile(
    ds: Iterable[Any],
    step: Callable[[Any], Any] | None = None,
    num_batches: int = 50,
    *,
    warmup: int = 10,
) -> Timeline:
    """Runs a training loop for some batches, and tells what everything in it did meanwhile.

    The loop is that of `measure_throughput`, which gives averages and examples per second; this
    tells when each thing was done, what holds the loop up, and what to change. In Jupyter the
    result is a picture, in a terminal a table and sentences.

    The same lanes are in JAX's profiler as ``grain_shard.read`` and so on: call this inside
    ``with jax.profiler.trace(folder)`` to see them above what the devices do.

    What runs in worker processes (`num_workers`) is not seen. On several hosts each tells its own.

    Example:
        >>> import time
        >>> import grain, jax
        >>> ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8)
        >>> def step(batch):
        ...     time.sleep(0.01)  # a step that takes longer than its batch
        ...     return batch["x"].sum()
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> timeline = profile(ds.shard_to(mesh), step, num_batches=20)
        >>> timeline.bottleneck
        'step'

    Args:
        ds: As for `measure_throughput`.
        step: As for `measure_throughput`.
        num_batches: As for `measure_throughput`.
        warmup: As for `measure_throughput`.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    return Timeline.of_loop(ds, num_batches, warmup, step)
