"""What is counted of an iterator: sums, of which the difference of two is what came between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from grain_shard.spans import BATCH, PAD, READ

MAKING = READ, BATCH, PAD  # by the threads that make a host's batches


@dataclass(frozen=True)
class ReadCounts:
    """What is known of the reads of a source.

    Attributes:
        threads: How many go side by side now; None where that is not found while it runs: of
            streams, feeds and worker processes.
        why: Why so many, in words.
        answered: How many were answered.
        rereads: How many came late, and were asked for again.
        retries: How many failed, and were tried again.
        bad_records: Records that could not be had, and whose rows are masked.
    """

    threads: int | None = None
    why: str = ""
    answered: int = 0
    rereads: int = 0
    retries: int = 0
    bad_records: int = 0

    def after(self, before: ReadCounts) -> ReadCounts:
        """The same, with what was counted before."""
        return replace(
            self,
            answered=self.answered + before.answered,
            rereads=self.rereads + before.rereads,
            retries=self.retries + before.retries,
            bad_records=self.bad_records + before.bad_records,
        )

    def since(self, before: ReadCounts) -> ReadCounts:
        """What was counted since then."""
        return replace(
            self,
            answered=self.answered - before.answered,
            rereads=self.rereads - before.rereads,
            retries=self.retries - before.retries,
            bad_records=self.bad_records - before.bad_records,
        )

    def __str__(self) -> str:
        if self.threads is None:
            return ""
        late = f"{self.rereads:,} of {self.answered:,} reads were late and asked for again"
        return f"{self.threads} ({self.why})" + (f"; {late}" if self.rereads else "")


class Size(NamedTuple):
    """Of this host's part of a batch: its rows that are records, and its bytes."""

    records: int
    num_bytes: int


@dataclass(frozen=True)
class Counts:
    """Sums, from the first call of ``next`` on.

    Attributes:
        seconds: Until the last batch was handed out; until now, if the loop waits for one.
        wait_s: For which of that the loop waited.
        batches: Handed out.
        records: Of these, the rows of this host that are records.
        num_bytes: Of these, the bytes of this host.
        placed: Batches that were put on the devices.
        stages_s: Seconds of each stage, by (thread, stage).
        reads: Of the source.
    """

    seconds: float = 0.0
    wait_s: float = 0.0
    batches: int = 0
    records: int = 0
    num_bytes: int = 0
    placed: int = 0
    stages_s: Mapping[tuple[int, str], float] = field(default_factory=dict)
    reads: ReadCounts = field(default_factory=ReadCounts)

    def since(self, before: Counts) -> Counts:
        """What was counted since then."""
        return Counts(
            seconds=self.seconds - before.seconds,
            wait_s=self.wait_s - before.wait_s,
            batches=self.batches - before.batches,
            records=self.records - before.records,
            num_bytes=self.num_bytes - before.num_bytes,
            placed=self.placed - before.placed,
            stages_s={key: s - before.stages_s.get(key, 0.0) for key, s in self.stages_s.items()},
            reads=self.reads.since(before.reads),
        )

    def stage_s(self, stage: str) -> float | None:
        """Seconds of a stage, of all its threads together; None if it was not seen."""
        found = [seconds for (_, name), seconds in self.stages_s.items() if name == stage]
        return sum(found) if found else None

    @property
    def making_threads(self) -> int:
        """Threads that were at work in making batches."""
        at_work = {key for key, seconds in self.stages_s.items() if seconds > 0}
        return len({thread for thread, stage in at_work if stage in MAKING})
