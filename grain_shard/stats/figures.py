"""The account of an iterator: `Figures` are sums and all that follows, and `Stats` two of them.

Each figure is one entry in `Figures`: a function of the sums, with the words for its result.
`Stats.as_dict`, the text and Prometheus follow from the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

from grain_shard.hosts.slowest import SlowestHost, Waits
from grain_shard.reading.faults import FaultCounts
from grain_shard.spans import AGREE, BATCH, MAP, PAD, PLACE, READ, STEP, WAIT
from grain_shard.stats.counts import BUSY, MAKING, ReadThreads, busiest

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)
_MS, _MB = 1e3, 1e-6
# The lines of the text begin with these words.
DONE, RATES, LOOP, THREADS = "done", "on this host", "a batch", "its making, of all threads"


class Figure(NamedTuple):
    """The words for one figure, which is a property of `Figures`.

    Attributes:
        line: First words of the line on which it is printed.
        words: Its text on this line, with a place for the figure.
        scale: Factor from the figure to the unit of the text.
        is_sum: Whether it only grows. `Stats.as_dict` has a sum since the beginning, and any other
            figure of late.
    """

    line: str
    words: str
    scale: float = 1
    is_sum: bool = False


FIGURES: dict[str, Figure] = {}


def _figure(*words: Any, is_sum: bool = False) -> Callable[[Callable[[Any], _T]], _T]:
    def entered(compute: Callable[[Any], _T]) -> _T:
        FIGURES[compute.__name__] = Figure(*words, is_sum=is_sum)
        return cast(Any, property(compute))  # for a type checker the attribute is the value

    return entered


@dataclass(frozen=True)
class Figures:
    """The figures of an iterator over its life or over a part of it, each an attribute.

    Seconds of stages are summed over all threads. A figure that cannot be measured is None, such as
    the stages of worker processes.

    Example:
        >>> sums = {"seconds": 2.0, "wait": 0.5, "step": 1.5, "batches": 100, "records": 25_600}
        >>> of_late = Figures(sums)
        >>> of_late.wait_share, of_late.wait_s, of_late.step_s, of_late.records_per_s
        (0.25, 0.005, 0.015, 12800.0)

    Attributes:
        sums: By name. "seconds" end when the last batch was handed out, or now if the loop waits
            for one; the loop spent "wait" and "step" seconds of them. "batches" were handed out,
            with this host's "records" and "bytes". "placed" batches are on the devices. "retries"
            and "bad_records" are as in `FaultCounts`. A missing sum is 0.
        stages_s: Seconds of each stage, by (thread, stage); a thread is its number or its name.
        reads: The threads that read now.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    stages_s: Mapping[tuple[int | str, str], float] = field(default_factory=dict)
    reads: ReadThreads = field(default_factory=ReadThreads)

    def __getitem__(self, name: str) -> float:
        return self.sums.get(name, 0)

    def since(self, before: Figures) -> Figures:
        """Returns the figures of the time after `before`."""
        return replace(
            self,
            sums=_difference(self.sums, before.sums),
            stages_s=_difference(self.stages_s, before.stages_s),
        )

    def stage_s(self, *stages: str) -> float:
        """Returns the seconds of these stages, of all their threads together."""
        return sum((s for (_, stage), s in self.stages_s.items() if stage in stages), 0.0)

    def threads(self, *stages: str) -> int:
        """Returns the number of threads that were at work in these stages."""
        return len({at for (at, stage), s in self.stages_s.items() if stage in stages and s > 0})

    @_figure(DONE, "{:,} batches", is_sum=True)
    def batches(self) -> int:
        """Batches that were handed out."""
        return int(self["batches"])

    @_figure(DONE, "{:,} records", is_sum=True)
    def records(self) -> int:
        """Rows of these batches on this host that are no padding."""
        return int(self["records"])

    @_figure(DONE, "{:,.1f} MB", _MB, is_sum=True)
    def bytes(self) -> int:
        """Bytes of these batches on this host, padding included."""
        return int(self["bytes"])

    @_figure(DONE, "{:,.1f} s", is_sum=True)
    def seconds(self) -> float:
        """Time until the last batch was handed out, or until now if the loop waits for one."""
        return self["seconds"]

    @_figure(DONE, "of which the loop waited {:.0f} %", 100)
    def wait_share(self) -> float:
        """Share of the time, 0 to 1, in which the loop waited for a batch."""
        # A difference of sums may be below 0 by a rounding error.
        return self[WAIT] / ((self[WAIT] + max(0.0, self[STEP])) or 1)

    @_figure(DONE, "busiest: {}")
    def busiest(self) -> str | None:
        """The stage whose threads were busiest, which is "read", "batch", "pad" or "place"."""
        seen = self.threads(*MAKING)
        # More threads may have been seen than are to work now.
        threads = max(1, min(seen, self.reads.number or seen))
        making = self.stage_s(*MAKING) / threads / (self.seconds or 1)
        placing = self.stage_s(PLACE) / (self.seconds or 1)
        return busiest(making, placing, self.stage_s, least=0 if making else BUSY)

    @_figure(DONE, "{:,} reads tried again", is_sum=True)
    def retries(self) -> int:
        """Reads that failed and were tried again."""
        return int(self["retries"])

    @_figure(DONE, "{:,} records masked as bad", is_sum=True)
    def bad_records(self) -> int:
        """Unreadable records, whose rows are masked."""
        return int(self["bad_records"])

    @_figure(RATES, "{:,.0f} records/s")
    def records_per_s(self) -> float:
        """Records per second on this host."""
        return self.records / (self.seconds or 1)

    @_figure(RATES, "{:,.1f} MB/s", _MB)
    def bytes_per_s(self) -> float:
        """Bytes of this host a second."""
        return self.bytes / (self.seconds or 1)

    @_figure(LOOP, "wait {:,.2f} ms", _MS)
    def wait_s(self) -> float:
        """Seconds per batch for which the loop waited; before the first batch, its wait for it."""
        return self[WAIT] / max(1, self.batches)

    @_figure(LOOP, "step {:,.2f} ms", _MS)
    def step_s(self) -> float:
        """Seconds of the loop between two batches."""
        return max(0.0, self[STEP]) / max(1, self.batches)

    @_figure(THREADS, "read {:,.2f} ms", _MS)
    def read_s(self) -> float | None:
        """Seconds to read and decode the records of a batch, or to take it from its stream."""
        return self._a_batch(READ)

    @_figure(THREADS, "of which your functions {:,.2f} ms", _MS)
    def map_s(self) -> float | None:
        """Seconds of `read_s` that the user's functions took.

        None unless a `MapDataset` is read by record.
        """
        return self._a_batch(MAP)

    @_figure(THREADS, "batch {:,.2f} ms", _MS)
    def batch_s(self) -> float | None:
        """Seconds to stack the records of a batch."""
        return self._a_batch(BATCH)

    @_figure(THREADS, "pad {:,.2f} ms", _MS)
    def pad_s(self) -> float | None:
        """Seconds to pad a batch."""
        return self._a_batch(PAD)

    @_figure(THREADS, "place {:,.2f} ms", _MS)
    def place_s(self) -> float | None:
        """Seconds to put a batch on the devices."""
        return self._a_batch(PLACE)

    @_figure(THREADS, "agree {:,.2f} ms", _MS)
    def agree_s(self) -> float | None:
        """Seconds a batch until all hosts knew whether there is another; None if they need not."""
        return self._a_batch(AGREE)

    def _a_batch(self, stage: str) -> float | None:
        is_seen = any(name == stage for _, name in self.stages_s)
        return self.stage_s(stage) / max(1, self["placed"]) if is_seen else None

    def line(self, line: str) -> str:
        """Returns the figures of one line of ``str(self)``. A figure that is None or 0 is left out.

        Args:
            line: The first words of the line, such as `LOOP`. The result is the text after them.
        """
        texts = [
            one.words.format(value if isinstance(value, str) else value * one.scale)
            for name, one in FIGURES.items()
            if one.line == line and (value := getattr(self, name))
        ]
        return ", ".join(texts) or "not seen"

    def __str__(self) -> str:
        return "\n".join(f"{line}: {self.line(line)}" for line in (DONE, RATES, LOOP, THREADS))


def _difference(now: Mapping[_Key, float], before: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: value - before.get(key, 0) for key, value in now.items()}


def waits(figures: Figures, least_s: float) -> Waits:
    """Returns how the loop waited for this host's data, without its wait for other hosts' votes.

    Args:
        figures: The figures of some time.
        least_s: Least length of this time in seconds: a loop that has only begun, or rests most of
            the time, holds nobody up for long.
    """
    wait_s = max(0.0, figures[WAIT] - figures.stage_s(AGREE))
    share = wait_s / (max(figures.seconds, least_s) or 1)
    return Waits(share, wait_s / max(1, figures.batches), figures.busiest)


@dataclass(frozen=True)
class Stats:
    """The figures of an iterator, which `ShardedIterator.stats` returns.

    Example:
        >>> import grain, jax
        >>> import grain_shard
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(20).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        >>> with iter(ds) as batches:
        ...     for batch in batches:
        ...         pass
        ...     stats = batches.stats()
        >>> stats.total.batches, stats.total.records, stats.slowest_host
        (3, 20, None)
        >>> sorted(stats.as_dict("train"))[:3]
        ['train/bad_records', 'train/batch_s', 'train/batches']

    Attributes:
        total: Figures since the iterator's first ``next``. A batch that is handed out again after
            ``set_state`` or ``seek`` counts again.
        recent: Figures of the last 30 seconds or a little more, without the first batch, which has
            the time of all beginnings.
        faults: Reads that failed on this host, with the first 1,000 bad records as ``listed``. It
            includes reads ahead of the loop.
        slowest_host: The host whose loop waits longest for its data, by how much, and in which
            stage; None on a single host, and for the first minute.
    """

    total: Figures
    recent: Figures
    faults: FaultCounts = field(default_factory=FaultCounts)
    slowest_host: SlowestHost | None = None

    @property
    def reads(self) -> ReadThreads:
        """The threads that read now; its text is empty if their number is not known."""
        return self.total.reads

    @property
    def read_threads(self) -> int | None:
        """Threads that read side by side now; None in streams, feeds and worker processes."""
        return self.reads.number

    def as_dict(self, prefix: str = "data") -> dict[str, float]:
        """Returns the figures for wandb or TensorBoard, flat: ``{"data/wait_share": 0.02, ...}``.

        Shares, times and rates are recent; counts are since the beginning. Unknown
        figures are left out.

        Args:
            prefix: The beginning of all names, to tell an evaluation from the training, say.
        """
        found = {
            **{n: getattr(self.total if f.is_sum else self.recent, n) for n, f in FIGURES.items()},
            "read_threads": self.read_threads,
        }
        if (slowest := self.slowest_host) is not None:
            found |= {
                "slowest_host": slowest.host,
                "slowest_host_behind_s": slowest.behind_s,
                "slowest_host_share": slowest.share,
            }
        return {f"{prefix}/{n}": v for n, v in found.items() if isinstance(v, int | float)}

    def __str__(self) -> str:
        lines = [str(self.recent)]
        if self.read_threads is not None:
            lines.append(f"threads that read: {self.reads}")
        if self.slowest_host is not None:
            lines.append(str(self.slowest_host))
        return "\n".join([*lines, f"since the beginning: {self.total.line(DONE)}"])
