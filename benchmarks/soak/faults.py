"""Cases of sources that are slow, fail, or hold records that cannot be decoded.

A bad record must end the loop at the batch that has it, and not before, with an error that names
the record. The state from that moment must go on with a source that is good again. A record that
fails once must be tried again, and a corrupt record must be masked if the options say so.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grain

import grain_shard
from benchmarks.soak import compare, feeds, model, records, shardings
from benchmarks.soak.shardings import Sharding

FAULTS = ("slow", "failing", "failing once", "corrupt")
OPTIONS = inspect.signature(grain_shard.shard_to).parameters
CAN_RETRY, CAN_MASK = "retries" in OPTIONS, "on_bad_record" in OPTIONS


class FaultySource:
    """A source in which some records have a fault.

    Args:
        inner: The source of the records.
        fault: The fault, one of `FAULTS`; None for no fault.
        bad: The indices of the records with the fault.
    """

    def __init__(self, inner: Any, fault: str | None, bad: frozenset[int]):
        self._inner, self._fault, self._bad = inner, fault, bad
        self._failed: set[int] = set()

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            if self._fault == "slow":
                time.sleep(0.05)
            elif self._fault == "failing once" and index not in self._failed:
                self._failed.add(index)
                raise OSError(f"cannot read {index} at first")
            elif self._fault == "failing":
                raise OSError(f"cannot read {index}")
            elif self._fault == "corrupt":
                return Corrupt()
        return self._inner[index]

    def __repr__(self) -> str:
        return f"FaultySource({self._inner!r})"


class Corrupt:
    """A record that cannot be decoded."""

    def __int__(self) -> int:
        raise ValueError("cannot decode it")


class FaultyBatchedSource(FaultySource):
    """A `FaultySource` that can read many records in one call."""

    def _getitems(self, indices: Any) -> list[Any]:
        return [self[int(index)] for index in indices]


@dataclasses.dataclass(frozen=True)
class Faults:
    """A case of a faulty source.

    Attributes:
        records: The dataset before `.batch`, or the dataset that is cut into feeds.
        stream: The stream of each feed; None for random access.
        batched: True if the source can read many records in one call.
        fault: The fault, one of `FAULTS`.
        bad: The indices of the source's records with the fault.
        sharding: Batch sizes, mesh and options.
    """

    records: records.Records
    stream: feeds.Stream | None
    batched: bool
    fault: str
    bad: frozenset[int]
    sharding: Sharding

    limit_s = 180

    def run(self, folder: Path) -> Counter[str]:
        expected = self.model(folder)
        if self.fault == "slow":
            with iter(self.sharded(folder, "slow")) as iterator:
                compare.same_batches("batch", iterator, expected, expected.start, self.sharding)
        else:
            check_failing(self, expected, self.good_batches(folder), folder)
            if CAN_MASK and self.fault == "corrupt" and self.may_be_masked:
                check_masked(self, expected, folder)
        return Counter({f"records: {self.fault}": len(self.bad)})

    @property
    def may_be_masked(self) -> bool:
        """True if a bad record can be masked: with random access and a mask in the batch."""
        return self.stream is None and self.sharding.made.mask_key is not None

    def source(self, folder: Path, fault: str | None) -> Any:
        kind = FaultyBatchedSource if self.batched else FaultySource
        return kind(records.open_source(self.records, folder), fault, self.bad)

    def model(self, folder: Path) -> Any:
        source = self.source(folder, None)
        if self.stream is None:
            return model.RandomAccess(records.build(self.records, source), epochs=1, drops=False)
        return model.Feeds(feeds.rows_of_feeds(self.records, source, self.stream), drops=False)

    def sharded(self, folder: Path, fault: str | None, **options: Any) -> Any:
        source = self.source(folder, fault)
        if self.stream is None:
            ds = records.build(self.records, source).batch(self.sharding.sizes[0])
        else:
            ds = feeds.batched(self.records, source, self.stream, self.sharding)
        return self.sharding.apply(ds, **options)

    def good_batches(self, folder: Path) -> int | None:
        """Returns the number of batches before the first bad one; None if there is no bad batch.

        A batch is bad if plain Grain cannot make it.
        """
        source, size = self.source(folder, "failing"), self.sharding.sizes[0]
        if self.stream is None:
            is_bad = bad_records(records.build(self.records, source))
            return is_bad.index(True) // size if True in is_bad else None
        each, good = size // self.stream.num_feeds, []
        for feed in range(self.stream.num_feeds):
            stream = iter(feeds.stream_of_feed(self.records, source, self.stream, feed))
            rows = 0
            try:
                for _ in stream:
                    rows += 1
            except OSError:
                good.append(rows // each)
        return min(good, default=None)


def draw(rng: random.Random) -> Faults:
    """Draws a case, with random access in two of three."""
    stream = None if rng.random() < 0.65 else feeds.draw_stream(rng, rng.choice([1, 2, 4]))
    drawn = records.draw(rng, at_least=16)
    bad = rng.sample(range(drawn.num_records), rng.randint(1, 3))
    while True:  # until `.shard_to` accepts the case
        sharding = dataclasses.replace(shardings.draw(rng), sizes={0: 4 * rng.randint(1, 4)})
        packs = stream is not None and stream.packed is not None
        if sharding.drawn.is_of_all_leaves or not packs:
            break
    is_batched, fault = rng.random() < 0.5, rng.choice(FAULTS)
    return Faults(drawn, stream, is_batched, fault, frozenset(bad), sharding)


def bad_records(ds: grain.MapDataset) -> list[bool]:
    """Returns, for each record of the dataset, True if plain Grain cannot read it."""

    def is_bad(index: int) -> bool:
        try:
            ds[index]
        except OSError:
            return True
        return False

    return [is_bad(index) for index in range(len(ds))]


def check_failing(case: Faults, expected: Any, good: int | None, folder: Path) -> None:
    """Compares the batches before the first bad one, and checks the error there.

    Then it restores the state with a source without faults, and compares the batches after that.

    Args:
        case: The case.
        expected: The model of the batches.
        good: Number of batches before the first bad one; None if there is no bad batch.
        folder: Folder for the case's files.
    """
    place, error, count = expected.start, None, 0
    with iter(case.sharded(folder, case.fault)) as iterator:
        try:
            for batch in iterator:
                where = f"batch {count}, of {good} good ones,"
                place = compare.same_batches(where, [batch], expected, place, case.sharding, 1)
                count += 1
        except (OSError, ValueError) as raised:
            error = raised
            check_error(case, error, iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    if case.fault == "failing once":
        # A record may be in several batches, and its first read fails. That may be the read of a
        # later batch, or a read that is then repeated with success. So there may be no error.
        compare.require(error is None or good is not None, f"it failed with {error!r}")
        compare.require(error is None or count >= good, f"it failed at batch {count}, not {good}")
        compare.require(error is None or not CAN_RETRY, f"it was not tried again: {error!r}")
    else:
        at = None if error is None else count
        compare.require(at == good, f"it failed at batch {at}, not {good}: {error!r}")
    with iter(case.sharded(folder, None)) as iterator:
        iterator.set_state(state)
        compare.same_batches("when well, batch", iterator, expected, place, case.sharding)


def check_error(case: Faults, error: Exception, iterator: Any) -> None:
    """Checks that an error names the record or the feed, and that `next` raises it again."""
    told = "".join([str(error), *getattr(error, "__notes__", [])])
    what = "record" if case.stream is None else "feed"
    compare.require(what in told, f"the error does not say which {what} it was: {told}")
    again = None
    try:
        next(iterator)
    except type(error) as raised:
        again = raised
    compare.require(again is error, f"after the error comes {again!r}")


def check_masked(case: Faults, expected: model.RandomAccess, folder: Path) -> None:
    """Checks that with ``on_bad_record="mask"`` each bad record becomes a row of padding."""
    is_bad = bad_records(records.build(case.records, case.source(folder, "failing")))
    masked = expected.without(is_bad)
    ds = case.sharded(folder, case.fault, on_bad_record="mask", max_bad_records=10**6)
    with iter(ds) as iterator:
        compare.same_batches("masked, batch", iterator, masked, masked.start, case.sharding)
