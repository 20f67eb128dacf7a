"""Training on several hosts, with collectives in each step: it neither hangs nor loses a record.

And the loss of a host ends the others. How the run goes on then: test_hosts_elastic.py.
"""

import os
import signal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests.conftest import HOSTS_S
from tests.on_hosts import data_mesh, meet, model_over_hosts, part_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS, GLOBAL_BATCH_SIZE = 500, 8
NUM_RECORDS = STEPS * GLOBAL_BATCH_SIZE - 3


def records(num_records):
    return (
        grain.MapDataset.range(num_records)
        .seed(2)
        .shuffle()
        .map(lambda i: {"id": np.int32(i), "x": np.full(64, i, np.float32)})
    )


# On the hosts.


def training_step(mesh):
    """Sums over the global batch, for which the hosts have to meet, and keeps a running total."""

    def step(totals, batch):
        mask = batch["valid_mask"]
        mean = (batch["x"] * mask[:, None]).sum(0) / mask.sum()
        return {
            "steps": totals["steps"] + 1,
            "records": totals["records"] + mask.sum(),
            "ids": totals["ids"] + (batch["id"] * mask).sum(),
            "weights": 0.9 * totals["weights"] + 0.1 * mean,
        }

    replicated = NamedSharding(mesh, P())
    zeros = jax.jit(
        lambda: {
            **{name: jnp.int32(0) for name in ("steps", "records", "ids")},
            "weights": jnp.zeros(64),
        },
        out_shardings=replicated,
    )
    return zeros(), jax.jit(step, out_shardings=replicated)


def train(sharded, mesh):
    totals, step = training_step(mesh)
    for batch in sharded:
        totals = step(totals, batch)
    return {name: np.asarray(total).ravel()[0].item() for name, total in totals.items()}


def train_epochs():
    """Five epochs of data-parallel training, and one under a model axis."""
    ds = records(NUM_RECORDS).batch(GLOBAL_BATCH_SIZE)
    mesh = data_mesh()
    epochs = [train(ds.shard_to(mesh, timeout_s=60), mesh) for _ in range(5)]
    mesh = model_over_hosts()
    epochs.append(train(ds.shard_to(mesh, timeout_s=60), mesh))
    mesh = data_mesh()
    shards = grain_shard.ShardByMesh(mesh)
    own = records(NUM_RECORDS)[part_of(shards)].to_iter_dataset()
    stream = own.filter(lambda record: True).batch(GLOBAL_BATCH_SIZE // shards.shard_count)
    epochs.append(train(stream.shard_to(mesh, rows="local", timeout_s=60), mesh))
    return epochs


def test_500_steps_with_collectives_beside_the_prefetching_do_not_hang_5_times_of_5():
    of_hosts = rehearse.run(train_epochs, hosts=2, devices_per_host=2, timeout_s=HOSTS_S)
    assert of_hosts[0] == of_hosts[1]
    for epoch in of_hosts[0]:
        assert epoch["steps"] == STEPS
        assert epoch["records"] == NUM_RECORDS
        assert epoch["ids"] == sum(range(NUM_RECORDS))
    assert len({epoch["weights"] for epoch in of_hosts[0][:5]}) == 1


# The loss of a host.

TWO_HOSTS = {"hosts": 2, "devices_per_host": 2, "end_others": False}
TRAIN_UNTIL_A_HOST_IS_KILLED = """
import os, signal, sys
import grain, jax
import grain_shard

jax.distributed.initialize(heartbeat_timeout_seconds=20)  # 100 by default
mesh = jax.make_mesh((jax.device_count(),), ("data",))
records = grain.MapDataset.range(4000).map(lambda i: {"id": i})
total = jax.jit(lambda batch: batch["id"].sum())  # a collective
for step, batch in enumerate(records.batch(8).shard_to(mesh)):
    total(batch).block_until_ready()
    if step == 5 and jax.process_index() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
print("the whole epoch")
"""


@pytest.mark.parametrize("killed", [0, 1], ids=["the coordinator", "another"])
def test_a_host_killed_in_mid_epoch_ends_the_other_in_its_collective(tmp_path, killed):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_UNTIL_A_HOST_IS_KILLED)
    result = rehearse.run_script([str(script), str(killed)], **TWO_HOSTS, timeout_s=HOSTS_S)
    assert result.timed_out_hosts == []
    assert result.returncodes[killed] == -signal.SIGKILL
    assert result.returncodes[1 - killed] != 0
    assert "the whole epoch" not in result.outputs[1 - killed]


def read_streams_until_host_1_is_killed():
    """A loop without a collective, where nothing but the agreement can notice."""
    mesh = data_mesh()
    own = records(4000)[part_of(grain_shard.ShardByMesh(mesh))].to_iter_dataset()
    meet("both are here")  # for the first vote of all, a host has only 2 s
    for count, _ in enumerate(own.batch(4).shard_to(mesh, rows="local", timeout_s=2)):
        if jax.process_index() == 1 and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    print("the whole stream", flush=True)


def test_a_host_killed_between_two_batches_of_a_stream_ends_the_other():
    with pytest.raises(rehearse.RehearsalError) as failure:
        rehearse.run(read_streams_until_host_1_is_killed, **TWO_HOSTS, timeout_s=HOSTS_S)
    result = failure.value.result
    assert result.timed_out_hosts == []
    assert result.returncodes[1] == -signal.SIGKILL
    assert result.returncodes[0] != 0
    reasons = "most likely because a host has ended", "host 1 did not answer in time (timeout_s=2)"
    assert any(reason in result.outputs[0] for reason in reasons)
    assert "the whole stream" not in result.outputs[0]


# A CPU that is the only one of its process does not keep to the order in which it is given work.


def of_kind(kind, mesh, num_records=2000):
    def numbers(shards):
        records = grain.MapDataset.range(num_records)[part_of(shards)]
        records = records.map(lambda i: {"x": np.full(128, i % 7, np.float32)})
        return records.to_iter_dataset().filter(lambda record: record["x"][0] != 3)

    if kind == "feeds":
        return grain_shard.feeds(numbers, num_feeds=8).batch(32).shard_to(mesh)
    shards = grain_shard.ShardByMesh(mesh)
    own = numbers(shards).batch(32 // shards.shard_count)
    return own.shard_to(mesh, rows="local")


def train_without_waiting_on_host_1(kind):
    """Host 0 waits for each loss; host 1 gives its devices one step after the other."""
    mesh = data_mesh()
    replicated = NamedSharding(mesh, P())

    def loss_and_gradient(weights, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, P("data")))
        return jax.value_and_grad(lambda weights: jnp.mean((x @ weights) ** 2))(weights)

    step = jax.jit(loss_and_gradient, out_shardings=replicated)
    weights = jax.device_put(np.ones((128, 64), np.float32), replicated)
    losses = []
    for batch in of_kind(kind, mesh):
        step(weights, batch)  # as in a loop that only measures: nobody holds what it returns
        loss, gradient = step(weights, batch)
        weights = weights - 1e-9 * gradient
        losses.append(float(loss) if jax.process_index() == 0 else loss)
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("kind", ["feeds", "stream"])
def test_hosts_with_one_cpu_each_need_not_wait_for_their_steps(kind):
    first, second = rehearse.run(train_without_waiting_on_host_1, kind, hosts=2)
    assert len(first) > 40
    assert first == second
