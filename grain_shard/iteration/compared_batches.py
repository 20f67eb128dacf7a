"""`ComparedBatches`: host batches, of which the first one's records are read again and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grain
from absl import logging

from grain_shard.background import TaskStage
from grain_shard.grain_inside.nodes import read_by_threads
from grain_shard.reading.contents import Contents
from grain_shard.reading.rereads import Leaves, Maker, Sample, compare
from grain_shard.tasks import Producer
from grain_shard.trees import Batch

# The longest wait, in seconds, until no thread reads, before records that differ are read again.
_IDLE_S = 30.0


class Reread(NamedTuple):
    """The records that are read again, and the maker of the batches.

    Attributes:
        sample: Returns the records. The thread that places batches calls it.
        maker: The threads, workers or executor that make the batches.
    """

    sample: Callable[[], Sample]
    maker: Maker

    @classmethod
    def of_stream(cls, ds: grain.IterDataset) -> Reread | None:
        """Returns the first records of a stream; None unless several threads read a `MapDataset`.

        Args:
            ds: The stream.
        """
        records = read_by_threads(ds)
        if records is None:
            return None
        return cls(functools.partial(Sample.of_first, records), Maker("a reading thread", True))


class ComparedBatches(Producer[tuple[Batch, Any]]):
    """The pairs (host batch, position) of a stage; some records are read again after the first one.

    The first batch is handed out before. So it is not late, and an error comes in place of the
    second batch, or of the end.

    Args:
        batches: The stage.
        reread: The records that are read again.
        contents: Notes that the records were compared, which a dataset does once.
    """

    def __init__(self, batches: TaskStage[tuple[Batch, Any]], reread: Reread, contents: Contents):
        self._batches, self._reread, self._contents = batches, reread, contents
        self._sample: Sample | None = None
        self._given: Mapping[int, Leaves] = {}

    def __next__(self) -> tuple[Batch, Any]:
        if self._contents.is_reread:
            return next(self._batches)
        if self._sample is not None:
            self._compare(self._sample)
            return next(self._batches)
        item = next(self._batches)
        self._sample = self._reread.sample()
        self._given = self._sample.given(item[0])
        return item

    def _compare(self, sample: Sample) -> None:
        stage, contents = self._batches, self._contents

        def wait_until_idle() -> None:
            stage.wait_for(lambda: stage.is_idle, _IDLE_S)

        random = compare(sample, self._given, self._reread.maker, wait_until_idle)
        contents.is_reread, self._given = not sample.is_stopped, {}
        if random is not None and contents.is_reread and not contents.why_not:
            logging.warning(
                "grain_shard: %s: another read of %s gave another value. So batches depend on the"
                " host and the run. For random values that do not, use .seed(s) and .random_map.",
                random.path,
                sample.name(random.record),
            )

    def stop(self) -> None:
        if self._sample is not None:
            self._sample.is_stopped = True
        self._batches.stop()

    def close(self) -> None:
        self._batches.close()
