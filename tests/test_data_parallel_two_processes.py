"""The data-parallel functions on two processes of two devices each.

The test starts this file twice, as ``python -m tests.test_data_parallel_two_processes``.
"""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Sharding

from grain_shard.training import (
    create_data_parallel_sharding,
    data_parallel_train_step,
    place_batch_on_shards,
    place_model_state_on_shards,
)

OPTIMIZER = optax.adam(0.1)
WAYS = ["replicate", "fsdp", "not placed"]


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def losses(mesh, way):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": np.ones((8, 4), np.float32)}
    params = {"w": np.eye(4, dtype=np.float32)}
    state = (params, OPTIMIZER.init(params))
    if way != "not placed":
        state = place_model_state_on_shards(state, mesh, way)
    for _ in range(3):
        state, metrics = data_parallel_train_step(loss_fn, OPTIMIZER, batch, state)
        yield float(metrics["loss"])


def check_placement(mesh):
    host_data = {"x": np.arange(8), "y": jnp.arange(8)}
    placed = place_batch_on_shards(host_data, create_data_parallel_sharding(mesh))
    for leaf in placed.values():
        assert leaf.shape == (8,)
        mine = np.concatenate([shard.data for shard in leaf.addressable_shards])
        assert mine.tolist() == [4 * jax.process_index() + i for i in range(4)]
    state = place_model_state_on_shards({"key": jax.random.key(7), "step": 3}, mesh)
    assert state["key"].sharding.is_fully_replicated
    assert jax.random.key_data(state["key"].addressable_data(0)).tolist() == [0, 7]


def refuse_collective_device_put():
    device_put = jax.device_put

    def checked(x, device=None, **kwargs):
        host_data = not isinstance(x, jax.Array) or x.is_fully_addressable
        spans_processes = isinstance(device, Sharding) and not device.is_fully_addressable
        assert not (host_data and spans_processes), "device_put would compare x across processes"
        return device_put(x, device, **kwargs)

    jax.device_put = checked


@pytest.mark.slow
def test_host_data_is_placed_without_a_collective_and_losses_are_those_of_one_device():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        address = f"localhost:{server.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.test_data_parallel_two_processes", address, str(i)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = list(losses(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), "replicate"))
    for process, (output, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error
        lines = [line.split(": ") for line in output.splitlines() if line.startswith("losses ")]
        assert [name for name, _ in lines] == [f"losses {way}" for way in WAYS]
        for _, numbers in lines:
            np.testing.assert_allclose(
                [float(number) for number in numbers.split()], expected, rtol=1e-6
            )


def main(address, process_index):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(address, num_processes=2, process_id=int(process_index))
    refuse_collective_device_put()
    mesh = jax.make_mesh((4,), ("data",))
    check_placement(mesh)
    for way in WAYS:
        print(f"losses {way}:", *losses(mesh, way))


if __name__ == "__main__":
    main(*sys.argv[1:])
