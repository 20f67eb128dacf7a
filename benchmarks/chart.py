"""The results as a picture: how far each figure is from its goal, on which side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Result, quartiles
from benchmarks.report import cells

MET, MISSED = "#2a7f62", "#b5432e"


def write_chart(results: Sequence[Result], path: Path) -> None:
    """A row for each goal; a dot at the median, a line from quartile to quartile."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [result for result in results if result.met is not None]
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(11, 1.4 + 0.45 * len(shown)), layout="constrained")
    for row, result in enumerate(shown):
        goal = result.comparison.goal
        assert goal is not None
        low, middle, high = (max(1e-3, goal.margin(v)) for v in quartiles(result.values))
        color = MET if result.met else MISSED
        axes.plot([low, high], [row, row], color=color, linewidth=3, alpha=0.4)
        axes.plot(middle, row, "o", color=color, markersize=8)
        _, _, _, _, _, goal_text, measured, _, _ = cells(result)
        axes.annotate(
            f"{measured}   (goal: {goal_text})",
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            color=color,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(
        range(len(shown)),
        [f"{r.comparison.number}  {r.comparison.what}\nvs {r.comparison.against}" for r in shown],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("times better than its goal (1 = the goal; left of it is missed)")
    figure.savefig(path, dpi=150)
    plt.close(figure)
