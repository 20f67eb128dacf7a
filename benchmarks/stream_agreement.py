"""What it costs a training loop that the hosts agree, batch by batch, on the end of their streams.

    python benchmarks/stream_agreement.py [--steps 400] [--hosts 2]

The same loop over the same rows, three times: streams with ``rows="local"``, which agree; the same
streams on a mesh of each host's own devices, which have nobody to agree with; and a random-access
pipeline, whose length is known. A step takes `--step-ms`; what counts is how long the loop waits
for its next batch, and how long a step takes together with a collective of its own. The difference
between the first two is the cost of the agreement.
"""

import argparse
import statistics
import time

from grain_shard import rehearse


def wait_and_step_times(kind, steps, step_s):
    """The seconds that this host waited for each batch after the first twenty, and of each step."""
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
            time.sleep(step_s)  # as long as an accelerator works
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
