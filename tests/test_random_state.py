"""The state of `random` and of `np.random` is the user's: nothing of this package changes it."""

import random

import grain
import numpy as np
import pytest

from tests.conftest import data_mesh
from tests.counting_source import Source
from tests.pipelines import shared_out
from tests.programs import run

KINDS = {
    "random access": lambda records: records.batch(4),
    "feeds": lambda records: shared_out(records, 2, 4),
}


def twice_away(index, number):
    """Record 5 is read at the third try."""
    if index == 5 and number <= 2:
        raise ConnectionResetError("record 5")


def seed():
    random.seed(7)
    np.random.seed(7)


def draws():
    return random.random(), random.getrandbits(32), np.random.rand(3).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_two_retried_reads_leave_the_next_draws_of_the_loop_as_they_are(kind):
    seed()
    expected = draws()
    records = grain.MapDataset.source(Source(16, twice_away)).map(lambda i: {"id": i})
    seed()
    with iter(KINDS[kind](records).shard_to(data_mesh(2))) as batches:
        list(batches)
        assert batches.stats().faults.retries == 2
    assert draws() == expected


# JAX draws from `np.random` when it is imported, so the imports of JAX and Grain come first.
USES = """\
import random, sys
import grain, jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
assert not {"grain_shard", "rich"} & set(sys.modules)

def states():
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest

before = states()
def unchanged(use):
    assert states() == before, f"{use} changes the state"
    print(use)

import grain_shard
unchanged("import")
mesh = jax.make_mesh((2,), ("data",))
records = grain.MapDataset.range(64).seed(1).shuffle().map(lambda i: {"id": i})
ds = records.batch(8).shard_to(mesh)
list(ds)
unchanged("iterate")
grain_shard.show(ds)
unchanged("show")
grain_shard.plan(mesh, global_batch_size=8, num_records=64)
unchanged("plan")
grain_shard.profile(ds, num_batches=4, warmup=1)
unchanged("profile")

def make_feed(feed):
    return records[feed.shard_index :: feed.shard_count].to_iter_dataset()

with iter(grain_shard.feeds(make_feed, num_feeds=2).batch(8).shard_to(mesh)) as batches:
    next(batches)
    batches.set_state(batches.get_state())
    list(batches)
unchanged("feeds")
for module in (grain_shard, *map(grain_shard.__getattr__, sys.argv[1:])):
    for name in dir(module):
        getattr(module, name)
        unchanged(f"{module.__name__}.{name}")
"""


@pytest.mark.slow
def test_no_import_and_no_use_of_a_public_face_changes_it(tmp_path):
    modules = ["checkpoint", "measuring", "placement", "rehearse", "training"]
    exit_code, out, err = run(USES, tmp_path / "uses.py", *modules)
    assert exit_code == 0, err
    assert {"show", "feeds", "grain_shard.show", "grain_shard.training.MeshRules"} <= {
        *out.split("\n")
    }
