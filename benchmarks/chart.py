"""Draws the picture of the results: the speed of grain_shard relative to three other loaders."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import reading
from benchmarks.figures import figure
from benchmarks.measure import quartiles
from benchmarks.saved import Measured
from grain_shard.tools import palette

# The loaders in the picture. Other loaders, and goals with other units, are only in the tables.
_SHOWN = {
    "Grain's guide": "Grain's guide",
    "Grain tuned": "Grain, tuned by hand:\n2 threads, 4 batches ahead",
    "by hand": "a loop written by hand\nfor just this",
}


def write_chart(measured: Measured, path: Path) -> bool:
    """Draws a bar for each loader, and returns True; False if none of them was measured."""
    shown = {
        _SHOWN[result.comparison.theirs]: quartiles(result.values)
        for group, results in measured
        if group.title == reading.WHAT
        for result in results
        if result.comparison.theirs in _SHOWN and result.values
    }
    if not shown:
        return False

    drawing = Figure(figsize=(8, 1.1 + 0.55 * len(shown)), layout="constrained")
    axes = drawing.add_subplot()
    medians = [median for _, median, _ in shown.values()]
    below = [median - low for low, median, _ in shown.values()]
    above = [high - median for _, median, high in shown.values()]
    axes.barh(list(shown), medians, color=palette.BLUE, height=0.6)
    axes.errorbar(
        medians, list(shown), xerr=(below, above), fmt="none", ecolor="black", lw=1, capsize=3
    )
    for name, (_, median, high) in shown.items():
        axes.annotate(
            figure(median, "x"), (high, name), (6, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color="black", ls=":")
    axes.annotate(
        "as fast",
        (1, 0),
        (0, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=9,
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        f"How many times as fast grain_shard is, with nothing set:\n{reading.WHAT}",
        loc="left",
        fontsize=10,
    )
    drawing.savefig(path, dpi=120, metadata={"Software": None})
    return True
