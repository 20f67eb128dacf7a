"""P4: the time to place a batch of 12.6 MB on the devices of two processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave, largest
from grain_shard import rehearse

GLOBAL_BATCH_SIZE, FEATURES = 256, 3 * 64 * 64  # 12.6 MB of float32 per batch
BATCHES = 20


def rounds_on_host(rounds: int) -> list[Round]:
    """Runs all sides on this host, and returns their milliseconds per batch for each round.

    The batch is in memory.
    """
    import time

    import grain
    import jax
    import numpy as np

    import grain_shard
    from benchmarks import peers

    mesh, sharding = peers.data_mesh(), peers.data_sharding()
    batch = {"x": np.random.default_rng(0).random((GLOBAL_BATCH_SIZE, FEATURES), np.float32)}

    class Again:
        def __len__(self) -> int:
            return BATCHES + 1

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return batch

    def ms(batches: Iterator[object]) -> float:
        jax.block_until_ready(next(batches))  # starts the threads, and waits for the other host
        start = time.perf_counter()
        for placed in batches:
            jax.block_until_ready(placed)
        return (time.perf_counter() - start) / BATCHES * 1e3

    def chain() -> float:
        ds = grain.MapDataset.source(Again())
        with iter(ds.shard_to(mesh, mask_key=None)) as batches:
            return ms(batches)

    def grain_device_put() -> float:
        ds = grain.MapDataset.source(Again()).to_iter_dataset(grain.ReadOptions(2, 4))
        return ms(peers.device_put(ds))

    def place() -> float:
        return ms(
            grain_shard.placement.distribute_batch(batch, sharding) for _ in range(BATCHES + 1)
        )

    def device_put() -> float:
        return ms(jax.device_put(batch, sharding) for _ in range(BATCHES + 1))

    sides = {"chain": chain, "Grain": grain_device_put, "place": place, "device_put": device_put}
    return list(interleave(sides, rounds))


def measure(run: Run) -> Iterable[Round]:
    by_host = rehearse.run(
        rounds_on_host, run.rounds(quick=3, full=9), hosts=2, devices_per_host=4, timeout_s=240
    )
    for figures in zip(*by_host, strict=True):
        yield {side: largest(host[side] for host in figures) for side in figures[0]}


def _comparison(what: str, against: str, ours: str, theirs: str) -> Comparison:
    return Comparison(
        "P4",
        what=what,
        against=against,
        unit="ms",
        ours=ours,
        theirs=theirs,
        compared="theirs / ours",
        goal=Goal("at least", 40),
    )


GROUPS = [
    Group(
        "two_processes",
        "Placing batches of 12.6 MB over 2 processes",
        measure,
        [
            _comparison(
                "in the background",
                "Grain's device_put",
                "chain",
                "Grain",
            ),
            _comparison(
                "on the main thread",
                "jax.device_put",
                "place",
                "device_put",
            ),
        ],
    )
]
