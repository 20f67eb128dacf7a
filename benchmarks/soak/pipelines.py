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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grain

from benchmarks.soak import compare, meshes, model, records
from grain_shard import BatchSchedule, PadToDivisible, ShardBatch, ShardingTree
from grain_shard.sharding.layout import round_up

LIMIT_S = 180


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What may be another when a run is restored: batch sizes, mesh and options.

    Attributes:
        sizes: Of the batches, from each step on.
        drawn: The mesh and the spec.
        options: Of `.shard_to`.
    """

    sizes: Mapping[int, int]
    drawn: meshes.DrawnMesh
    options: Mapping[str, Any]


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
    """

    records: records.Records
    above: tuple[Any, ...]
    remainder: str
    first: Sharding
    then: Sharding
    stop: int
    hosts: int
    seek: tuple[int, int]

    limit_s = LIMIT_S

    @property
    def counts_records(self) -> bool:
        """Whether it is known which records are in a batch, so that they may be cut otherwise."""
        return self.above[0] not in ("map", "slice")

    def run(self, folder: Path) -> Counter[str]:
        source = records.open_source(self.records, folder)
        plain = records.build(self.records, source)
        expected = self.model(plain)
        check_model(self, expected, plain)
        whole = list(model.batches(expected, expected.start, self.first.sizes))
        check_real(self, expected, whole, plain)
        check_hosts(self, expected, whole, plain)
        return Counter({"batches": len(whole)})

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

    def sharded(self, plain: grain.MapDataset, sharding: Sharding, above: bool = True) -> Any:
        return self.batched(plain, sharding, above).shard_to(
            meshes.here(sharding.drawn),
            sharding.drawn.spec,
            remainder=self.option_remainder,
            **sharding.options,
        )

    @property
    def option_remainder(self) -> Any:
        return "pad" if self.remainder == "drop by Grain" else self.remainder

    def made(self, sharding: Sharding) -> model.Made:
        options = sharding.options
        return made(options, sharding.drawn.divisor * (options.get("microbatches") or 1))


def made(options: Mapping[str, Any], multiple: int) -> model.Made:
    """Of the options of `.shard_to`, those that say what is in a batch."""
    return model.Made(
        multiple,
        options.get("mask_key", "valid_mask"),
        options.get("pad_value", 0),
        options.get("microbatches"),
    )


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
        first = draw_sharding(rng)
        case = Pipelines(
            drawn,
            draw_above(rng),
            rng.choice(["pad", "pad", "pad", "drop", "error", "drop by Grain"]),
            first,
            draw_sharding(rng),
            stop=rng.randint(0, 6),
            hosts=rng.choice([h for h in (1, 2, 4, 8) if first.drawn.size % h == 0]),
            seek=(rng.randint(0, 10), rng.randint(0, 2 * num_records)),
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


def draw_sharding(rng: random.Random) -> Sharding:
    drawn, options = meshes.draw(rng), draw_options(rng)
    multiple = drawn.divisor * (options.get("microbatches") or 1)
    steps = [0, *sorted(rng.sample(range(1, 9), rng.choice([0, 0, 0, 1, 2])))]
    sizes = {
        step: rng.choice([rng.randint(1, 20), rng.randint(1, 64), multiple, 2 * multiple])
        for step in steps
    }
    return Sharding(sizes, drawn, options)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Some of the options of `.shard_to` that any dataset takes."""
    choices = {
        "mask_key": [None, "mask"],
        "pad_value": [7, {"tokens": -1}],
        "microbatches": [1, 2, 3],
        "cpu_buffer_size": [1, 2, 7],
        "device_buffer_size": [1, 3],
        "num_threads": [1, 2, 5],
        "reread_slow": [False],
        "read": ["needed", "once"],
    }
    return {name: rng.choice(of) for name, of in choices.items() if rng.random() < 0.25}


def fits(case: Pipelines, num_records: int) -> bool:
    """Whether batches, shards and options go together; what does not is refused by design."""
    shardings = [case.first, case.then]
    multiples = [case.made(sharding).multiple for sharding in shardings]
    for sharding, multiple in zip(shardings, multiples, strict=True):
        sizes = sharding.sizes.values()
        if case.option_remainder != "pad" and any(size % multiple for size in sizes):
            return False
        if "drop" in case.remainder and max(sizes) > num_records:
            return False
        if case.remainder == "error" and (len(sizes) > 1 or num_records % sharding.sizes[0]):
            return False
        if len(sizes) > 1 and (case.remainder == "drop by Grain" or not case.counts_records):
            return False
        whole = sharding.drawn.size * (sharding.options.get("microbatches") or 1)
        padded = [round_up(size, multiple) for size in sizes]
        if sharding.options.get("read") == "once" and any(size % whole for size in padded):
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
        check_batches("batch", case, first, iterator, expected, expected.start)
    stop = min(case.stop, len(whole))
    with iter(case.sharded(plain, first)) as iterator:
        list(itertools.islice(iterator, stop))
        state = json.loads(json.dumps(iterator.get_state()))
    compare.require(len(json.dumps(state)) < 200, f"the state is large: {state}")
    place = whole[stop - 1][1] if stop else expected.start
    with iter(case.sharded(plain, case.then)) as iterator:
        next(iterator, None)  # restored into one that is in use
        iterator.set_state(state)
        check_batches(f"restored at {stop}, batch", case, case.then, iterator, expected, place)
    step, record = case.seek
    if step <= len(whole):
        with iter(case.sharded(plain, first)) as iterator:
            iterator.seek(step)
            place = whole[step - 1][1] if step else expected.start
            check_batches(f"sought {step}, batch", case, first, iterator, expected, place)
    if case.counts_records and case.remainder != "error":
        place = expected.place_of(record, sizes)
        if place is not None:
            with iter(case.sharded(plain, first)) as iterator:
                iterator.seek(record=record)
                where = f"sought record {record}, batch"
                check_batches(where, case, first, iterator, expected, place)
    if case.above[0] == "repeat":
        check_epochs(case, expected, plain)


def check_epochs(case: Pipelines, expected: Any, plain: grain.MapDataset) -> None:
    place = expected.start
    with case.sharded(plain, case.first, above=False).epochs(case.above[1]) as epochs:
        for epoch, of_epoch in enumerate(epochs):
            count = len(of_epoch)
            where = f"epoch {epoch}, batch"
            place = check_batches(where, case, case.first, of_epoch, expected, place, count)
    compare.require(expected.next(place, case.first.sizes) is None, "the epochs end too early")


def check_batches(
    where: str,
    case: Pipelines,
    sharding: Sharding,
    batches: Iterable[Any],
    expected: Any,
    place: Any,
    count: int | None = None,
) -> Any:
    """Compares batches with those that should follow a place; returns the place after them.

    All that follow; or so many, if a number is given.
    """
    found, made = iter(batches), case.made(sharding)
    should = itertools.islice(model.batches(expected, place, sharding.sizes), count)
    for number, (rows, after) in enumerate(should):
        batch = next(found, None)
        compare.require(batch is not None, f"{where} {number} is missing")
        of_model = model.batch_of(rows, expected.like, made)
        compare.same_batch(f"{where} {number}", batch, of_model, sharding.drawn, made)
        place = after
    compare.require(next(found, None) is None, f"{where}: one too many")
    return place


def check_hosts(case: Pipelines, expected: Any, whole: list[Any], plain: grain.MapDataset) -> None:
    """What each of several hosts has of every batch, with no host but this one."""
    sharding, made = case.first, case.made(case.first)
    microbatches = made.microbatches or 1
    mesh = sharding.drawn.of_hosts(case.hosts)
    tree = ShardingTree.of(mesh, sharding.drawn.spec, microbatches=made.microbatches)
    ds = case.batched(plain, sharding, above=case.above[0] != "to_iter_dataset")
    pad = PadToDivisible(
        tree.layout().multiple,
        remainder=case.option_remainder,
        mask_key=made.mask_key,
        pad_value=made.pad_value,
    )
    for host, layout in tree.layouts().items():
        of_host = ds.pipe(pad).pipe(ShardBatch(layout))
        compare.require(len(of_host) == len(whole), f"host {host} has {len(of_host)} batches")
        for step, (rows, _) in enumerate(whole):
            should = model.host_batch_of(rows, expected.like, made)
            padded = len(should["id"])
            held = meshes.rows_of_host(mesh, sharding.drawn.specs(), host, padded, microbatches)
            kept = {name: leaves_at(leaf, held) for name, leaf in should.items()}
            compare.same_host_batch(f"host {host} of {case.hosts}, {step}", of_host[step], kept)


def leaves_at(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, Mapping):
        return {name: leaves_at(below, rows) for name, below in leaf.items()}
    return leaf[rows]
