"""Random access in one process: on eight devices, and on hosts that are simulated.

Everything is compared with plain Grain: all batches, those after a restore (into another pipeline
over the same records, on another mesh, in batches of another size), after `seek`, and by epochs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grain

from benchmarks.soak import compare, model, records, shardings
from benchmarks.soak.shardings import Sharding
from grain_shard import BatchSchedule


@dataclasses.dataclass(frozen=True)
class Pipelines:
    """A case.

    Attributes:
        records: What stands above `.batch`.
        above: What stands between `.batch` and `.shard_to`: name and arguments.
        remainder: As of `.shard_to`, or "drop by Grain".
        first: How it begins.
        then: How it goes on from a state.
        stop: The batches before the state is taken.
        hosts: Those that are simulated.
        seek: The step, and the record, at which it begins as well.
        num_workers: Grain's processes that make the batches until the state is taken.
    """

    records: records.Records
    above: tuple[Any, ...]
    remainder: str
    first: Sharding
    then: Sharding
    stop: int
    hosts: int
    seek: tuple[int, int]
    num_workers: int

    limit_s = 180

    @property
    def counts_records(self) -> bool:
        """Whether it is known which records are in a batch, so that they may be cut otherwise."""
        return self.above[0] not in ("map", "slice")

    @property
    def may_have_schedule(self) -> bool:
        return self.counts_records and self.remainder in ("pad", "drop")

    def run(self, folder: Path) -> Counter[str]:
        source = records.open_source(self.records, folder)
        plain = records.build(self.records, source)
        expected = self.model(plain)
        check_model(self, expected, plain)
        whole = list(model.batches(expected, expected.start, self.first.sizes))
        check_real(self, expected, whole, plain)
        compare.same_rows_of_hosts(
            self.batched(plain, self.first, above=self.above[0] != "to_iter_dataset"),
            self.hosts,
            [rows for rows, _ in whole],
            expected,
            self.first,
            self.option_remainder,
            ends_known=True,
        )
        in_workers = {"pipelines in workers": int(self.num_workers > 0)}
        return Counter({"batches": len(whole), **in_workers})

    def model(self, plain: grain.MapDataset) -> Any:
        if not self.counts_records:
            return model.Whole(list(self.batched(plain, self.first)), self.first.sizes[0])
        epochs = self.above[1] if self.above[0] == "repeat" else 1
        return model.RandomAccess(plain, epochs, drops="drop" in self.remainder)

    def batched(self, plain: grain.MapDataset, sharding: Sharding, above: bool = True) -> Any:
        """The batches, with what stands above them."""
        if len(sharding.sizes) > 1:
            ds = plain.pipe(BatchSchedule(sharding.sizes))
        else:
            drops = self.remainder == "drop by Grain"
            ds = plain.batch(sharding.sizes[0], drop_remainder=drops)
        name, *arguments = self.above
        return ABOVE[name](ds, *arguments) if above else ds

    @property
    def option_remainder(self) -> Any:
        """What `.shard_to` is told."""
        return "pad" if self.remainder == "drop by Grain" else self.remainder

    def sharded(
        self, plain: grain.MapDataset, sharding: Sharding, above: bool = True, **options: Any
    ) -> Any:
        ds = self.batched(plain, sharding, above)
        return sharding.apply(ds, remainder=self.option_remainder, **options)


def twice_the_tokens(batch: Any) -> Any:
    return {**batch, "tokens": 2 * batch["tokens"]}


ABOVE = {
    "nothing": lambda ds: ds,
    "repeat": lambda ds, times: ds.repeat(times),
    "map": lambda ds: ds.map(twice_the_tokens),
    "slice": lambda ds, start, step: ds[start::step],
    "to_iter_dataset": lambda ds, threads, buffer: ds.to_iter_dataset(
        grain.ReadOptions(threads, buffer)
    ),
}


# Drawing.


def draw(rng: random.Random) -> Pipelines:
    drawn = records.draw(rng)
    num_records = len(records.build(drawn, range(drawn.num_records)))
    while True:  # until it is one that `.shard_to` takes
        first = shardings.draw(rng)
        case = Pipelines(
            drawn,
            draw_above(rng),
            rng.choice(["pad", "pad", "pad", "drop", "error", "drop by Grain"]),
            first,
            shardings.draw(rng),
            stop=rng.randint(0, 6),
            hosts=rng.choice([h for h in (1, 2, 4, 8) if first.drawn.size % h == 0]),
            seek=(rng.randint(0, 10), rng.randint(0, 2 * num_records)),
            num_workers=rng.choice([0] * 24 + [2]),
        )
        if not case.counts_records:
            case = dataclasses.replace(
                case, remainder="pad", then=dataclasses.replace(case.then, sizes=first.sizes)
            )
        if fits(case, num_records):
            return case


def draw_above(rng: random.Random) -> tuple[Any, ...]:
    arguments = {
        "repeat": [rng.randint(2, 3)],
        "slice": [rng.randint(0, 1), rng.randint(1, 2)],
        "to_iter_dataset": [rng.randint(1, 4), rng.randint(1, 4)],
    }
    name = rng.choice(["nothing", "nothing", *ABOVE])
    return (name, *arguments.get(name, []))


def fits(case: Pipelines, num_records: int) -> bool:
    """Whether batches, shards and options go together; what does not is refused by design."""
    for sharding in (case.first, case.then):
        sizes = sharding.sizes
        if not sharding.fits or (case.option_remainder != "pad" and not sharding.divides):
            return False
        if "drop" in case.remainder and max(sizes.values()) > num_records:
            return False
        if case.remainder == "error" and num_records % sizes[0]:
            return False
        if len(sizes) > 1 and not case.may_have_schedule:
            return False
    if case.remainder == "error" and case.first.sizes != case.then.sizes:
        return False  # at a record where the other size does not fill the last batch
    first_of_slice = case.above[1] if case.above[0] == "slice" else 0
    return num_records > first_of_slice * case.first.sizes[0]


# Checking.


def check_model(case: Pipelines, expected: Any, plain: grain.MapDataset) -> None:
    """The model against the batches that plain Grain makes, where it has such."""
    if len(case.first.sizes) > 1 or case.remainder == "drop" or not case.counts_records:
        return
    of_model = list(model.batches(expected, expected.start, case.first.sizes))
    by_grain = list(case.batched(plain, case.first))
    compare.require(len(of_model) == len(by_grain), f"Grain makes {len(by_grain)} batches")
    for step, ((rows, _), batch) in enumerate(zip(of_model, by_grain, strict=True)):
        valid = [row for row in rows if row is not None]
        should = model.host_batch_of(valid, expected.like, model.Made(1, mask_key=None))
        compare.same_host_batch(f"plain Grain's batch {step}", batch, should)


def check_real(case: Pipelines, expected: Any, whole: list[Any], plain: grain.MapDataset) -> None:
    """All batches, those after a restore, those after `seek`, and epochs."""
    first, sizes = case.first, case.first.sizes
    ds = case.sharded(plain, first)
    compare.require(len(ds) == len(whole), f"its length is {len(ds)}, not {len(whole)}")
    with iter(ds) as iterator:
        compare.same_batches("batch", iterator, expected, expected.start, first)
    stop = min(case.stop, len(whole))
    with iter(case.sharded(plain, first, num_workers=case.num_workers)) as iterator:
        list(itertools.islice(iterator, stop))
        state = json.loads(json.dumps(iterator.get_state()))
    compare.require(len(json.dumps(state)) < 200, f"the state is large: {state}")
    with iter(case.sharded(plain, case.then)) as iterator:
        next(iterator, None)  # restored into one that is in use
        iterator.set_state(state)
        place = model.place_after(expected, whole, stop)
        where = f"restored at {stop}, batch"
        compare.same_batches(where, iterator, expected, place, case.then)
    step, record = case.seek
    if step <= len(whole):
        with iter(case.sharded(plain, first)) as iterator:
            iterator.seek(step)
            place = model.place_after(expected, whole, step)
            compare.same_batches(f"sought {step}, batch", iterator, expected, place, first)
    if case.counts_records and case.remainder != "error":
        place = expected.place_of(record, sizes)
        if place is not None:
            with iter(case.sharded(plain, first)) as iterator:
                iterator.seek(record=record)
                where = f"sought record {record}, batch"
                compare.same_batches(where, iterator, expected, place, first)
    if case.above[0] == "repeat":
        check_epochs(case, expected, plain)


def check_epochs(case: Pipelines, expected: Any, plain: grain.MapDataset) -> None:
    place = expected.start
    with case.sharded(plain, case.first, above=False).epochs(case.above[1]) as epochs:
        for number, epoch in enumerate(epochs):
            where, count = f"epoch {number}, batch", len(epoch)
            place = compare.same_batches(where, epoch, expected, place, case.first, count)
    compare.require(expected.next(place, case.first.sizes) is None, "the epochs end too early")
