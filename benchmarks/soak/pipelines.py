"""Cases of random access in one process, on eight devices and on simulated hosts.

The batches are compared with those of plain Grain: from the start, after a restore, after `seek`,
and by epochs. The restore may be into other batch sizes and onto another mesh.
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
    """A case of random access.

    Attributes:
        records: The dataset before `.batch`.
        above: Name and arguments of the transformation between `.batch` and `.shard_to`.
        remainder: The option of `.shard_to`, or "drop by Grain".
        first: Batch sizes, mesh and options of the first pipeline.
        then: Batch sizes, mesh and options of the pipeline that restores the state.
        stop: Number of batches before the state is taken.
        hosts: Number of simulated hosts.
        seek: A step and a record, to which iterators seek.
        num_workers: Number of worker processes that make the batches before the state is taken.
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
        """True if the records of each batch are known, so a state fits other batch sizes, too."""
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
        """Returns the batches of plain Grain.

        Args:
            plain: The dataset before `.batch`.
            sharding: Batch sizes, mesh and options.
            above: True to apply the case's transformation after `.batch`.
        """
        if len(sharding.sizes) > 1:
            ds = plain.pipe(BatchSchedule(sharding.sizes))
        else:
            drops = self.remainder == "drop by Grain"
            ds = plain.batch(sharding.sizes[0], drop_remainder=drops)
        name, *arguments = self.above
        return ABOVE[name](ds, *arguments) if above else ds

    @property
    def option_remainder(self) -> Any:
        """The option `remainder` of `.shard_to`."""
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


# Functions that draw a case.


def draw(rng: random.Random) -> Pipelines:
    drawn = records.draw(rng)
    num_records = len(records.build(drawn, range(drawn.num_records)))
    while True:  # until `.shard_to` accepts the case
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
    """Returns False for a case that `.shard_to` refuses: sizes, shards or options do not fit."""
    for sharding in (case.first, case.then):
        sizes = sharding.sizes
        if case.option_remainder != "pad" and not sharding.divides:
            return False
        if "drop" in case.remainder and max(sizes.values()) > num_records:
            return False
        if case.remainder == "error" and num_records % sizes[0]:
            return False
        if len(sizes) > 1 and not case.may_have_schedule:
            return False
    if case.remainder == "error" and case.first.sizes != case.then.sizes:
        return False  # the other batch size may leave a short last batch, which is an error
    first_of_slice = case.above[1] if case.above[0] == "slice" else 0
    return num_records > first_of_slice * case.first.sizes[0]


# Functions that check a case.


def check_model(case: Pipelines, expected: Any, plain: grain.MapDataset) -> None:
    """Compares the model with the batches of plain Grain, if plain Grain can make such batches."""
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
    """Compares the batches from the start, after a restore, after `seek`, and by epochs."""
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
        next(iterator, None)  # a state may be restored into an iterator that is in use
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
