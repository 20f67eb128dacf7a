"""`profile`: the speed of batches, the stage that a training loop waits for, and advice."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grain_shard.errors import GrainShardError, require_int
from grain_shard.iteration.sharded_dataset import sharded
from grain_shard.spans import LOOP, WAIT
from grain_shard.tools.measuring.bottleneck import Bottleneck, find_bottleneck
from grain_shard.tools.measuring.loop import run_loop
from grain_shard.tools.measuring.measurement import Measurement, PipelineFacts
from grain_shard.tools.showing.tables import broken

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Width of the text in characters. A notebook does not break long lines by itself.
_WIDTH = 80


class Profile(Measurement):
    """A measured loop, with the stage that holds it up and the changes to make.

    Printed, it is a text. Jupyter also shows it as a picture. The base class `Measurement` has the
    figures.

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

        "read", "batch", "pad" and "place" are stages of the pipeline, and "step" is the training
        step. "buffer": the buffers are too small, because a few batches take much longer than
        most. "workers": worker processes, which this process cannot measure. "executor": the
        tasks of an executor. "handover": work between the last stage and the loop. "unseen": no
        stage explains the waiting, the dataset has no measured stages, or there were too few
        batches.
        """
        return self.found.name

    @property
    def advice(self) -> tuple[str, ...]:
        """The changes that would make the loop faster, one text each."""
        return self.found.advice

    def plot(self) -> Figure:
        """Returns a matplotlib figure that shows the stages and the loop over time.

        Raises:
            GrainShardError: matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise GrainShardError(
                "a timeline needs matplotlib, which is not installed.\n"
                '  remedy: pip install "grain-shard[plot]", or print the profile.'
            )
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
            threads = len({s.thread for s in self.spans if s.stage == lane})
            times = f"{total_s:>12.3f} s{self._a_batch(total_s):>14}"
            lines.append(f"{lane:<8}{threads:>7}{times}{self.busy(lane):>8.0%}")
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
    """Runs a training loop for some batches, and measures the loop and every stage of the pipeline.

    For each batch the loop waits, and then runs the step. The *wait* ends when the whole batch is
    on the devices, which may be after ``next`` returns. The *step* ends when its result is
    computed. (A training loop that does not wait for the result is a little faster.) Examples and
    bytes per second are by the wall clock over the whole loop.

    The stages of a `shard_to` pipeline measure their own times. These times overlap with the step
    and with each other: several threads read, stack and pad at the same time, and a thread takes
    longer if it has to share a processor. Work in worker processes (`num_workers`) is not measured.
    On several hosts each host measures itself.

    JAX's profiler shows the same stages as ``grain_shard.read`` and so on, above the work of the
    devices. To see them there, call this function inside ``with jax.profiler.trace(folder)``.

    Example:
        >>> import grain, jax
        >>> ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8)
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> measured = profile(ds.shard_to(mesh), lambda batch: batch["x"].sum(), num_batches=20)
        >>> list(measured.lanes_s)
        ['read', 'batch', 'pad', 'place', 'wait', 'step']

    Args:
        ds: The dataset that `shard_to` returned, or any other iterable of batches, of which only
            the loop can be measured. It is read once, so a short dataset should `.repeat()`. A
            given iterator is not closed.
        step: The training step, called with each batch, e.g. a closure that keeps the model's
            state. It must return a result to wait for, such as the loss. None measures the pipeline
            alone: the loop only takes batches.
        num_batches: Number of batches to measure.
        warmup: Number of batches before the measured ones. While the step compiles, the buffers
            fill, so the next batches arrive too fast. If the dataset ends early, fewer batches are
            left out, so that at least one is measured.

    Returns:
        The measurement, to print or to plot. Jupyter displays it by itself.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: `num_batches` is not a positive integer, or `warmup` is negative or not an
            integer.
    """
    require_int("num_batches", num_batches, 1)
    require_int("warmup", warmup, 0)
    spans, sizes, read_threads = run_loop(ds, warmup + num_batches, step)
    if not sizes:
        raise ValueError("the dataset has no batch to measure.")
    warmup = min(warmup, len(sizes) - 1)  # the dataset may have ended early
    sizes = sizes[warmup:]
    # The measured loop begins with the wait for its first batch.
    start = [s.start for s in spans if s.stage == WAIT][warmup]
    end = max(s.end for s in spans if s.stage in LOOP)
    pipeline = sharded(ds)
    return Profile(
        num_batches=len(sizes),
        num_batches_asked=num_batches,
        warmup=warmup,
        # A clock has a smallest unit, so a short loop may take 0 s. The rates divide by `seconds`.
        seconds=max(end - start, time.get_clock_info("perf_counter").resolution),
        recorded_spans=tuple(s._replace(start=s.start - start, end=s.end - start) for s in spans),
        pipeline=None if pipeline is None else PipelineFacts.of(pipeline),
        num_examples=sum(size["records"] for size in sizes),
        num_bytes=sum(size["bytes"] for size in sizes),
        read_threads=read_threads,
    )
