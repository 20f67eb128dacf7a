"""JAX's tutorial on distributed arrays, as programs of our own, and the names of datarax.

The tutorial is in `NamedSharding` form, since JAX no longer has the class that it uses, and on
batches that come from `.shard_to`. Code blocks that only compute with placed arrays are JAX's own
matter: a batch lies as `jax.device_put` would lay it. The code blocks of datarax's page on device
placement and of its guide to sharded data loading are in test_placement.py, test_hardware.py,
test_meshes.py and test_throughput.py.
"""

import functools
import importlib
import itertools
import re
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard.placement import DevicePlacement, distribute_batch, place_on_device
from grain_shard.training import create_1d_mesh

# `datarax.distributed.__all__` of datarax 0.1.4.
DATARAX_NAMES = [
    "BatchSizeRecommendation",
    "DeviceMeshManager",
    "DevicePlacement",
    "HardwareType",
    "MeshRules",
    "all_gather",
    "collect_from_devices",
    "create_data_parallel_sharding",
    "create_named_sharding",
    "data_parallel_rules",
    "data_parallel_train_step",
    "distribute_batch",
    "fsdp_rules",
    "get_batch_size_recommendation",
    "partition_spec_for_names",
    "place_batch_on_shards",
    "place_model_state_on_shards",
    "place_nnx_state_on_shards",
    "place_on_device",
    "prefetch_to_device",
    "reduce_custom",
    "reduce_gradient_tree",
    "reduce_gradients_across_devices",
    "reduce_max",
    "reduce_mean",
    "reduce_mean_collective",
    "reduce_min",
    "reduce_sum",
    "reduce_sum_collective",
    "spmd_train_step",
]


class TestNamesOfDatarax:
    @functools.cached_property
    def table(self):
        """The first table of docs/coming_from.md: the left column's names, by the right column."""
        page = Path(__file__).parents[1] / "docs" / "coming_from.md"
        _, first_table, *_ = re.split(r"^\|---\|---\|\n", page.read_text(), flags=re.MULTILINE)
        rows = re.findall(r"^\| (.+) \| (.+) \|$", first_table, re.MULTILINE)[:3]
        return {right: re.findall(r"`(\w+)`", left) for left, right in rows}

    def test_the_table_has_each_name_once(self):
        assert list(self.table) == [
            "`grain_shard.placement`",
            "`grain_shard.training`",
            "not taken over",
        ]
        assert sorted(itertools.chain(*self.table.values())) == DATARAX_NAMES
        assert [len(names) for names in self.table.values()] == [7, 13, 10]

    @pytest.mark.parametrize("module", ["grain_shard.placement", "grain_shard.training"])
    def test_each_name_that_is_kept_is_there_and_has_an_example(self, module):
        public = importlib.import_module(module)
        assert set(self.table[f"`{module}`"]) <= set(public.__all__)
        for name in public.__all__:
            assert ">>> " in getattr(public, name).__doc__, name


LAYER_SIZES = [16, 32, 32, 32, 8]
NUM_ROWS = 64
STEP_SIZE = 1e-2


def rows():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(NUM_ROWS, LAYER_SIZES[0])).astype(np.float32)
    targets = rng.normal(size=(NUM_ROWS, LAYER_SIZES[-1])).astype(np.float32)
    return grain.MapDataset.range(NUM_ROWS).map(lambda i: {"x": inputs[i], "y": targets[i]})


def whole_batch(mesh, spec=None):
    """All rows as one batch from `.shard_to`."""
    (batch,) = rows().batch(NUM_ROWS).shard_to(mesh, spec, mask_key=None)
    return batch


def new_params():
    rng = np.random.default_rng(1)
    return [
        (rng.normal(size=(n, m)).astype(np.float32) / n**0.5, np.zeros(m, np.float32))
        for n, m in itertools.pairwise(LAYER_SIZES)
    ]


def loss_fn(params, batch):
    hidden = batch["x"]
    for weights, bias in params[:-1]:
        hidden = jax.nn.relu(hidden @ weights + bias)
    weights, bias = params[-1]
    return jnp.mean(jnp.sum((hidden @ weights + bias - batch["y"]) ** 2, axis=-1))


@jax.jit
def train_step(params, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, gradients), loss


def losses_and_params(params, batch):
    losses = []
    for _ in range(30):
        params, loss = train_step(params, batch)
        losses.append(float(loss))
    return losses, params


@functools.cache
def one_device_losses():
    batch = rows().batch(NUM_ROWS)[0]
    losses, _ = losses_and_params(new_params(), place_on_device(batch))
    assert losses[-1] < 0.9 * losses[0], "it learns"
    return losses


def mesh_4x2(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)


class TestDistributedArraysTutorial:
    @pytest.mark.parametrize(
        "spec",
        [
            P("data", "model"),
            P("model", "data"),
            P("data", None),
            P("data"),
            P(None, "model"),
            P(None, "data"),
            P(("data", "model"), None),
            P(("model", "data")),
            P(),
        ],
    )
    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_a_batch_lies_as_device_put_would_lay_it(self, spec, axis_type):
        sharding = NamedSharding(mesh_4x2(axis_type), spec)
        ours = whole_batch(sharding.mesh, {"x": spec, "y": P(*spec[:1])})["x"]
        theirs = jax.device_put(np.stack([row["x"] for row in rows()]), sharding)
        assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
        for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert mine.device == other.device
            np.testing.assert_array_equal(mine.data, other.data)

    def test_a_product_of_rows_and_columns_is_sharded_by_both(self):
        mesh = mesh_4x2()
        x = whole_batch(mesh, P("data"))["x"]
        columns = distribute_batch(np.asarray(x).T, NamedSharding(mesh, P(None, "model")))
        product = jnp.dot(x, columns)
        assert product.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        np.testing.assert_allclose(product, np.asarray(x) @ np.asarray(x).T, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "other", [[4, 5, 6, 7], [0, 1, 3, 2]], ids=["other devices", "another order"]
    )
    def test_explicit_shardings_that_disagree_are_jaxs_error(self, other):
        x = whole_batch(Mesh(np.array(jax.devices()[:4]), ("data",)))["x"]
        y = whole_batch(Mesh(np.array(jax.devices())[other], ("data",)))["x"]
        assert x.committed
        with pytest.raises(ValueError, match="incompatible devices for jitted computation"):
            x + y

    @pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
    def test_data_parallel_training(self, num_devices):
        mesh = create_1d_mesh(devices=jax.devices()[:num_devices])
        devices = list(mesh.devices.flat)
        params = DevicePlacement().replicate_across_devices(new_params(), devices)
        batch = whole_batch(mesh)
        assert len(batch["x"].addressable_shards) == num_devices
        losses, params = losses_and_params(params, batch)
        np.testing.assert_allclose(losses, one_device_losses(), rtol=1e-5)
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))

    def test_data_and_model_parallel_training(self):
        mesh = mesh_4x2()
        whole, by_columns, by_rows, bias = (
            NamedSharding(mesh, spec)
            for spec in (P(), P(None, "model"), P("model", None), P("model"))
        )
        shardings = [(whole, whole), (by_columns, bias), (by_rows, whole), (whole, whole)]
        params = distribute_batch(new_params(), shardings)
        batch = whole_batch(mesh, P("data"))
        assert batch["x"].addressable_shards[0].data.shape == (NUM_ROWS // 4, LAYER_SIZES[0])
        losses, params = losses_and_params(params, batch)
        np.testing.assert_allclose(losses, one_device_losses(), rtol=1e-5)
        for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
