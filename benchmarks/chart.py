"""The one picture of the results: records per second, ours and those of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import reading
from benchmarks.measure import Result, quartiles
from grain_shard import palette

# All else is in the table: other units, other goals, other peers.
_SHOWN = {
    "Grain's guide": "Grain's guide",
    "Grain tuned": "Grain, tuned by hand:\n2 threads, 4 batches ahead",
    "by hand": "a loop written by hand\nfor just this",
}


def write_chart(results: Sequence[Result], path: Path) -> bool:
    """A bar for ours and one for each of three others; whether these have been measured."""
    shown = [
        result
        for result in results
        if result.comparison.what == reading.WHAT
        and result.comparison.theirs in _SHOWN
        and result.values
    ]
    if not shown:
        return False
    rates = {_SHOWN[result.comparison.theirs]: result.theirs for result in shown}
    rates["grain_shard,\nwith nothing set"] = shown[0].ours  # of the same rounds for all of them

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.55 * len(rates)), layout="constrained")
    axes = figure.add_subplot()
    medians = [quartiles(values)[1] for values in rates.values()]
    colors = [palette.GRAY] * len(shown) + [palette.BLUE]
    bars = axes.barh(list(rates), medians, color=colors)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=4)
    axes.margins(x=0.12)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"Records per second:\n{reading.WHAT}", loc="left", fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True
