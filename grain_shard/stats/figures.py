"""`Stats`: what `ShardedIterator.stats` says, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass

from grain_shard.hosts.slowest import SlowestHost, Waits
from grain_shard.spans import AGREE, BATCH, MAP, PAD, PLACE, READ, STAGES
from grain_shard.stats.counts import MAKING, Counts

_BUSY = 0.5  # of its time: with less, a stage is not what holds a loop up


@dataclass(frozen=True)
class Figures:
    """What an iterator did for a while. Seconds of stages are those of all threads together.

    Example:
        >>> of_late = Figures.of(Counts(seconds=2.0, wait_s=0.5, batches=100, records=25_600))
        >>> of_late.wait_share, of_late.wait_s, of_late.step_s, of_late.records_per_s
        (0.25, 0.005, 0.015, 12800.0)

    Attributes:
        seconds: How long that was: until the last batch was handed out, or until now if the loop
            waits for one.
        batches: Batches that were handed out.
        records: Of these, the rows on this host that are no padding.
        bytes: Of these, the bytes of this host's rows, padding included.
        wait_share: The part of the time, 0 to 1, for which the loop waited for a batch.
        wait_s: The same in seconds a batch.
        step_s: What the loop did between two batches, in seconds a batch.
        read_s: To read and decode the records of a batch, or to take it from its stream, in
            seconds; None where that is not seen, as in worker processes.
        map_s: What the user's functions took of that, in seconds a batch; None where that cannot be
            told apart: it can where a `MapDataset` is read record by record.
        batch_s: To stack the records of a batch, in seconds; None where that is not seen.
        pad_s: To pad a batch, in seconds; None where that is not seen.
        place_s: To put a batch on the devices, in seconds; None as long as there was none.
        agree_s: For which the pipeline waited until all hosts knew whether there is another batch,
            in seconds a batch; None where they need not ask each other.
        rereads: Reads that came late and were asked for again.
        retries: Reads that failed and were tried again.
        bad_records: Records that could not be had, and whose rows are masked.
        busiest: The stage whose threads were busiest: "read", "batch", "pad" or "place"; None if
            that is not seen.
    """

    seconds: float
    batches: int
    records: int
    bytes: int
    wait_share: float
    wait_s: float
    step_s: float
    read_s: float | None
    map_s: float | None
    batch_s: float | None
    pad_s: float | None
    place_s: float | None
    agree_s: float | None
    rereads: int
    retries: int
    bad_records: int
    busiest: str | None

    @classmethod
    def of(cls, counts: Counts) -> Figures:
        """The figures that follow from sums."""
        # A loop that has had no batch yet has waited for the first one.
        batches, placed = max(1, counts.batches), max(1, counts.placed)
        wait_s = min(counts.wait_s, counts.seconds)  # both are sums of the same differences

        def a_batch(stage: str) -> float | None:
            seconds = counts.stage_s(stage)
            return None if seconds is None else seconds / placed

        return cls(
            seconds=counts.seconds,
            batches=counts.batches,
            records=counts.records,
            bytes=counts.num_bytes,
            wait_share=wait_s / counts.seconds if counts.seconds else 0.0,
            wait_s=wait_s / batches,
            step_s=(counts.seconds - wait_s) / batches,
            read_s=a_batch(READ),
            map_s=a_batch(MAP),
            batch_s=a_batch(BATCH),
            pad_s=a_batch(PAD),
            place_s=a_batch(PLACE),
            agree_s=a_batch(AGREE),
            rereads=counts.reads.rereads,
            retries=counts.reads.retries,
            bad_records=counts.reads.bad_records,
            busiest=_busiest(counts),
        )

    @property
    def records_per_s(self) -> float:
        """Records of this host, a second."""
        return self.records / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of this host, a second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        waited = f"the loop waited {self.wait_share * 100:.0f} % of the time"
        if self.busiest is not None:
            waited += f"; busiest: {self.busiest}"
        times = {stage: getattr(self, f"{stage}_s") for stage in (*STAGES, AGREE)}
        seen = ", ".join(f"{stage} {_ms(s)}" for stage, s in times.items() if s is not None)
        functions = "" if self.map_s is None else f" (your functions: {_ms(self.map_s)} of read)"
        lines = [
            f"{self.batches:,} batches in {self.seconds:,.1f} s: {waited}",
            f"{self.records_per_s:,.0f} records/s, {self.bytes_per_s / 1e6:,.1f} MB/s on this host",
            f"a batch: wait {_ms(self.wait_s)}, step {_ms(self.step_s)}",
            f"its making, of all threads: {seen or 'not seen'}{functions}",
        ]
        faults = [
            f"{count:,} {what}"
            for count, what in (
                (self.rereads, "late reads asked for again"),
                (self.retries, "reads tried again"),
                (self.bad_records, "records masked as bad"),
            )
            if count
        ]
        return "\n".join([*lines, *([", ".join(faults)] if faults else [])])


def waits(counts: Counts, least_s: float) -> Waits:
    """How the loop waited for this host's data; not what it waited for other hosts' votes.

    Args:
        counts: Of a while.
        least_s: How long that was at least, in seconds: a loop that has only begun, or rests most
            of the time, holds nobody up for long.
    """
    agree_s = counts.stage_s(AGREE) or 0.0
    wait_s = max(0.0, min(counts.wait_s, counts.seconds) - agree_s)
    seconds = max(counts.seconds, least_s)
    share = wait_s / seconds if seconds else 0.0
    return Waits(share, wait_s / max(1, counts.batches), _busiest(counts))


def _busiest(counts: Counts) -> str | None:
    """The stage whose threads were busy for most of their time; of those that share them, one."""
    if not counts.seconds:
        return None
    made = {stage: counts.stage_s(stage) or 0.0 for stage in MAKING}
    # More threads may have been seen than are to work now.
    threads = min(counts.making_threads, counts.reads.threads or counts.making_threads)
    making = sum(made.values()) / (max(1, threads) * counts.seconds)
    placing = (counts.stage_s(PLACE) or 0.0) / counts.seconds
    if making:
        return PLACE if placing > making else max(MAKING, key=lambda stage: made[stage])
    return PLACE if placing > _BUSY else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


# Of `Stats.as_dict`: what is told as it is of late, and what as the sum since the beginning.
_OF_LATE = (
    *("wait_share", "wait_s", "step_s", "read_s", "map_s", "batch_s", "pad_s", "place_s"),
    *("agree_s", "records_per_s", "bytes_per_s"),
)
_SUMS = "seconds", "batches", "records", "bytes", "rereads", "retries", "bad_records"


@dataclass(frozen=True)
class Stats:
    """What an iterator says of itself; `ShardedIterator.stats` gives it.

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
        total: Since the iterator's first ``next``. What is handed out again after ``set_state`` or
            ``seek`` counts again.
        recent: Of the last 30 seconds or a little more; without the first batch, for which
            everything begins.
        read_threads: How many threads read side by side now; None where that is not found while
            it runs: of streams, feeds and worker processes.
        read_threads_why: Why so many, in words.
        slowest_host: Which host's loop waits longest for its data, by how much, and in which stage;
            None on a single host, and for the first minute.
    """

    total: Figures
    recent: Figures
    read_threads: int | None = None
    read_threads_why: str = ""
    slowest_host: SlowestHost | None = None

    @classmethod
    def of(cls, total: Counts, recent: Counts, slowest_host: SlowestHost | None) -> Stats:
        """What follows from the sums of an iterator."""
        threads, why = total.reads.threads, total.reads.why
        return cls(Figures.of(total), Figures.of(recent), threads, why, slowest_host)

    def as_dict(self, prefix: str = "data") -> dict[str, float]:
        """The same for wandb or TensorBoard, flat: ``{"data/wait_share": 0.02, ...}``.

        Shares, times and rates are those of late; what is counted is counted since the beginning.
        What is not known is left out.

        Args:
            prefix: What the names begin with, to tell an evaluation from the training, say.
        """
        found = {
            **{name: getattr(self.recent, name) for name in _OF_LATE},
            **{name: getattr(self.total, name) for name in _SUMS},
            "read_threads": self.read_threads,
        }
        if (slowest := self.slowest_host) is not None:
            found |= {
                "slowest_host": slowest.host,
                "slowest_host_behind_s": slowest.behind_s,
                "slowest_host_share": slowest.share,
            }
        return {f"{prefix}/{name}": value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        lines = [str(self.recent)]
        if self.read_threads is not None:
            lines.append(f"threads that read: {self.read_threads} ({self.read_threads_why})")
        if self.slowest_host is not None:
            lines.append(str(self.slowest_host))
        total = self.total
        lines.append(
            f"since the beginning: {total.batches:,} batches, {total.records:,} records,"
            f" {total.bytes / 1e6:,.1f} MB in {total.seconds:,.1f} s, of which the loop waited"
            f" {total.wait_share * 100:.0f} %"
        )
        return "\n".join(lines)
