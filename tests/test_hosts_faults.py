"""On real processes: a source that fails now and then, with some corrupt records, for an epoch.

Two hosts train on it, are killed in the middle, and four go on.
"""

from pathlib import Path

import grain
import jax
import numpy as np
import pytest

from grain_shard.reading import faults
from tests.on_hosts import data_mesh, end_job, restore, run_jobs, save, whole

pytestmark = pytest.mark.slow

NUM_RECORDS, GLOBAL_BATCH_SIZE, BATCHES_BEFORE = 6000, 96, 30
# Hosts, devices of each, and the batches until the save.
JOBS = [(2, 2, BATCHES_BEFORE), (4, 1, None)]
KINDS = ("one by one", "many in a call")
# One record in a thousand is corrupt; every other one of these cannot be decoded, in .map.
BAD = set(np.random.default_rng(0).choice(NUM_RECORDS, NUM_RECORDS // 1000, replace=False).tolist())
UNDECODABLE = set(sorted(BAD)[::2])


class Flaky:
    """One read in a hundred fails; reads of corrupt records always do."""

    def __init__(self, several):
        self.rng = np.random.default_rng(jax.process_index())  # so that each host meets some
        if several:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self):
        return NUM_RECORDS

    def __getitem__(self, index):
        if self.rng.random() < 0.01:
            raise ConnectionResetError("the bucket is busy")
        if index in BAD - UNDECODABLE:
            raise ValueError(f"the checksum of {index} is wrong")
        return index


def decode(index):
    if index in UNDECODABLE:
        raise LookupError(f"{index} has no image")
    return np.int32(index)


def augmented(records):
    return records.random_map(lambda i, rng: {"id": i, "noise": rng.random(dtype=np.float32)})


def pipeline(source, decode):
    records = grain.MapDataset.source(source).seed(7).shuffle().map(decode)
    return augmented(records).batch(GLOBAL_BATCH_SIZE)


# On the hosts.


def run_job(job, directory):
    """Trains from the checkpoints of the job before; writes what it did, and may be killed."""
    faults._FIRST_PAUSE_S = 0.001
    report = {kind: train(job, Path(directory, kind)) for kind in KINDS}
    end_job(job, JOBS, directory, report)


def train(job, directory):
    _, _, num_batches = JOBS[job]
    ds = pipeline(Flaky(directory.name == "many in a call"), decode).shard_to(
        data_mesh(), on_bad_record="mask", timeout_s=30
    )
    rows = []
    with iter(ds) as iterator:
        if job:
            restore("manager", directory, 0, iterator)
        for batch in iterator:
            rows.append(whole(batch))
            if len(rows) == num_batches:
                save("manager", directory, 0, iterator)
                break
        counts = iterator.stats().faults
    return {
        "batches": [{name: leaf.tolist() for name, leaf in batch.items()} for batch in rows],
        "retries": counts.retries,
        "listed": [(one.record, one.error) for one in counts.listed],
    }


@pytest.fixture(scope="module")
def all_reports(tmp_path_factory):
    """The reports of each host of each job."""
    return run_jobs(run_job, JOBS, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_good_record_once_where_it_belongs_and_the_bad_ones_masked(all_reports, kind):
    reports = [[of_host[kind] for of_host in of_hosts] for of_hosts in all_reports]
    for of_hosts in reports:
        assert all(report["batches"] == of_hosts[0]["batches"] for report in of_hosts)
    got = [batch for of_hosts in reports for batch in of_hosts[0]["batches"]]
    expected = list(pipeline(np.arange(NUM_RECORDS), np.int32))
    assert len(reports[0][0]["batches"]) == BATCHES_BEFORE
    assert len(got) == len(expected)
    for batch, wanted in zip(got, expected, strict=True):
        mask = np.array(batch["valid_mask"])
        is_good = ~np.isin(wanted["id"], list(BAD))
        exist = len(is_good)  # the last batch is short
        np.testing.assert_array_equal(mask[:exist], is_good)
        assert not mask[exist:].any()
        for name, leaf in wanted.items():
            here = np.array(batch[name], leaf.dtype)
            np.testing.assert_array_equal(here[mask], leaf[is_good])
            assert not here[~mask].any()
    listed = {tuple(one) for of_hosts in reports for report in of_hosts for one in report["listed"]}
    order = np.concatenate([batch["id"] for batch in expected]).tolist()
    assert {order[record] for record, _ in listed} == BAD
    for record, error in listed:
        i = order[record]
        odd = f"LookupError: {i} has no image" in error
        assert odd if i in UNDECODABLE else f"ValueError: the checksum of {i}" in error
    # What was read ahead of the kill was read again by the next job.
    for of_hosts in reports:
        assert all(report["retries"] > 0 for report in of_hosts)
