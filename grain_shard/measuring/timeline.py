"""`profile`: what a training loop and its pipeline do over time, and which of them holds it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grain_shard.errors import GrainShardError
from grain_shard.iteration.sharded_dataset import Settings, ShardedDataset
from grain_shard.measuring.bottleneck import Figures, verdict
from grain_shard.measuring.measured_loop import measured_loop
from grain_shard.spans import LOOP, STAGES, Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Timeline:
    """What `profile` found. Its text says what to change; in Jupyter it is a picture, too.

    Example:
        >>> from grain_shard.spans import Span
        >>> reading = Span("read", "host-0", 0.0, 0.75)
        >>> loop = Span("wait", "main", 0.0, 0.75), Span("step", "main", 0.75, 1.0)
        >>> timeline = Timeline(1, 1, 0, 1.0, (reading, *loop))
        >>> timeline.bottleneck, timeline.wait_share
        ('read', 0.75)

    Attributes:
        num_batches: Batches that were measured.
        num_batches_asked: Batches that were to be measured; more if the dataset ended early.
        warmup: Batches that were taken before these and left out.
        seconds: How long the loop took for the measured batches.
        spans: What each lane did for a batch: (lane, thread, start, end), in seconds from the start
            of the measured loop, cut off at its ends. The lanes are "read" (read and decode the
            records of a batch, or take it from its stream), "batch" (stack them), "pad", "place"
            (hand it to the devices); and those of the loop: "wait" (for a batch that is on the
            devices), "step" (until its result is).
        settings: What the advice knows of the pipeline; None if `shard_to` did not make it.
    """

    num_batches: int
    num_batches_asked: int
    warmup: int
    seconds: float
    spans: tuple[Span, ...]
    settings: Settings | None = None

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """Seconds of work in each lane that was seen, of all its threads together."""
        return {lane: s for lane in (*STAGES, *LOOP) if (s := self._figures.total_s(lane))}

    @property
    def wait_share(self) -> float:
        """The part of the loop's time that it spent waiting for batches, 0 to 1."""
        return self._figures.wait_share

    @property
    def bottleneck(self) -> str:
        """What holds the loop up.

        A stage ("read", "batch", "pad", "place"), the "step" itself, the "buffer" (too small for
        batches that differ much in what they take), the "workers" (processes, which are not seen),
        the "handover" (whatever comes after placement), or "unseen" (a dataset whose stages tell
        nothing).
        """
        return verdict(self._figures).bottleneck

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, in sentences."""
        return verdict(self._figures).advice

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
                "  remedy: pip install matplotlib, or print the timeline for its text."
            ) from error
        from grain_shard.measuring.timeline_plot import draw

        return draw(self)

    def __str__(self) -> str:
        found, figures = verdict(self._figures), self._figures
        ended = self.num_batches < self.num_batches_asked
        asked = f" of {self.num_batches_asked}, then the dataset ended" if ended else ""
        lines = [
            f"{self.num_batches} batches{asked} (after {self.warmup} of warm-up),"
            f" {_milliseconds(self.seconds / self.num_batches)} each;"
            f" the loop waits {self.wait_share:.1%} of the time",
            "",
            f"{'lane':<8}{'threads':>7}{'total':>14}{'a batch':>14}{'busy':>8}",
        ]
        for lane, total_s in self.lanes_s.items():
            threads, busy = figures.threads(lane), f"{figures.busy(lane):.0%}"
            a_batch = _milliseconds(total_s / self.num_batches)
            lines.append(f"{lane:<8}{threads:>7}{f'{total_s:.3f} s':>14}{a_batch:>14}{busy:>8}")
        lines += ["", f"bottleneck: {found.bottleneck}; {found.reason}"]
        lines += [f"  - {advice}" for advice in found.advice]
        if self.settings is not None and self.settings.num_workers:
            lines.append(
                "not seen: reading, stacking and padding in the worker processes (num_workers="
                f"{self.settings.num_workers})."
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

    @property
    def _figures(self) -> Figures:
        return Figures(self.spans, self.seconds, self.settings)


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
        ds: The dataset: what `shard_to` returns, or any iterable of batches (whose stages then tell
            nothing).
        step: Called with each batch, e.g. a closure around the train step that keeps the state; it
            has to return something that the step computes, such as the loss, to be waited for.
            None measures the pipeline alone, and the loop does nothing but wait.
        num_batches: Batches to measure.
        warmup: Batches to leave out before them: compilation, and then the use of the buffers that
            filled while it lasted. Fewer, so that one is measured, if the dataset ends early.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    loop = measured_loop(ds, num_batches, warmup, step)
    start, end = loop.start, loop.end
    inside = [s for s in loop.spans if s.end > start and s.start < end]
    return Timeline(
        num_batches=loop.num_batches,
        num_batches_asked=num_batches,
        warmup=loop.warmup,
        seconds=end - start,
        spans=tuple(
            s._replace(start=max(s.start, start) - start, end=min(s.end, end) - start)
            for s in sorted(inside, key=lambda s: s.start)
        ),
        settings=ds.settings if isinstance(ds, ShardedDataset) else None,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
