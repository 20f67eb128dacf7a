"""Measures the time that a training loop loses while hosts agree on the end of their streams.

    python benchmarks/stream_agreement.py [--steps 400] [--hosts 2]

The same loop runs three times over the same rows. First, over streams with ``rows="local"``, whose
hosts agree on each batch. Second, over the same streams on a mesh of each host's own devices, which
need no agreement. Third, over a random-access pipeline, whose length is known. A step sleeps
`--step-ms` and runs a collective. The script prints the time that the loop waits for a batch, and
the time of a step with this wait. The difference between the first two runs is the cost of the
agreement.
"""

import argparse
import statistics
import time

from grain_shard import rehearse


def wait_and_step_times(kind, steps, step_s):
    """Runs the loop, and returns two lists of seconds, without the first twenty steps.

    The first list has the wait for each batch, the second the time of each step with its wait.
    """
    import grain
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import grain_shard  # noqa: F401

    devices = jax.local_devices() if kind == "streams alone" else jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    records = grain.MapDataset.range(steps * 64).map(lambda i: {"x": np.full(64, i, np.float32)})
    if kind == "random access":
        ds = records.batch(64).shard_to(mesh)
    else:
        host, hosts = jax.process_index(), jax.process_count()
        ds = (
            records[host::hosts]
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
            .batch(64 // hosts)
            .shard_to(mesh, rows="local")
        )
    everywhere = jax.make_mesh((jax.device_count(),), ("data",))
    rows = jax.device_put(np.ones(64, np.float32), NamedSharding(everywhere, P("data")))
    step = jax.jit(lambda rows: rows.sum())
    waits, step_times = [], []
    with iter(ds) as batches:
        while True:
            start = time.perf_counter()
            if next(batches, None) is None:
                break
            waits.append(time.perf_counter() - start)
            float(step(rows))
            time.sleep(step_s)  # in place of an accelerator's work
            step_times.append(time.perf_counter() - start)
    assert len(waits) == steps
    return waits[20:], step_times[20:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    for kind in ("streams that agree", "streams alone", "random access"):
        of_hosts = rehearse.run(
            wait_and_step_times,
            kind,
            args.steps,
            args.step_ms / 1e3,
            hosts=args.hosts,
            devices_per_host=2,
        )
        waits = sorted(1e3 * wait for waits, _ in of_hosts for wait in waits)
        step_ms = statistics.mean(1e3 * step_s for _, times in of_hosts for step_s in times)
        p99 = waits[int(len(waits) * 0.99)]
        print(
            f"{kind:18} wait for a batch: median {statistics.median(waits):.3f} ms, p99 {p99:.3f},"
            f" most {waits[-1]:.3f}; a step with it: mean {step_ms:.2f} ms"
        )


if __name__ == "__main__":
    main()
