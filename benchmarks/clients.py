"""P23: the loaders of MaxText and of Levanter beside ours: the same data, in batches of one size.

Each is measured where it is installed, which is nowhere together. To make such an environment, and
to measure in it::

    $(python -m tests.clients --python maxtext) -m benchmarks clients

What takes the place of the client's loader is the recipe of its file in `tests/clients`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

import grain_shard
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, interleave

GLOBAL_BATCH_SIZE, LENGTH, BATCHES = 64, 1024, 15
Sides = dict[str, Callable[[], float]]


def ms_a_batch(batches: Iterator[Any]) -> float:
    """In a steady state: the first three batches, and what they start, do not count."""
    for _ in range(3):
        jax.block_until_ready(next(batches))
    start = time.perf_counter()
    for _ in range(BATCHES):
        jax.block_until_ready(next(batches))
    seconds = time.perf_counter() - start
    with contextlib.suppress(AssertionError):  # of MaxText's own, which asks Grain for one parent
        getattr(batches, "close", lambda: None)()
    return seconds / BATCHES * 1e3


def maxtext_sides(run: Run) -> Sides:
    """Texts, tokenized and packed by first fit, with as many bins as MaxText's batch has rows."""
    from maxtext.configs import pyconfig

    from tests.clients import maxtext

    data = run.folder / "maxtext"
    data.mkdir()
    maxtext.make_data(data)

    def config(workers: int) -> Any:
        settings = {
            "skip_jax_distributed_system": True,
            "per_device_batch_size": GLOBAL_BATCH_SIZE // jax.device_count(),
            "max_target_length": LENGTH,
            "num_epoch": 1000,
            "grain_worker_count": workers,
        }
        return pyconfig.initialize(maxtext.arguments(data, run.folder, settings))

    here, worker = config(0), config(1)
    mesh = peers.data_mesh()
    make = maxtext.interface.make_grain_train_iterator

    def ours() -> float:
        with _kept(maxtext):
            maxtext.take_over(bins=GLOBAL_BATCH_SIZE)
            return ms_a_batch(maxtext.interface.make_grain_train_iterator(here, mesh, [0]))

    return {
        "ours for MaxText": ours,
        "MaxText": lambda: ms_a_batch(make(here, mesh, [0])),
        "MaxText, a worker": lambda: ms_a_batch(make(worker, mesh, [0])),
    }


@contextlib.contextmanager
def _kept(maxtext: Any) -> Iterator[None]:
    """Puts back what the recipe replaces in MaxText's modules."""
    modules = (maxtext.processing, maxtext.multihost, maxtext.interface, maxtext.grain_utility)
    kept = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, names in kept:
            vars(module).update(names)


def levanter_sides(run: Run) -> Sides:
    """Rows of tokens by their index, in memory, as a language model's examples."""
    import haliax as hax
    from levanter.data.dataset import ListAsyncDataset
    from levanter.data.loader import DataLoader
    from levanter.models.lm_model import LmExample

    mesh = peers.data_mesh()
    Pos, Batch = hax.Axis("position", LENGTH), hax.Axis("batch", GLOBAL_BATCH_SIZE)
    mapping = {"batch": "data"}
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32_000, (GLOBAL_BATCH_SIZE * (BATCHES + 8), LENGTH), np.int32)
    with jax.set_mesh(mesh):
        rows = [LmExample.causal(hax.named(row, Pos), eos_id=0) for row in tokens]

    def theirs() -> float:
        with jax.set_mesh(mesh):
            loader = DataLoader(ListAsyncDataset(rows), Batch, mesh=mesh, axis_resources=mapping)
            return ms_a_batch(iter(loader))

    @hax.named_jit(axis_resources=mapping)
    def examples(tokens: Any) -> Any:
        return hax.vmap(LmExample.causal, Batch)(hax.named(tokens, (Batch, Pos)), eos_id=0)

    def ours() -> float:
        ds = grain.MapDataset.source(grain_shard.ArraySource(tokens)).batch(Batch.size)
        ds = ds.shard_to(mesh, mask_key=None)
        with jax.set_mesh(mesh), iter(ds) as batches:
            return ms_a_batch(map(examples, batches))

    return {"ours for Levanter": ours, "Levanter": theirs}


def measure(run: Run) -> Iterable[Round]:
    sides: Sides = {}
    for client, make, names in (
        ("MaxText", maxtext_sides, ("ours for MaxText", "MaxText", "MaxText, a worker")),
        ("Levanter", levanter_sides, ("ours for Levanter", "Levanter")),
    ):
        try:
            sides |= make(run)
        except ImportError as error:
            skip = functools.partial(_skip, f"{client} cannot be imported ({error})")
            sides |= dict.fromkeys(names, skip)
    return interleave(sides, run.rounds(quick=3, full=9))


def _skip(why: str) -> float:
    raise Skip(why)


def _comparison(number: str, what: str, client: str, theirs: str, goal: Goal | None) -> Comparison:
    ours = f"ours for {client}"
    return Comparison(
        number, what, theirs, "ms/batch", ours, theirs, compared="theirs / ours", goal=goal
    )


GROUPS = [
    Group(
        "clients",
        "Loaders of trainers: batches of 64 rows of 1,024 tokens",
        measure,
        [
            _comparison("P23", "texts, packed", "MaxText", "MaxText", Goal("at least", 2.0)),
            _comparison("", "texts, packed", "MaxText", "MaxText, a worker", None),
            _comparison("", "rows of tokens in memory", "Levanter", "Levanter", None),
        ],
    )
]
