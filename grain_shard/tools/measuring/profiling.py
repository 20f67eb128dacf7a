"""`profile`: the speed of batches, the stage that a training loop waits for, and advice."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from grain_shard.errors import GrainShardError, require_int
from grain_shard.iteration.sharded_dataset import sharded
from grain_shard.spans import STEP, WAIT
from grain_shard.tools.extras import missing, not_installed
from grain_shard.tools.measuring.bottleneck import Bottleneck, find_bottleneck
from grain_shard.tools.measuring.loop import run_loop
from grain_shard.tools.measuring.measurement import Measurement, Pipeline
from grain_shard.tools.showing.tables import broken

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WIDTH = 80  # a notebook does not break long lines


class Profile(Measurement):
    """A measured loop. Its text says what to change; in Jupyter it is a picture, too.

    Its figures come from `Measurement`.

    Example:
        >>> from grain_shard.spans import Span
        >>> loop = Span("wait", "main", 0.0, 0.75), Span("step", "main", 0.75, 1.0)
        >>> measured = Profile(1, 1, 5, 1.0, (Span("read", "host-0", 0.0, 0.75), *loop))
        >>> measured.wait_share, measured.bottleneck
        (0.75, 'read')
    """

    @functools.cached_property
    def found(self) -> Bottleneck:
        """The stage that holds the loop up, with the reason and the advice."""
        return find_bottleneck(self)

    @property
    def bottleneck(self) -> str:
        """The name of the stage that holds the loop up.

        A stage ("read", "batch", "pad", "place"), the "step" itself, the "buffer" (too small for
        a few batches that take much longer than the others), the "workers" (processes, which are
        not seen), the "executor" (its tasks), the "handover" (anything between the devices and
        the loop), or "unseen" (a dataset without stages that are seen, time outside of them, or
        too few batches to tell).
        """
        return self.found.name

    @property
    def advice(self) -> tuple[str, ...]:
        """The changes to make, in sentences."""
        return self.found.advice

    def plot(self) -> Figure:
        """Draws the lanes over time, as a matplotlib figure.

        Raises:
            GrainShardError: matplotlib is not installed.
        """
        if lacking := missing(("matplotlib",)):
            raise not_installed("a timeline", "plot", lacking, ", or print the profile.")
        from grain_shard.tools.measuring.timeline_plot import draw

        return draw(self, self.bottleneck)

    def __str__(self) -> str:
        ended = self.num_batches < self.num_batches_asked
        asked = f" of {self.num_batches_asked}, then the dataset ended" if ended else ""
        lines = [
            f"batches measured: {self.num_batches}{asked} (after {self.warmup} of warm-up)",
            f"{self.examples_per_second:,.0f} examples/s, {self.bytes_per_second / 1e6:,.1f} MB/s,"
            f" {self._a_batch(self.seconds)} a batch;"
            f" the loop waits {self.wait_share:.1%} of the time",
            "",
            f"{'lane':<8}{'threads':>7}{'total':>14}{'a batch':>14}{'busy':>8}",
        ]
        for lane, total_s in self.lanes_s.items():
            threads, a_batch = f"{self.figures.threads(lane):>7}", f"{self._a_batch(total_s):>14}"
            lines.append(f"{lane:<8}{threads}{total_s:>12.3f} s{a_batch}{self.busy(lane):>8.0%}")
        if self.read_threads:
            lines += [
                "",
                f"reads side by side, adapted while the loop ran: {self.read_threads}",
                "(threads come and go until this number is found; the table counts all of them)",
            ]
        lines += ["", broken(f"bottleneck: {self.bottleneck}; {self.found.reason}", _WIDTH)]
        lines += [broken(f"  - {advice}", _WIDTH) for advice in self.advice]
        if self.pipeline is not None and self.pipeline.num_workers:
            unseen = "not seen: reading, stacking and padding in the worker processes"
            lines.append(broken(f"{unseen} (num_workers={self.pipeline.num_workers}).", _WIDTH))
        return "\n".join(lines)

    __repr__ = __str__

    def _a_batch(self, seconds: float) -> str:
        return f"{seconds / self.num_batches * 1e3:.3f} ms"

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
) -> Profile:
    """Runs a training loop for some batches, and measures the loop and every stage.

    A loop takes batches from the dataset. *Wait* ends when all of the batch is on the devices, not
    when ``next`` returns; *step* ends when the step's result is there. A training loop that lets
    the devices run behind its Python code is a little faster. Examples and bytes per second are by
    the wall clock over the whole loop.

    The stages of a `shard_to` pipeline measure their own times. These times overlap with the step
    and with each other: several threads read, stack and pad side by side, and each takes longer
    than alone if they have to share processors. Work in worker processes (`num_workers`) is not
    seen. On several hosts each host measures itself.

    The same lanes are in JAX's profiler as ``grain_shard.read`` and so on: call this inside
    ``with jax.profiler.trace(folder)`` to see them above what the devices do.

    Example:
        >>> import time
        >>> import grain, jax
        >>> ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8)
        >>> def step(batch):
        ...     time.sleep(0.01)  # a step that takes longer than its batch
        ...     return batch["x"].sum()
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> measured = profile(ds.shard_to(mesh), step, num_batches=20)
        >>> measured.bottleneck, list(measured.stages_s)
        ('step', ['read', 'batch', 'pad', 'place'])

    Args:
        ds: The dataset: what `shard_to` returns, or any iterable of batches, whose stages are
            unknown. One pass is taken: a short one should `.repeat()`. An iterator is the caller's
            own and is not closed.
        step: Called with each batch, e.g. a closure around the train step that keeps the state; it
            has to return something that the step computes, such as the loss, to be waited for.
            None measures the pipeline alone, and the loop does nothing but wait.
        num_batches: Batches to measure.
        warmup: Batches to leave out before the measured ones. The step compiles in the first, and
            the next ones come from buffers that filled meanwhile. If the dataset ends early, fewer
            batches are left out, so that one is measured.

    Returns:
        The measurement, to print or to plot. Jupyter displays it by itself.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    require_int("num_batches", num_batches, 1)
    require_int("warmup", warmup, 0)
    loop = run_loop(ds, warmup + num_batches, step)
    if not loop.sizes:
        raise ValueError("the dataset has no batch to measure.")
    warmup = min(warmup, len(loop.sizes) - 1)
    sizes = loop.sizes[warmup:]
    start = [s.start for s in loop.spans if s.stage == WAIT][warmup]
    end = max(s.end for s in loop.spans if s.stage == (WAIT if step is None else STEP))
    pipeline = sharded(ds)
    return Profile(
        num_batches=len(sizes),
        num_batches_asked=num_batches,
        warmup=warmup,
        # Clocks have a smallest step, and no figure may be one over nothing.
        seconds=max(end - start, time.get_clock_info("perf_counter").resolution),
        recorded_spans=tuple(
            s._replace(start=s.start - start, end=s.end - start) for s in loop.spans
        ),
        pipeline=None if pipeline is None else Pipeline.of(pipeline),
        num_examples=sum(size["records"] for size in sizes),
        num_bytes=sum(size["bytes"] for size in sizes),
        read_threads=loop.read_threads,
    )


def measure_throughput(
    ds: Iterable[Any],
    num_batches: int = 50,
    warmup: int = 5,
    step: Callable[[Any], Any] | None = None,
) -> Profile:
    """`profile`, with its arguments in the order of other libraries' functions of this name."""
    return profile(ds, step, num_batches, warmup=warmup)
