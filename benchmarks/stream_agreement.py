"""What it costs a training loop that the hosts agree, batch by batch, on the end of their streams.

    python benchmarks/stream_agreement.py [--steps 400] [--hosts 2]

The same loop over the same rows, three times: streams with ``rows="local"``, which agree; the same
streams on a mesh of each host's own devices, which have nobody to agree with; and a random-access
pipeline, whose length is known. A step takes `--step-ms`; what counts is how long the loop waits
for its next batch. The difference between the first two is what the agreement costs.
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
    for kind in ("streams that agree", "streams alone", "random access"):
        by_host = rehearse.run(
            wait_times, kind, args.steps, args.step_ms / 1e3, hosts=args.hosts, devices_per_host=2
        )
        waits = sorted(w * 1e3 for waits in by_host for w in waits)
        p99 = waits[int(len(waits) * 0.99)]
        print(
            f"{kind:18} wait for a batch: median {statistics.median(waits):.3f} ms, p99 {p99:.3f},"
            f" most {waits[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
