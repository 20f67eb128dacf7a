"""Cases of kill chains: jobs of real processes that are killed, and jobs that go on after them.

Each job goes on from the last checkpoint, with another number of hosts, another mesh and other
batch sizes. The hosts write every batch that they get to files. All jobs together must have the
batches of one run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.soak import compare, feeds, meshes, model, records, shardings
from benchmarks.soak.shardings import Sharding
from grain_shard import BatchSchedule, rehearse
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave

# By the number of hosts, the possible numbers of devices of each host.
DEVICES_BY_HOSTS = {1: (1, 2, 8), 2: (1, 2, 4), 3: (1, 2), 4: (1, 2)}
# By the number of devices, the possible shapes of the mesh.
SHAPES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(6,), (3, 2)]}
SHAPES[8] = [(8,), (4, 2), (2, 4)]
JOB_LIMIT_S = 150


@dataclasses.dataclass(frozen=True)
class Job:
    """A job: a part of the run.

    Attributes:
        hosts: Number of hosts, each a process.
        sharding: Batch sizes, mesh and options.
        save_every: Number of steps between two checkpoints.
        kill_after: Number of batches after which the job is killed; None for never. The run may end
            before.
        victim: The host that is killed, after which the launcher ends all hosts; None if each host
            kills itself.
    """

    hosts: int
    sharding: Sharding
    save_every: int
    kill_after: int | None
    victim: int | None


@dataclasses.dataclass(frozen=True)
class Kills:
    """A case of a kill chain.

    Attributes:
        records: The dataset before `.batch`, or the dataset that is cut into feeds.
        stream: The stream of each feed; None for random access.
        epochs: Number of epochs; 1 for feeds.
        jobs: The jobs, in order. The last job is not killed.
    """

    records: records.Records
    stream: feeds.Stream | None
    epochs: int
    jobs: tuple[Job, ...]

    @property
    def limit_s(self) -> float:
        return (JOB_LIMIT_S + 10) * len(self.jobs)

    def run(self, folder: Path) -> Counter[str]:
        expected = self.model(folder)
        places, kills = [expected.start], 0  # places by the number of batches before
        for number, job in enumerate(self.jobs):
            was_killed = run_job(self, number, folder)
            places = check_job(job, written_by(job, number, folder), expected, places, was_killed)
            if not was_killed:
                break
            kills += 1
        what = "random access" if self.stream is None else "feeds"
        return Counter({"batches": len(places) - 1, f"kills of {what}": kills})

    def model(self, folder: Path) -> Any:
        source = records.open_source(self.records, folder)
        if self.stream is None:
            return model.RandomAccess(records.build(self.records, source), self.epochs, drops=False)
        return model.Feeds(feeds.rows_of_feeds(self.records, source, self.stream), drops=False)

    def sharded(self, job: Job, folder: Path) -> Any:
        source, sizes = records.open_source(self.records, folder), job.sharding.sizes
        if self.stream is None:
            ds = records.build(self.records, source)
            ds = ds.pipe(BatchSchedule(sizes)) if len(sizes) > 1 else ds.batch(sizes[0])
            ds = ds.repeat(self.epochs) if self.epochs > 1 else ds
        else:
            ds = feeds.batched(self.records, source, self.stream, job.sharding)
        return job.sharding.apply(ds, timeout_s=60)


# Functions that draw a case.


def draw(rng: random.Random) -> Kills:
    """Draws a case, with random access in two of three."""
    stream, least = None, 60
    if rng.random() < 0.35:
        stream = feeds.draw_stream(rng, num_feeds=rng.choice([4, 8]))
        least = 10 * stream.num_feeds
    drawn = records.draw(rng, at_least=least)
    num_jobs = rng.randint(2, 4)
    jobs = [draw_job(rng, stream, is_last=number == num_jobs - 1) for number in range(num_jobs)]
    return Kills(drawn, stream, rng.choice([1, 1, 2]) if stream is None else 1, tuple(jobs))


def draw_job(rng: random.Random, stream: feeds.Stream | None, is_last: bool) -> Job:
    hosts = rng.choice(list(DEVICES_BY_HOSTS))
    devices = hosts * rng.choice(DEVICES_BY_HOSTS[hosts])
    while True:  # until `.shard_to` accepts the job
        mesh = meshes.draw_of_shape(rng, rng.choice(SHAPES[devices]))
        sharding = dataclasses.replace(shardings.draw(rng), drawn=mesh)
        most = max(sharding.sizes.values())
        if stream is not None:
            most = stream.num_feeds * rng.randint(1, 2)
        if stream is not None or most > 16:
            sharding = dataclasses.replace(sharding, sizes={0: min(most, 16)})
        if stream is None or fits_feeds(stream, sharding):
            break
    return Job(
        hosts,
        sharding,
        save_every=rng.randint(1, 4),
        kill_after=None if is_last else rng.randint(1, 7),
        victim=rng.choice([None, *range(hosts)]),
    )


def fits_feeds(stream: feeds.Stream, sharding: Sharding) -> bool:
    knows_leaves = stream.packed is None or sharding.drawn.is_of_all_leaves
    return knows_leaves and sharding.leaves_no_shard_empty


# Functions that run on the hosts.


def on_host(case: Kills, number: int, folder: str) -> None:
    """Runs a job on a host: trains from the last checkpoint, and writes each batch to a file.

    The host kills itself where the job says so.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    job, host = case.jobs[number], jax.process_index()
    step = jax.jit(lambda leaves: sum(leaf.sum() for leaf in leaves))
    with (
        ocp.CheckpointManager(Path(folder, "checkpoints")) as manager,
        iter(case.sharded(job, Path(folder))) as iterator,
        Path(folder, f"job {number} host {host}").open("wb", buffering=0) as written,
    ):
        if (last := manager.latest_step()) is not None:
            manager.restore(last, args=ocp.args.Composite(data=CheckpointRestore(iterator)))
        pickle.dump(iterator.get_state()["step"], written)
        for count, batch in enumerate(iterator, 1):
            arrays = {
                path: leaf
                for path, leaf in compare.named_leaves(batch).items()
                if isinstance(leaf, jax.Array)
            }
            float(step(list(arrays.values())))  # a collective, as in training
            pickle.dump({path: shards(leaf) for path, leaf in arrays.items()}, written)
            done = iterator.get_state()["step"]
            if done % job.save_every == 0:
                manager.save(done, args=ocp.args.Composite(data=CheckpointSave(iterator)))
            if count == job.kill_after and job.victim in (None, host):
                os.kill(os.getpid(), signal.SIGKILL)
        pickle.dump("the end", written)


def shards(array: jax.Array) -> list[tuple[Any, np.ndarray]]:
    return [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]


# Functions that run in the process of the soak.


def run_job(case: Kills, number: int, folder: Path) -> bool:
    """Runs a job, and returns True if it was killed, False if it ran to its end.

    Raises:
        RehearsalError: A host failed in another way, or the hosts timed out.
    """
    job = case.jobs[number]
    try:
        rehearse.run(
            on_host,
            case,
            number,
            str(folder),
            hosts=job.hosts,
            devices_per_host=job.sharding.drawn.size // job.hosts,
            timeout_s=JOB_LIMIT_S,
        )
    except rehearse.RehearsalError as error:
        failed = error.result.failed_host
        if failed is None or job.kill_after is None or error.result.returncodes[failed] != -9:
            raise
        compare.require(job.victim in (None, failed), f"job {number}: host {failed} was killed")
        for host, output in enumerate(error.result.outputs):
            print(f"--- job {number}, host {host} printed\n{output}")
        return True
    return False


def written_by(job: Job, number: int, folder: Path) -> list[list[Any]]:
    """Returns the objects that each host wrote: its first step, batches, and "the end"."""
    return [list(pickles(folder / f"job {number} host {host}")) for host in range(job.hosts)]


def pickles(path: Path) -> Iterator[Any]:
    """Yields the complete objects of a file. The last may be incomplete if its host was killed."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def check_job(
    job: Job, of_hosts: list[list[Any]], expected: Any, places: list[Any], was_killed: bool
) -> list[Any]:
    """Checks the batches of a job, and returns the places in the model that the run now has.

    Args:
        job: The job.
        of_hosts: The objects that each host wrote.
        expected: The model of the run.
        places: The place after each number of batches, as the jobs before have left them.
        was_killed: True if the job was killed.
    """
    begun = {of_host[0] for of_host in of_hosts if of_host}
    compare.require(len(begun) == 1, f"the hosts began at steps {begun}")
    (start,) = begun
    compare.require(start < len(places), f"it began at {start}, of {len(places) - 1} batches")
    places = places[: start + 1]
    for number in itertools.count(1):
        batches = [of_host[number] for of_host in of_hosts if len(of_host) > number]
        found = expected.next(places[-1], job.sharding.sizes)
        if not batches:  # every host was killed before this batch
            compare.require(was_killed, f"batch {start + number} is missing")
            return places
        where = f"batch {start + number} on {job.hosts} hosts"
        if found is None:
            # If a host was killed in the last batch, other hosts may have come to the end.
            compare.require(batches == ["the end"] * len(batches), f"{where} is one too many")
            compare.require(was_killed or len(batches) == job.hosts, f"{where}: one did not end")
            return places
        rows, after = found
        should = model.batch_of(rows, expected.like, job.sharding.made)
        for host, batch in enumerate(batches):
            compare.require(batch != "the end", f"{where}: it ended")
            check_shards(f"{where}, host {host}", batch, should)
        places.append(after)
    raise AssertionError


def check_shards(where: str, batch: Any, should: Any) -> None:
    leaves = compare.named_leaves(should)
    arrays = {path: leaf for path, leaf in leaves.items() if leaf.dtype.kind != "U"}
    compare.require(batch.keys() == arrays.keys(), f"{where}: {list(batch)}")
    for path, of_leaf in batch.items():
        for index, data in of_leaf:
            compare.same_leaf(f"{where}{path}{index}", data, arrays[path][index])
