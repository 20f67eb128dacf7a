"""Sources that are slow, fail or hold what cannot be decoded, under random pipelines.

What fails ends the loop at the batch that has it and no sooner, with an error that says which
record it was; and from the state that was taken then, the run goes on when the source is well
again. Where the dataset may be told to try again, or to mask, it does.
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
from benchmarks.soak import compare, model, records, shardings
from benchmarks.soak.shardings import Sharding

FAULTS = ("slow", "failing", "failing once", "corrupt")
OPTIONS = inspect.signature(grain_shard.shard_to).parameters
CAN_RETRY, CAN_MASK = "retries" in OPTIONS, "on_bad_record" in OPTIONS


class FaultySource:
    """A source of which some records have a fault.

    Args:
        inner: The source.
        fault: One of `FAULTS`; None for none.
        bad: The records that have it.
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
    """What cannot be decoded."""

    def __int__(self) -> int:
        raise ValueError("cannot decode it")


class FaultyBatchedSource(FaultySource):
    """The same, read many records at a time."""

    def _getitems(self, indices: Any) -> list[Any]:
        return [self[int(index)] for index in indices]


@dataclasses.dataclass(frozen=True)
class Faults:
    """A case.

    Attributes:
        records: What stands above `.batch`.
        batched: Whether the source is read many records at a time.
        fault: One of `FAULTS`.
        bad: The records of the source that have it.
        sharding: Batch sizes, mesh and options.
    """

    records: records.Records
    batched: bool
    fault: str
    bad: frozenset[int]
    sharding: Sharding

    limit_s = 180

    def run(self, folder: Path) -> Counter[str]:
        expected = model.RandomAccess(self.built(folder, None), epochs=1, drops=False)
        if self.fault == "slow":
            batches = iter(self.sharded(folder, "slow"))
            compare.same_batches("batch", batches, expected, expected.start, self.sharding)
        else:
            is_bad = bad_records(self.built(folder, "failing"))
            check_failing(self, expected, is_bad, folder)
            if CAN_MASK and self.fault == "corrupt":
                check_masked(self, expected, is_bad, folder)
        return Counter({f"records: {self.fault}": len(self.bad)})

    def built(self, folder: Path, fault: str | None) -> grain.MapDataset:
        kind = FaultyBatchedSource if self.batched else FaultySource
        source = kind(records.open_source(self.records, folder), fault, self.bad)
        return records.build(self.records, source)

    def sharded(self, folder: Path, fault: str | None, **options: Any) -> Any:
        ds = self.built(folder, fault).batch(self.sharding.sizes[0])
        return self.sharding.apply(ds, **options)


def draw(rng: random.Random) -> Faults:
    drawn = records.draw(rng, at_least=12)
    bad = rng.sample(range(drawn.num_records), rng.randint(1, 3))
    while True:  # until it is one that `.shard_to` takes
        sharding = shardings.draw(rng)
        sharding = dataclasses.replace(sharding, sizes={0: rng.randint(1, 16)})
        if sharding.fits:
            break
    return Faults(drawn, rng.random() < 0.5, rng.choice(FAULTS), frozenset(bad), sharding)


def bad_records(ds: grain.MapDataset) -> list[bool]:
    """Of each record, whether plain Grain cannot have it."""

    def is_bad(index: int) -> bool:
        try:
            ds[index]
        except OSError:
            return True
        return False

    return [is_bad(index) for index in range(len(ds))]


def check_failing(
    case: Faults, expected: model.RandomAccess, is_bad: list[bool], folder: Path
) -> None:
    """Up to the first batch with a bad record, at it, and from there on when all is well again."""
    size = case.sharding.sizes[0]
    good = is_bad.index(True) // size if True in is_bad else -(-len(is_bad) // size)
    place, error = expected.start, None
    with iter(case.sharded(folder, case.fault)) as iterator:
        try:
            for number, batch in enumerate(iterator):
                where = f"batch {number} of {good} good ones"
                compare.require(number < good or case.fault == "failing once", f"{where} came")
                found = [batch]
                place = compare.same_batches(where, found, expected, place, case.sharding, 1)
        except (OSError, ValueError) as raised:
            error = raised
            compare.require(place.step == good, f"it failed at batch {place.step}, not {good}")
            check_error(case, error, iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    may_fail = True in is_bad and not (case.fault == "failing once" and CAN_RETRY)
    must_fail = may_fail and case.fault != "failing once"  # which another thread may have met first
    compare.require(error is None or may_fail, f"it failed with {error!r}")
    compare.require(error is not None or not must_fail, "it did not fail")
    with iter(case.sharded(folder, None)) as iterator:
        iterator.set_state(state)
        compare.same_batches("when well, batch", iterator, expected, place, case.sharding)


def check_error(case: Faults, error: Exception, iterator: Any) -> None:
    told = "".join([str(error), *getattr(error, "__notes__", [])])
    compare.require("record" in told, f"the error does not say which record it was: {told}")
    again = None
    try:
        next(iterator)
    except type(error) as raised:
        again = raised
    compare.require(again is error, f"after the error comes {again!r}")


def check_masked(
    case: Faults, expected: model.RandomAccess, is_bad: list[bool], folder: Path
) -> None:
    """A bad record is a row of padding in its place."""
    masked = expected.without(is_bad)
    ds = case.sharded(folder, case.fault, on_bad_record="mask", max_bad_records=10**6)
    with iter(ds) as iterator:
        compare.same_batches("masked, batch", iterator, masked, masked.start, case.sharding)
