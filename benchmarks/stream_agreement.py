"""What it costs a training loop that the hosts agree, batch by batch, on the end of their streams.

    python benchmarks/stream_agreement.py [--steps 400] [--hosts 2]

The same loop over the same rows, once from a random-access pipeline, whose length is known, and
once from streams with ``rows="local"``. A step takes `--step-ms`; what counts is how long the loop
waits for its next batch.
"""

import argparse
import statistics
import time

from grain_shard import rehearse


def wait_times(kind, steps, step_s):
    """The seconds that this host waited for each batch after the first twenty."""
    import grain
    import jax
    import numpy as np

    import grain_shard

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    records = grain.MapDataset.range(steps * 64).map(lambda i: {"x": np.full(64, i, np.float32)})
    if kind == "random access":
        ds = records.batch(64).shard_to(mesh)
    else:
        mine = grain_shard.ShardByMesh(mesh)
        ds = (
            records[mine.shard_index :: mine.shard_count]
            .to_iter_dataset()
            .batch(64 // mine.shard_count)
            .shard_to(mesh, rows="local")
        )
    waits = []
    with iter(ds) as batches:
        while True:
            start = time.perf_counter()
            if next(batches, None) is None:
                break
            waits.append(time.perf_counter() - start)
            time.sleep(step_s)  # the step
    assert len(waits) == steps
    return waits[20:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    for kind in ("random access", "streams"):
        by_host = rehearse.run(
            wait_times, kind, args.steps, args.step_ms / 1e3, hosts=args.hosts, devices_per_host=2
        )
        waits = sorted(w * 1e3 for waits in by_host for w in waits)
        p99 = waits[int(len(waits) * 0.99)]
        print(
            f"{kind:14} wait for a batch: median {statistics.median(waits):.3f} ms, p99 {p99:.3f}"
        )


if __name__ == "__main__":
    main()
