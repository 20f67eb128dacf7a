"""`ComparedBatches`: host batches, of which the first one's records are read again and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import grain
from absl import logging

from grain_shard.grain_inside.nodes import read_by_threads
from grain_shard.reading.contents import Contents
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.rereads import Maker, compare
from grain_shard.reading.row_values import Leaves
from grain_shard.reading.sample import Sample
from grain_shard.threads.background import Background
from grain_shard.threads.tasks import Producer
from grain_shard.trees import Batch


class Reread(NamedTuple):
    """The records that are read again, and the maker of the batches.

    Attributes:
        sample: Returns the records. The thread that places batches calls it.
        maker: The threads, workers or executor that make the batches.
    """

    sample: Callable[[], Sample]
    maker: Maker

    @classmethod
    def of_stream(cls, ds: grain.IterDataset, *, any_number: bool) -> tuple[Reread, ...]:
        """Returns the first records of each `MapDataset` that several threads read for a stream.

        Args:
            ds: The stream.
            any_number: True if several threads read whatever number the read options have.
        """
        maker = Maker("a reading thread", True)
        parts = read_by_threads(ds, any_number=any_number)
        return tuple(cls(functools.partial(Sample.of_first, records), maker) for records in parts)


class ComparedBatches(Producer[tuple[Batch, Any]]):
    """The pairs (host batch, position) of a stage; some records are read again after the first one.

    The first batch is handed out before. So it is not late, and an error comes in place of the
    second batch, or of the end.

    Threads of this process are compared once for a dataset. Worker processes and executors are
    compared in each run, because the main process may change between the runs.

    Args:
        batches: The stage.
        rereads: The records that are read again.
        contents: Notes that threads were compared, and which leaves are random.
        faults: Returns the counts of failed reads.
    """

    def __init__(
        self,
        batches: Background[tuple[Batch, Any]],
        rereads: Iterable[Reread],
        contents: Contents,
        faults: Callable[[], FaultCounts],
    ):
        self._batches, self._contents, self._faults = batches, contents, faults
        self._rereads = [
            one for one in rereads if not (one.maker.has_threads and contents.is_reread)
        ]
        self._begun: list[tuple[Maker, Sample, Mapping[int, Leaves]]] = []

    def __next__(self) -> tuple[Batch, Any]:
        if not (self._begun or self._rereads):
            return next(self._batches)
        while self._begun:
            self._compare(*self._begun[0])
            del self._begun[0]
        item, counts = next(self._batches), self._faults()
        # A record that was left out after several tries may be readable now, and no other world.
        if not (counts.retries and counts.bad_records):
            for sample, maker in ((one.sample(), one.maker) for one in self._rereads):
                sample.unsteady = self._contents.unsteady
                self._begun.append((maker, sample, sample.given(item[0])))
        self._rereads = []
        return item

    def _compare(self, maker: Maker, sample: Sample, given: Mapping[int, Leaves]) -> None:
        stage, contents = self._batches, self._contents
        random = compare(sample, given, maker, stage.wait_until_idle)
        is_last = len(self._begun) == 1
        contents.is_reread |= is_last and maker.has_threads and not sample.is_stopped
        if random is not None and not (sample.is_stopped or contents.why_not):
            logging.warning(
                "grain_shard: %s: another read of %s gave another value. So batches depend on the"
                " host and the run. For random values that do not, use .seed(s) and .random_map.",
                random.path,
                sample.name(random.record),
            )

    def stop(self) -> None:
        for _, sample, _ in self._begun:
            sample.stop()
        self._batches.stop()

    def close(self) -> None:
        self._batches.close()
