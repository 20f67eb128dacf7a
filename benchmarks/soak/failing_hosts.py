"""Cases in which one host raises or is killed while all other hosts train.

All hosts must end soon, and name the host that raised. Every step has a collective, in which a host
would wait for the host that has gone. Only the library ends the hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import numpy as np

import grain_shard
from benchmarks.soak import compare
from grain_shard import rehearse

KINDS = ("random access", "stream", "feeds")
WAYS = ("raises", "is killed", "ends in good order")
DEVICES_PER_HOST = 2
BATCHES, BATCH_SIZE, NUM_FEEDS = 40, 24, 12  # 2, 3 and 4 hosts divide batches and feeds
ERROR = "the bucket is gone"


@dataclasses.dataclass(frozen=True)
class FailingHosts:
    """A case of a failing host.

    Attributes:
        kind: Kind of the pipeline, one of `KINDS`.
        hosts: Number of hosts, each a process.
        victim: Index of the host that fails.
        way: The way in which it fails, one of `WAYS`.
        batch: Number of the batch in which it fails.
    """

    kind: str
    hosts: int
    victim: int
    way: str
    batch: int

    limit_s = 200

    def run(self, folder: Path) -> Counter[str]:
        result = rehearse.run_script(
            ["-m", "benchmarks.soak.failing_hosts", json.dumps(dataclasses.asdict(self))],
            hosts=self.hosts,
            devices_per_host=DEVICES_PER_HOST,
            timeout_s=self.limit_s - 30,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            end_others=False,
        )
        check_ends(self, result)
        return Counter({f"hosts: one {self.way}": 1})


def draw(rng: random.Random) -> FailingHosts:
    hosts = rng.randint(2, 4)
    return FailingHosts(
        rng.choice(KINDS),
        hosts,
        victim=rng.randrange(hosts),
        way=rng.choice(WAYS),
        batch=rng.randint(0, BATCHES - 1),
    )


def check_ends(case: FailingHosts, result: rehearse.RehearsalResult) -> None:
    """Checks that all hosts ended.

    If a host raised or was killed, all hosts must have failed, and name the host that raised. Else
    all must have the exit code 0.
    """
    codes = result.returncodes
    printed = "\n".join(f"--- host {h}\n{output}" for h, output in enumerate(result.outputs))
    told = f"hosts {result.timed_out_hosts} hang, exit codes {codes}\n{printed}"
    compare.require(not result.timed_out_hosts, told)
    if case.way == "ends in good order":
        compare.require(codes == [0] * case.hosts, told)
        return
    compare.require(0 not in codes, told)
    if case.way == "is killed":
        compare.require(codes[case.victim] == -signal.SIGKILL, told)
        return
    for host, output in enumerate(result.outputs):
        named = host == case.victim or f"host {case.victim}" in output
        compare.require(named and ERROR in output, f"host {host} does not say it\n{told}")


# Functions that run on the hosts.


def train(case: FailingHosts) -> None:
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Only JAX notices a host that is killed, by default after 100 seconds. Here it is 20 seconds.
    # If no host is killed the default stays, because a host of a busy machine may be late.
    heartbeat = {"heartbeat_timeout_seconds": 20} if case.way == "is killed" else {}
    jax.distributed.initialize(**heartbeat)
    step = jax.jit(lambda batch: batch["x"].sum())
    for number, batch in enumerate(pipeline(case)):
        float(step(batch))
        if (case.way, case.victim, case.batch) == ("is killed", jax.process_index(), number):
            os.kill(os.getpid(), signal.SIGKILL)


def pipeline(case: FailingHosts) -> Any:
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    records = grain.MapDataset.range(BATCHES * BATCH_SIZE).map(functools.partial(load, case))
    if case.kind == "random access":
        return records.batch(BATCH_SIZE).shard_to(mesh)
    if case.kind == "stream":
        shards = grain_shard.ShardByMesh(mesh)
        own = part(records, shards).batch(BATCH_SIZE // shards.shard_count)
        return own.shard_to(mesh, rows="local")
    make_feed = functools.partial(part, records)
    return grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(BATCH_SIZE).shard_to(mesh)


def load(case: FailingHosts, record: int) -> dict[str, np.ndarray]:
    import jax

    fails_here = case.way == "raises" and case.victim == jax.process_index()
    if fails_here and record >= case.batch * BATCH_SIZE:
        raise OSError(ERROR)
    return {"x": np.full(4, record, np.float32)}


def part(records: grain.MapDataset, options: grain.sharding.ShardOptions) -> grain.IterDataset:
    own = records[options.shard_index :: options.shard_count]
    return own.to_iter_dataset().filter(lambda record: True)


if __name__ == "__main__":
    train(FailingHosts(**json.loads(sys.argv[1])))
