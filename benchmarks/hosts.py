"""P5: the number of rows that each host reads from its source, on 1, 2 and 4 hosts."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.measure import Comparison, Goal, Group, Round, Run
from grain_shard import rehearse

RECORDS, GLOBAL_BATCH_SIZE, HOSTS = 512, 64, (1, 2, 4)


def rows_read() -> int:
    """Reads an epoch on this host, and returns the number of records that its source read."""
    import grain
    import jax

    import grain_shard  # noqa: F401

    class CountingSource:
        asked = 0

        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> dict[str, int]:
            CountingSource.asked += 1  # without a lock, because only one thread reads
            return {"x": int(index)}

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    ds = grain.MapDataset.source(CountingSource()).seed(0).shuffle().batch(GLOBAL_BATCH_SIZE)
    with iter(ds.shard_to(mesh, num_threads=1)) as batches:
        assert sum(1 for _ in batches) == RECORDS // GLOBAL_BATCH_SIZE
    return CountingSource.asked - 1  # one more read is to compare the hosts' sources


def measure(run: Run) -> Iterable[Round]:
    most = {hosts: max(rehearse.run(rows_read, hosts=hosts)) for hosts in HOSTS}
    yield {"whole batches": RECORDS} | {f"{hosts} hosts": most[hosts] for hosts in HOSTS}


GROUPS = [
    Group(
        "hosts",
        "Rows read by the host that reads most",
        measure,
        [
            Comparison(
                "P5",
                what=f"of {hosts} host{'s' * (hosts > 1)}",
                against="reading whole batches",
                unit="rows",
                ours=f"{hosts} hosts",
                theirs="whole batches",
                compared="ours / theirs",
                goal=Goal("exactly", 1 / hosts),
            )
            for hosts in HOSTS
        ],
    )
]
