"""The largest batch that fits, from XLA's accounting of the compiled step."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard.training import estimate_max_batch_size

KB, MB = 2**10, 2**20


def make_batch(batch_size):
    return jax.ShapeDtypeStruct((batch_size, KB), jnp.float32)


def weighted_rows(weights, batch):
    return batch * weights


WEIGHTS = jax.ShapeDtypeStruct((KB,), jnp.float32)  # 4 KB


@pytest.mark.parametrize(
    ("limit", "multiple_of", "expected"),
    [
        # An example is 4 KB of argument and 4 KB of result, the weights are 4 KB more.
        (80 * KB, 1, 9),
        (84 * KB, 1, 10),
        (84 * KB, 8, 8),
        (MB, 1, 127),
        (MB, 8, 120),
        (64 * MB, 8, 8184),
    ],
)
def test_fits_exactly(limit, multiple_of, expected):
    estimate = estimate_max_batch_size(
        weighted_rows, make_batch, WEIGHTS, memory_limit_bytes=limit, multiple_of=multiple_of
    )
    assert estimate == expected


def test_a_step_with_activations_fits_and_a_larger_one_does_not():
    def step(weights, batch):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(batch @ w) @ w)))(weights)

    def held_bytes(batch_size):
        of = jax.jit(step).lower(weights, make_batch(batch_size)).compile().memory_analysis()
        return of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes

    weights = jax.ShapeDtypeStruct((KB, KB), jnp.float32)
    limit = 256 * MB
    estimate = estimate_max_batch_size(step, make_batch, weights, memory_limit_bytes=limit)
    assert held_bytes(estimate) <= limit < held_bytes(int(1.05 * estimate))


def test_donated_arguments_are_counted_once():
    step = jax.jit(weighted_rows, donate_argnums=1)
    kept = estimate_max_batch_size(weighted_rows, make_batch, WEIGHTS, memory_limit_bytes=MB)
    donated = estimate_max_batch_size(step, make_batch, WEIGHTS, memory_limit_bytes=MB)
    assert (kept, donated) == (120, 248)


def test_with_a_sharded_batch_the_result_is_the_global_batch_size(mesh):
    def make_sharded_batch(batch_size):
        sharding = NamedSharding(mesh, P("data"))
        return jax.ShapeDtypeStruct((batch_size, KB), jnp.float32, sharding=sharding)

    weights = jax.ShapeDtypeStruct((KB,), jnp.float32, sharding=NamedSharding(mesh, P()))
    estimate = estimate_max_batch_size(
        weighted_rows, make_sharded_batch, weights, memory_limit_bytes=MB
    )
    assert estimate == 8 * 127


def test_a_step_under_nnx_jit():
    model = nnx.Linear(KB, KB, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        gradients = nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        optimizer.update(model, gradients)

    before = np.asarray(model.kernel.get_value())
    estimate = estimate_max_batch_size(
        step, make_batch, model, optimizer, memory_limit_bytes=64 * MB
    )
    assert 1000 < estimate < 16_000
    np.testing.assert_array_equal(model.kernel.get_value(), before)


def test_a_device_that_tells_its_limit_need_not_be_told(monkeypatch):
    stats = {"bytes_limit": MB, "bytes_in_use": 5}
    device = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert estimate_max_batch_size(weighted_rows, make_batch, WEIGHTS) == 120


@pytest.mark.parametrize(
    ("step", "make", "limit", "problem"),
    [
        # The CPU tells no limit.
        (weighted_rows, make_batch, None, r"kind 'cpu' does not report.*memory_limit_bytes="),
        (
            weighted_rows,
            make_batch,
            KB,
            "With a batch of 8 rows the step takes 69,632 bytes on a device, which has",
        ),
        (weighted_rows, lambda batch_size: make_batch(4), MB, "of the same size"),
        (lambda w, batch: w.sum(), make_batch, MB, "the step does not use the batch"),
        (lambda w, batch: w.sum(), make_batch, 2**30, "the step does not use the batch"),
    ],
)
def test_refusals(step, make, limit, problem):
    with pytest.raises(ValueError, match=problem):
        estimate_max_batch_size(step, make, WEIGHTS, memory_limit_bytes=limit)
