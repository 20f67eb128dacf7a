"""P23: the loaders of MaxText and Levanter beside grain_shard, with the same data and batch size.

``python -m tests.clients --python maxtext`` (or ``levanter``) makes the environment in which a
trainer is measured. Without it, the trainer's rows of the table say so. Processor time is measured,
too, because it is more certain than the clock on a busy machine.

The file of a trainer in `tests/clients` has the recipe by which grain_shard replaces its loader.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import grain_shard
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, failed, interleave
from tests.clients.__main__ import ROOT, contained, environment, is_made

# Each of four feeds packs all its bins at once, which gives rows for four batches. So 16 batches
# contain this work four times.
GLOBAL_BATCH_SIZE, LENGTH, BATCHES = 64, 1024, 16
TIMEOUT_S = 1800
# The clocks by which each side is measured. The key is the end of a figure's name.
CLOCKS = {"": time.perf_counter, ", processor": time.process_time}
Figures = dict[str, float]
Sides = dict[str, Callable[[], Figures]]


def ms_a_batch(batches: Iterator[Any]) -> Figures:
    """Returns the milliseconds per batch, by the clock and of processor time.

    The first three batches, which start threads and compile, are not measured.
    """
    for _ in range(3):
        jax.block_until_ready(next(batches))
    before = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(BATCHES):
        jax.block_until_ready(next(batches))
    ms = {name: (clock() - before[name]) / BATCHES * 1e3 for name, clock in CLOCKS.items()}
    # Closing MaxText's own iterator fails, because it assumes that a Grain dataset has one parent.
    with contextlib.suppress(AssertionError):
        getattr(batches, "close", lambda: None)()
    return ms


def maxtext_sides(folder: Path) -> Sides:
    """Returns the sides for MaxText: its own loader, without and with a worker, and ours.

    Each side tokenizes texts and packs them by first fit. The number of bins is the number of rows
    of a batch.
    """
    from maxtext.configs import pyconfig

    from tests.clients import maxtext

    maxtext.make_data(folder)

    def config(workers: int) -> Any:
        settings = {
            "skip_jax_distributed_system": True,
            "per_device_batch_size": GLOBAL_BATCH_SIZE // jax.device_count(),
            "max_target_length": LENGTH,
            "num_epoch": 1000,
            "grain_worker_count": workers,
        }
        return pyconfig.initialize(maxtext.arguments(folder, folder, settings))

    here, worker = config(0), config(1)
    mesh = peers.data_mesh()
    make = maxtext.interface.make_grain_train_iterator

    def ours() -> Figures:
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
    """Restores MaxText's modules at the end of the block, because the recipe changes them."""
    modules = (maxtext.processing, maxtext.multihost, maxtext.interface, maxtext.grain_utility)
    kept = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, names in kept:
            vars(module).update(names)


def levanter_sides(folder: Path) -> Sides:
    """Returns the sides for Levanter: its own loader, and ours.

    Each reads rows of tokens in memory by index, and makes them examples of a language model.
    """
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

    def theirs() -> Figures:
        with jax.set_mesh(mesh):
            loader = DataLoader(ListAsyncDataset(rows), Batch, mesh=mesh, axis_resources=mapping)
            return ms_a_batch(iter(loader))

    @hax.named_jit(axis_resources=mapping)
    def examples(tokens: Any) -> Any:
        return hax.vmap(LmExample.causal, Batch)(hax.named(tokens, (Batch, Pos)), eos_id=0)

    def ours() -> Figures:
        ds = grain.MapDataset.source(grain_shard.ArraySource(tokens)).batch(Batch.size)
        ds = ds.shard_to(mesh, mask_key=None)
        with jax.set_mesh(mesh), iter(ds) as batches:
            return ms_a_batch(map(examples, batches))

    return {"ours for Levanter": ours, "Levanter": theirs}


CLIENTS = {
    "maxtext": (maxtext_sides, ("ours for MaxText", "MaxText", "MaxText, a worker")),
    "levanter": (levanter_sides, ("ours for Levanter", "Levanter")),
}


def child(client: str, rounds: int) -> None:
    """Measures one trainer, and prints its rounds as JSON, as the program of a process.

    A side that cannot be measured has a text with the reason in place of its figures.
    """
    make, _ = CLIENTS[client]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(list(interleave(make(Path(folder)), rounds)), default=str), flush=True)


def rounds_of(client: str, rounds: int) -> list[dict[str, Figures | str]]:
    """Measures one trainer in its own environment, and returns its rounds.

    Raises:
        Skip: The environment was not made.
    """
    if not is_made(client, "newest"):
        raise Skip(f"not installed: `python -m tests.clients --python {client}`")
    python = str(environment(client, "newest"))
    done = subprocess.run(
        contained([python, "-m", "benchmarks.clients", client, str(rounds)]),
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(run: Run) -> Iterator[Round]:
    rounds, of_clients = run.rounds(quick=3, full=9), []
    for client, (_, names) in CLIENTS.items():
        try:
            of_clients.append(rounds_of(client, rounds))
        except Exception as error:
            skip = error if isinstance(error, Skip) else failed(client, error)
            of_clients.append([dict.fromkeys(names, str(skip))] * rounds)
    for of_round in zip(*of_clients, strict=True):
        yield {
            name + clock: Skip(found) if isinstance(found, str) else found[clock]
            for figures in of_round
            for name, found in figures.items()
            for clock in CLOCKS
        }


def _comparisons(
    number: str, what: str, client: str, theirs: str, goal: Goal | None = None
) -> list[Comparison]:
    ours = f"ours for {client}"
    of = functools.partial(Comparison, against=theirs, unit="ms/batch", compared="theirs / ours")
    return [
        of(number, what, ours=ours, theirs=theirs, goal=goal),
        of("", f"{what}, processor time", ours=f"{ours}, processor", theirs=f"{theirs}, processor"),
    ]


GROUPS = [
    Group(
        "clients",
        "Loaders of trainers: batches of 64 rows of 1,024 tokens",
        measure,
        [
            *_comparisons("P23", "texts, packed", "MaxText", "MaxText", Goal("at least", 2.0)),
            *_comparisons("", "texts, packed", "MaxText", "MaxText, a worker")[:1],
            *_comparisons("", "rows of tokens in memory", "Levanter", "Levanter"),
        ],
    )
]

if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
