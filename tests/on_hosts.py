"""Helpers for tests on several hosts: cases that share the processes, and jobs that are killed.

`KeyValues` is for hosts that are threads of one process: the key-value store that they share.
"On a host" in a docstring means that the function is called in the process of a rehearsed host.
"""

import json
import os
import signal
import threading
import traceback
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

from grain_shard import rehearse
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.hosts import rounds
from tests.conftest import HOSTS_S


def refuse_collective_device_put():
    """On a host: makes each later `jax.device_put` fail that would compare data across hosts."""
    device_put = jax.device_put

    def checked(x, device=None, **kwargs):
        host_data = not isinstance(x, jax.Array) or x.is_fully_addressable
        spans_hosts = isinstance(device, Sharding) and not device.is_fully_addressable
        assert not (host_data and spans_hosts), "device_put would compare x across hosts"
        return device_put(x, device, **kwargs)

    jax.device_put = checked


def cases_of(module):
    """Returns the functions named ``case_...`` of a test module.

    Args:
        module: The ``globals()`` of the module.
    """
    return [case for name, case in module.items() if name.startswith("case_")]


def or_traceback(call, *args):
    """On a host: calls a function, and returns its result, or the traceback as text if it fails."""
    try:
        return call(*args)
    except Exception:
        return traceback.format_exc()


def run_cases(cases, *args):
    """On a host: calls each case, and returns the results by the name of the case.

    The result of a case that failed is its traceback as text.
    """
    return {case.__name__: or_traceback(case, *args) for case in cases}


def data_mesh():
    """On a host: returns a mesh of all devices of all hosts, with the axis "data"."""
    return Mesh(np.array(jax.devices()), ("data",))


def model_over_hosts():
    """On a host: returns a mesh whose axis "model" spans hosts, so that hosts hold the same rows.

    With four hosts, hosts 0 and 2 hold the same rows, and so do hosts 1 and 3.
    """
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("model", "data"))


def part_of(shards):
    """Returns the slice of a dataset that belongs to a shard.

    Args:
        shards: A `ShardByMesh`, a feed, or any other of Grain's shard options.
    """
    return slice(shards.shard_index, None, shards.shard_count)


def whole(batch):
    """On a host: returns the leaves of a global batch as numpy arrays, by their name."""
    return {name: multihost_utils.process_allgather(x, tiled=True) for name, x in batch.items()}


APIS = ("manager", "v1")  # Orbax's CheckpointManager, and its newer functions


def save(api, directory, step, batches):
    """On a host: saves the state of an iterator by one of Orbax's interfaces.

    Args:
        api: One of `APIS`.
        directory: Folder of the checkpoints, which all hosts share.
        step: Number of the checkpoint.
        batches: The iterator.
    """
    if api == "v1":
        ocp_v1.save_checkpointables(Path(directory, str(step)), {"data": batches})
        return
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.Composite(data=CheckpointSave(batches)))
        manager.wait_until_finished()


def restore(api, directory, step, batches):
    """On a host: restores the state of an iterator that `save` has saved, with equal arguments."""
    if api == "v1":
        ocp_v1.load_checkpointables(Path(directory, str(step)), {"data": batches})
        return
    with ocp.CheckpointManager(directory) as manager:
        manager.restore(step, args=ocp.args.Composite(data=CheckpointRestore(batches)))


def meet(name):
    """On a host: waits until all hosts have called this with the same name, which is new."""
    rounds.runtime_client().wait_at_barrier(name, 100_000)


def end_job(job, jobs, directory, report):
    """On a host: ends a job of `run_jobs`. Writes the report, and kills the host.

    The hosts of the last job are not killed.

    Args:
        job: Number of the job.
        jobs: All jobs, as in `run_jobs`.
        directory: The folder that all hosts share.
        report: The report, as plain JSON.
    """
    _report_file(directory, job, jax.process_index()).write_text(json.dumps(report))
    if job < len(jobs) - 1:
        multihost_utils.sync_global_devices("every host has written its report")
        os.kill(os.getpid(), signal.SIGKILL)


def run_jobs(run_job, jobs, directory):
    """Runs jobs one after the other, each with new processes, and returns their reports.

    Args:
        run_job: Function that every host calls with the number of the job and the folder. It must
            call `end_job` at its end.
        jobs: For each job, a tuple that begins with the number of hosts and the number of devices
            of each host. Further items are for `run_job`.
        directory: A folder that all hosts of all jobs share.

    Returns:
        A list for each job, with the report of each host.
    """
    for job, (hosts, devices_per_host, *_) in enumerate(jobs):
        is_last = job == len(jobs) - 1
        sizes = {"hosts": hosts, "devices_per_host": devices_per_host}
        try:
            rehearse.run(run_job, job, str(directory), **sizes, timeout_s=HOSTS_S)
            assert is_last, "it was to be killed"
        except rehearse.RehearsalError as error:
            written = [_report_file(directory, job, host).exists() for host in range(hosts)]
            if is_last or not all(written):
                raise AssertionError(f"job {job} failed by itself: {error}") from error
    return [
        [json.loads(_report_file(directory, job, host).read_text()) for host in range(hosts)]
        for job, (hosts, *_) in enumerate(jobs)
    ]


def _report_file(directory, job, host):
    return Path(directory, f"job {job} host {host}")


def own_parts(batch):
    """On a host: returns the parts of a global batch that this host's devices hold, by leaf name.

    A value is the global shape of the leaf, and a list of (index in the leaf, array of the part).
    """

    def parts(leaf):
        return [(part.index, np.asarray(part.data)) for part in leaf.addressable_shards]

    return {name: (leaf.shape, parts(leaf)) for name, leaf in batch.items()}


def own_rows(batch):
    """On a host: returns the "id" of each valid row that its devices hold, by row number."""
    rows = {}
    pairs = zip(batch["id"].addressable_shards, batch["valid_mask"].addressable_shards, strict=True)
    for ids, mask in pairs:
        assert ids.index == mask.index
        start = ids.index[0].start or 0
        for row in np.flatnonzero(mask.data):
            rows[start + int(row)] = int(np.asarray(ids.data)[row])
    return rows


def assembled(of_hosts):
    """Returns a global batch made of the parts of all hosts, as numpy arrays by leaf name.

    It checks that no part is missing, and that copies of a part are equal. (To gather the batches
    on the hosts, by collectives, would take much longer.)

    Args:
        of_hosts: The results of `own_parts` on all hosts.
    """
    batch = {}
    for name, (shape, own) in of_hosts[0].items():
        assert all(of_host[name][0] == shape for of_host in of_hosts)
        parts = [part for of_host in of_hosts for part in of_host[name][1]]
        leaf, is_held = np.zeros(shape, own[0][1].dtype), np.zeros(shape, bool)
        for index, part in parts:
            leaf[index], is_held[index] = part, True
        assert is_held.all(), name
        for index, part in parts:
            assert part.dtype == leaf.dtype
            np.testing.assert_array_equal(part, leaf[index], name)
        batch[name] = leaf
    return batch


def assembled_batches(of_hosts):
    """Returns the global batches, each by `assembled`; every host must have as many."""
    return [assembled(parts) for parts in zip(*of_hosts, strict=True)]


class KeyValues:
    """Stands in for the client of JAX's key-value store, for hosts that are threads of a process.

    Attributes:
        entries: The values in the store, by key.
    """

    def __init__(self, entries=()):
        self.entries, self._changed = dict(entries), threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.entries and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.entries[key] = value
            self._changed.notify_all()

    def key_value_dir_get(self, prefix):
        with self._changed:
            return [(k, v) for k, v in self.entries.items() if k.startswith(prefix)]

    def key_value_delete(self, key):
        with self._changed:
            is_gone = key.__eq__ if key[-1] != "/" else lambda k: k.startswith(key)
            self.entries = {k: v for k, v in self.entries.items() if not is_gone(k)}

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            if self._changed.wait_for(lambda: key in self.entries, timeout_ms / 1e3):
                return self.entries[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def of_host(self, host, make=rounds.Store):
        """Returns the result of `make`, which runs as a host with this store.

        Args:
            host: Process index that `jax.process_index` returns meanwhile.
            make: Function without arguments that asks for the store and for the process index.
        """
        with (
            mock.patch.object(rounds, "runtime_client", return_value=self),
            mock.patch.object(jax, "process_index", return_value=host),
        ):
            return make()

    def rounds(self, host, num_hosts, timeout_s=60.0):
        """Returns the `Rounds` of one of the hosts, in a series called "series"."""
        begun = self.of_host(host, lambda: rounds.Rounds(range(num_hosts), timeout_s, None))
        begun.name, begun.folder = "series", "series"
        return begun
