"""The statistics of an iterator.

`Figures` holds sums over a period, and each figure is a property computed from them. `Stats` holds
the figures of two periods: the whole run, and the last minute. To add a figure, write one method of
`Figures` under `@_figure`, with the line on which it is printed and its format. `Stats.as_dict` and
``str(stats)`` then have it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

from grain_shard.reading.faults import FaultCounts
from grain_shard.spans import AGREE, BATCH, MAP, PAD, PLACE, READ, STEP, WAIT
from grain_shard.stats.counts import BUSY, MAKING, ReadThreads, busiest

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)
_MS, _MB = 1e3, 1e-6
# The first words of each line of ``str(Figures)``.
DONE, RATES, LOOP, THREADS = "done", "on this host", "a batch", "threads' time for a batch"


class Figure(NamedTuple):
    """The text of one figure, which is a property of `Figures`.

    Attributes:
        line: First words of the line on which the figure is printed.
        words: Format string of the figure, such as "{:,} batches".
        scale: Factor from the figure to the unit of the text.
        is_sum: True if the figure only grows. `Stats.as_dict` takes such a figure from the whole
            run, and any other figure from the last minute.
    """

    line: str
    words: str
    scale: float = 1
    is_sum: bool = False


FIGURES: dict[str, Figure] = {}


def _figure(*words: Any, is_sum: bool = False) -> Callable[[Callable[[Any], _T]], _T]:
    """Makes a method of `Figures` a property, and enters its `Figure(*words)` in `FIGURES`."""

    def entered(compute: Callable[[Any], _T]) -> _T:
        FIGURES[compute.__name__] = Figure(*words, is_sum=is_sum)
        return cast(Any, property(compute))  # type checkers see the type of the figure itself

    return entered


@dataclass(frozen=True)
class Figures:
    """The figures of an iterator in a period: its whole life, or a part of it.

    Each figure is an attribute. The seconds of a stage are summed over all threads. A figure that
    cannot be measured is None. Stages that run in worker processes are not measured.

    Example:
        >>> sums = {"seconds": 2.0, "wait": 0.5, "step": 1.5, "batches": 100, "records": 25_600}
        >>> of_late = Figures(sums)
        >>> of_late.wait_share, of_late.wait_s, of_late.step_s, of_late.records_per_s
        (0.25, 0.005, 0.015, 12800.0)

    Attributes:
        sums: The sums by name. A missing sum is 0. "seconds" is the length of the period, which
            ends when the last batch was handed out, or now if the loop waits for a batch. "wait"
            is the part in which the loop waited, and "step" is the other part. "batches" is the
            number of batches that were handed out, with this host's "records" and "bytes".
            "placed" is the number of batches put on the devices. "retries" and "bad_records" are
            counted as in `FaultCounts`.
        stages_s: Seconds of each stage, by (thread, stage). A thread is given by its number or its
            name.
        reads: The number of threads that read now, and the reason for it.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    stages_s: Mapping[tuple[int | str, str], float] = field(default_factory=dict)
    reads: ReadThreads = field(default_factory=ReadThreads)

    def __getitem__(self, name: str) -> float:
        return self.sums.get(name, 0)

    def since(self, before: Figures) -> Figures:
        """Returns the figures of the part of this period after `before`, which began with it."""
        return replace(
            self,
            sums=_difference(self.sums, before.sums),
            stages_s=_difference(self.stages_s, before.stages_s),
        )

    def stage_s(self, *stages: str) -> float:
        """Returns the seconds that all threads together spent in the given stages."""
        return sum((s for (_, stage), s in self.stages_s.items() if stage in stages), 0.0)

    def threads(self, *stages: str) -> int:
        """Returns the number of threads that worked in at least one of the given stages."""
        return len({at for (at, stage), s in self.stages_s.items() if stage in stages and s > 0})

    @_figure(DONE, "{:,} batches", is_sum=True)
    def batches(self) -> int:
        """Number of batches that were handed out."""
        return int(self["batches"])

    @_figure(DONE, "{:,} records", is_sum=True)
    def records(self) -> int:
        """Number of records on this host in the batches that were handed out.

        Rows of padding count only if the batches have no mask.
        """
        return int(self["records"])

    @_figure(DONE, "{:,.1f} MB", _MB, is_sum=True)
    def bytes(self) -> int:
        """Bytes of this host's rows in the batches that were handed out, padding included."""
        return int(self["bytes"])

    @_figure(DONE, "{:,.1f} s", is_sum=True)
    def seconds(self) -> float:
        """Length of the period in seconds.

        The period ends when the last batch was handed out, or now if the loop waits for a batch.
        """
        return self["seconds"]

    @_figure(DONE, "of which the loop waited {:.0f} %", 100)
    def wait_share(self) -> float:
        """Share of the time, 0 to 1, in which the loop waited for this host's own data."""
        # "step" is a difference of sums, which a rounding error may make negative.
        return self._own_wait_s / ((self[WAIT] + max(0.0, self[STEP])) or 1)

    @_figure(DONE, "busiest: {}")
    def busiest(self) -> str | None:
        """The stage whose threads were busiest ("read", "batch", "pad" or "place").

        None if only placement is measured, and it takes less than half of the time.
        """
        seen = self.threads(*MAKING)
        # Some of the threads that have worked may rest by now, if fewer threads read better.
        threads = max(1, min(seen, self.reads.number or seen))
        making = self.stage_s(*MAKING) / threads / (self.seconds or 1)
        placing = self.stage_s(PLACE) / (self.seconds or 1)
        return busiest(making, placing, self.stage_s, least=0 if making else BUSY)

    @_figure(DONE, "{:,} reads tried again", is_sum=True)
    def retries(self) -> int:
        """Number of reads that failed and were tried again."""
        return int(self["retries"])

    @_figure(DONE, "{:,} records masked as bad", is_sum=True)
    def bad_records(self) -> int:
        """Number of records that could not be read, so that their rows are masked."""
        return int(self["bad_records"])

    @_figure(RATES, "{:,.0f} records/s")
    def records_per_s(self) -> float:
        """Records per second on this host, in the batches that were handed out."""
        return self.records / (self.seconds or 1)

    @_figure(RATES, "{:,.1f} MB/s", _MB)
    def bytes_per_s(self) -> float:
        """Bytes per second of this host's rows in the batches handed out, padding included."""
        return self.bytes / (self.seconds or 1)

    @_figure(LOOP, "wait {:,.2f} ms", _MS)
    def wait_s(self) -> float:
        """Seconds that the loop waited for this host's own data, on average over the batches.

        Before the first batch it is the time that the loop has waited so far.
        """
        return self._own_wait_s / max(1, self.batches)

    @_figure(LOOP, "step {:,.2f} ms", _MS)
    def step_s(self) -> float:
        """Seconds from a batch until the loop asks for the next batch, on average."""
        return max(0.0, self[STEP]) / max(1, self.batches)

    @_figure(THREADS, "read {:,.2f} ms", _MS)
    def read_s(self) -> float | None:
        """Seconds to read and decode the records of a batch, summed over all threads.

        In a stream it is the time to take the batch from the stream. None if not measured.
        """
        return self._a_batch(READ)

    @_figure(THREADS, "your functions (a part of read) {:,.2f} ms", _MS)
    def map_s(self) -> float | None:
        """Seconds per batch in the user's functions, summed over all threads; a part of `read_s`.

        None unless a `MapDataset` is read by record.
        """
        return self._a_batch(MAP)

    @_figure(THREADS, "batch {:,.2f} ms", _MS)
    def batch_s(self) -> float | None:
        """Seconds to stack the records of a batch, summed over all threads.

        None if not measured.
        """
        return self._a_batch(BATCH)

    @_figure(THREADS, "pad {:,.2f} ms", _MS)
    def pad_s(self) -> float | None:
        """Seconds to pad a batch, summed over all threads; None if not measured."""
        return self._a_batch(PAD)

    @_figure(THREADS, "place {:,.2f} ms", _MS)
    def place_s(self) -> float | None:
        """Seconds to put a batch on the devices; None if not measured."""
        return self._a_batch(PLACE)

    @_figure(THREADS, "agree {:,.2f} ms", _MS)
    def agree_s(self) -> float | None:
        """Seconds per batch that the loop waited until all hosts had agreed on another batch.

        None if the hosts do not vote on the end, as in random access or on a single host.
        """
        return self._a_batch(AGREE)

    @property
    def _own_wait_s(self) -> float:
        return max(0.0, self[WAIT] - self.stage_s(AGREE))  # without the wait for other hosts

    def _a_batch(self, stage: str) -> float | None:
        is_seen = any(name == stage for _, name in self.stages_s)
        return self.stage_s(stage) / max(1, self["placed"]) if is_seen else None

    def line(self, line: str) -> str:
        """Returns one line of ``str(self)`` without its first words, such as `LOOP`.

        A figure that is None or 0 is left out; "not seen" stands for a line without figures.
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
        >>> stats.total.batches, stats.total.records
        (3, 20)
        >>> sorted(stats.as_dict("train"))[:3]
        ['train/bad_records', 'train/batch_s', 'train/batches']

    Attributes:
        total: Figures since the iterator's first ``next``. A batch that is handed out again after
            ``set_state`` or ``seek`` counts again.
        recent: Figures of the last 60 to 65 seconds. The first batch does not count, because its
            time includes all work that is done only once.
        faults: Counts of failed reads on this host, and the first 1,000 bad records as ``listed``.
            Reads ahead of the loop count, too.
    """

    total: Figures
    recent: Figures
    faults: FaultCounts = field(default_factory=FaultCounts)

    @property
    def reads(self) -> ReadThreads:
        """Number of threads that read now, with the reason; its ``str`` is "" if unknown."""
        return self.total.reads

    @property
    def read_threads(self) -> int | None:
        """Number of threads that read side by side now.

        None in streams, feeds and worker processes, where the number is not measured.
        """
        return self.reads.number

    def as_dict(self, prefix: str = "data") -> dict[str, float]:
        """Returns the figures as a flat dict for wandb or TensorBoard.

        For example: ``{"data/wait_share": 0.02, ...}``. Shares, times and rates are from the
        last minute. Sums, such as the number of batches, are from the whole run. Figures that
        are None or text are left out.

        Args:
            prefix: First part of all names, for example to tell evaluation from training.
        """
        values: dict[str, Any] = {}
        for name, figure in FIGURES.items():
            values[name] = getattr(self.total if figure.is_sum else self.recent, name)
        values["read_threads"] = self.read_threads
        return {f"{prefix}/{n}": v for n, v in values.items() if isinstance(v, int | float)}

    def __repr__(self) -> str:
        return str(self)  # the value of a notebook's cell

    def __str__(self) -> str:
        lines = [str(self.recent)]
        if self.read_threads is not None:
            lines.append(f"threads that read: {self.reads}")
        return "\n".join([*lines, f"since the beginning: {self.total.line(DONE)}"])
