"""Compares `.shard_to` with Grain's guide on two hosts, in a loop with a collective in each step.

    python benchmarks/two_hosts.py [--steps 256] [--timeout-s 60]

Grain's guide ends a pipeline with ``grain.experimental.device_put(ds, sharding)``. On two hosts it
compares every batch across the hosts, from a background thread. The main thread runs the step's own
collective at the same time, and each collective waits for the other. The script runs the loop with
a timeout, to see if it still hangs.
"""

import argparse
import time

from grain_shard import rehearse

GLOBAL_BATCH_SIZE, FEATURES = 256, 3 * 64 * 64  # 12.6 MB of float32 per batch


def train(chain, steps):
    """Runs the loop on this host, and returns the seconds of all steps after the first eleven."""
    import grain
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import grain_shard  # noqa: F401

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    batches = (
        grain.MapDataset.range(steps * GLOBAL_BATCH_SIZE)
        .map(lambda i: {"x": np.full(FEATURES, i % 7, np.float32)})
        .batch(GLOBAL_BATCH_SIZE, drop_remainder=True)
    )
    if chain == "grain_shard":
        ds = batches.shard_to(mesh)
    else:
        ds = grain.experimental.device_put(
            ds=batches.to_iter_dataset(grain.ReadOptions(2, 4)),
            device=NamedSharding(mesh, P("data")),
            cpu_buffer_size=4,
            device_buffer_size=2,
        )

    @jax.jit
    def step(total, batch):
        return total + jnp.mean(batch["x"])  # an all-reduce over the hosts

    total, start = jnp.zeros(()), 0.0
    for number, batch in enumerate(ds):
        total = step(total, batch)
        if number == 10:
            total.block_until_ready()
            start = time.perf_counter()
    total.block_until_ready()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="seconds for each of the two loops"
    )
    args = parser.parse_args()
    for chain in ("grain_shard", "grain.experimental.device_put"):
        try:
            seconds = max(
                rehearse.run(
                    train, chain, args.steps, hosts=2, devices_per_host=4, timeout_s=args.timeout_s
                )
            )
            print(f"{chain:32} {args.steps} steps, {seconds / (args.steps - 11) * 1e3:.2f} ms each")
        except rehearse.RehearsalError as error:
            print(f"{chain:32} did not finish {args.steps} steps in {args.timeout_s:g} s:", end=" ")
            print(str(error).splitlines()[0])


if __name__ == "__main__":
    main()
