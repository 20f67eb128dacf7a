"""Draws a measured loop over time, with a lane for each stage."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from grain_shard.spans import BATCH, PAD, PLACE, READ, STEP, WAIT, WORK
from grain_shard.tools import palette
from grain_shard.tools.measuring.measurement import Measurement

_COLORS = {
    READ: palette.BLUE,
    BATCH: palette.SKY,
    PAD: palette.PURPLE,
    PLACE: palette.ORANGE,
    WORK: palette.GRAY,
    WAIT: palette.VERMILION,
    STEP: palette.GREEN,
}
_LANE_HEIGHT = 0.8


class _Picture(Figure):
    """A matplotlib figure that is made without pyplot, so that Jupyter shows it only once.

    Jupyter shows a figure twice if pyplot has it open.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def draw(measured: Measurement, bottleneck: str) -> Figure:
    """Returns a figure with a lane for each stage over time. A lane has a strip for each thread.

    Args:
        measured: The measured loop.
        bottleneck: Name of the stage that holds the loop up. The lane of this stage is marked.
    """
    lanes = measured.lanes_s
    figure = _Picture(figsize=(11, 1.6 + 0.5 * len(lanes)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for y, lane in enumerate(lanes):
        spans = [s for s in measured.spans if s.stage == lane]
        threads = sorted({s.thread for s in spans})
        height = _LANE_HEIGHT / len(threads)
        for i, thread in enumerate(threads):
            bars = [(s.start * 1e3, (s.end - s.start) * 1e3) for s in spans if s.thread == thread]
            bottom = y - _LANE_HEIGHT / 2 + i * height
            color = _COLORS[lane]
            # Every other bar is lighter, so that adjacent spans can be told apart.
            shades = [(color, 1.0), (color, 0.6)]
            axes.broken_barh(bars, (bottom, height), facecolor=shades, edgecolor=color)
        a_batch = lanes[lane] / measured.num_batches * 1e3
        # A line without points, which makes the entry of this lane in the legend.
        axes.plot([], [], color=_COLORS[lane], linewidth=7, label=f"{lane} {a_batch:.2f} ms")
    names = [f"{lane}\n(bottleneck)" if lane == bottleneck else lane for lane in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.set_ylim(len(lanes) - 0.5, -0.5)  # the first lane is at the top
    axes.set_xlim(0, measured.seconds * 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{measured.num_batches} batches, {measured.busy(WAIT):.0%} of the time waiting;"
        f" bottleneck: {bottleneck}",
        loc="left",
    )
    figure.legend(
        loc="outside lower center", ncols=len(lanes), frameon=False, title="time for a batch"
    )
    return figure
