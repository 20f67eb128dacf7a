"""What the documents that this package answers to show, as programs of our own that run.

Three documents: datarax's page on device placement, its guide to sharded data loading, and JAX's
tutorial on distributed arrays. Each test stands for one of their code blocks, in the same order,
on 1, 2, 4 and 8 devices; of the tutorial, in `NamedSharding` form, since JAX no longer has the
class that it uses, and on batches that come from `.shard_to`.
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
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard import PadToDivisible
from grain_shard.measuring import measure_throughput
from grain_shard.placement import (
    BatchSizeRecommendation,
    DevicePlacement,
    HardwareType,
    distribute_batch,
    get_batch_size_recommendation,
    place_on_device,
    prefetch_to_device,
)
from grain_shard.training import create_1d_mesh, create_2d_mesh, create_sharded_pipeline


@pytest.fixture(params=[1, 2, 4, 8])
def devices(request):
    return jax.devices()[: request.param]


def images(num_records):
    """Records of an image and a label, by index."""
    return grain.MapDataset.range(num_records).map(
        lambda i: {"image": np.full((4, 4, 3), i, np.float32), "label": np.int32(i % 10)}
    )


class TestDevicePlacementPage:
    def test_first_example(self, devices):
        placement = DevicePlacement()
        data = jnp.ones((16, 8, 8, 3))
        assert placement.place_on_device(data, devices[-1]).devices() == {devices[-1]}
        mesh = Mesh(np.array(devices), axis_names=("data",))
        sharding = NamedSharding(mesh, P("data", None, None, None))
        assert placement.distribute_batch(data, sharding).sharding == sharding

    def test_hardware_types(self):
        documented = {"TPU_V5E", "TPU_V5P", "TPU_V4", "H100", "A100", "V100", "CPU", "UNKNOWN"}
        assert documented <= set(HardwareType.__members__)

    def test_recommendation_fields(self):
        recommendation = BatchSizeRecommendation(1, 3, 2)
        assert recommendation.min_batch_size == 1
        assert recommendation.optimal_batch_size == 3
        assert recommendation.critical_batch_size == 2
        assert recommendation.max_memory_batch_size is None
        assert recommendation.notes == ""

    def test_basic_placement(self, devices):
        placement = DevicePlacement(devices[-1])
        placed = placement.place_on_device({"image": np.ones((16, 8, 8, 3))})
        assert placed["image"].devices() == {devices[-1]}
        assert placement.hardware_type is HardwareType.CPU
        assert placement.num_devices == len(jax.devices())

    @pytest.mark.parametrize(
        ("chip", "sizes"),
        [
            ("TPU_V5E", (64, 256, 240)),
            ("TPU_V5P", (128, 512, 480)),
            ("TPU_V4", (64, 256, 192)),
            ("H100", (64, 320, 298)),
            ("A100", (32, 256, 240)),
            ("V100", (16, 128, 96)),
            ("CPU", (1, 32, 16)),
        ],
    )
    def test_recommendations(self, chip, sizes):
        recommendation = get_batch_size_recommendation(HardwareType[chip])
        assert DevicePlacement().get_batch_size_recommendation(HardwareType[chip]) == recommendation
        assert sizes == (
            recommendation.min_batch_size,
            recommendation.optimal_batch_size,
            recommendation.critical_batch_size,
        )
        assert recommendation.notes
        detected = DevicePlacement().get_batch_size_recommendation()
        assert (
            detected
            == get_batch_size_recommendation()
            == get_batch_size_recommendation(HardwareType.CPU)
        )

    def test_validating_a_batch_size(self):
        placement = DevicePlacement()
        assert placement.validate_batch_size(64) == (True, "Batch size 64 is optimal for cpu.")
        assert placement.validate_batch_size(8, warn_suboptimal=False)[0]

    def test_distributing_over_devices(self, devices):
        mesh = Mesh(np.array(devices).reshape(-1), axis_names=("data",))
        sharding = NamedSharding(mesh, P("data", None, None, None))
        distributed = distribute_batch(jnp.ones((8, 28, 28, 3)), sharding)
        rows = [shard.data.shape[0] for shard in distributed.addressable_shards]
        assert rows == [8 // len(devices)] * len(devices)

    def test_sharding_along_the_batch_dim(self, devices):
        mesh = Mesh(np.array(devices).reshape(-1), axis_names=("data",))
        data = {"images": np.ones((8, 28, 28, 3)), "labels": np.arange(8, dtype=np.int32)}
        sharded = DevicePlacement().shard_batch_dim(data, mesh, batch_axis=0, mesh_axis="data")
        for leaf in sharded.values():
            assert leaf.sharding == NamedSharding(mesh, P("data"))

    def test_replicating(self, devices):
        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        state = (params, optax.adam(1e-3).init(params))
        for leaf in jax.tree.leaves(DevicePlacement().replicate_across_devices(state, devices)):
            assert leaf.sharding.is_fully_replicated
            assert leaf.devices() == set(devices)

    def test_prefetching(self, devices):
        def data_generator():
            for i in range(100):
                yield {"batch": i}

        for placement in (DevicePlacement(), DevicePlacement(devices[-1])):
            prefetched = placement.prefetch_to_device(data_generator(), buffer_size=2)
            for i, batch in enumerate(prefetched):
                assert int(batch["batch"]) == i
                assert batch["batch"].devices() == {placement.default_device}

    def test_device_information(self):
        info = DevicePlacement().get_device_info()
        assert info["num_devices"] == len(info["devices"]) == len(jax.devices())
        assert info["hardware_type"] == "cpu"
        assert info["platforms"] == ["cpu"]

    def test_a_pipeline_of_the_recommended_batch_size(self, devices):
        batch_size = get_batch_size_recommendation().optimal_batch_size
        for batch in images(100).batch(batch_size):
            placed = place_on_device(batch, devices[-1])
            assert placed["image"].shape == (32, 4, 4, 3)
            break
        # And what takes its place: the same, ahead of time, with the tail padded.
        mesh = create_1d_mesh(devices=devices)
        assert [b["image"].shape[0] for b in images(100).batch(batch_size).shard_to(mesh)] == (
            [32] * 4
        )

    def test_the_convenience_functions(self, devices):
        (batch,) = prefetch_to_device([{"x": np.ones(8)}], size=2, device=devices[-1])
        assert batch["x"].devices() == {devices[-1]}


class TestShardingGuide:
    def test_partition_specs(self, devices):
        mesh = create_2d_mesh(devices=devices)
        image = np.ones((8, 4, 4, 8), np.float32)
        for spec in (
            P("data", None, None, None),
            P(None, None, None, None),
            P(None, None, None, "model"),
        ):
            placed = distribute_batch(image, NamedSharding(mesh, spec))
            expected = jax.device_put(image, NamedSharding(mesh, spec))
            assert placed.sharding == expected.sharding
            np.testing.assert_array_equal(placed, image)

    def test_meshes_of_any_number_of_devices(self, devices):
        assert dict(create_1d_mesh(devices=devices).shape) == {"data": len(devices)}
        shapes = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}
        mesh = create_2d_mesh(devices=devices)
        assert mesh.axis_names == ("data", "model")
        assert mesh.devices.shape == shapes[len(devices)]

    @pytest.mark.parametrize("create_mesh", [create_1d_mesh, create_2d_mesh])
    def test_a_pipeline_with_a_batch_size_per_device(self, devices, create_mesh):
        mesh = create_mesh(devices=devices)
        pipeline = create_sharded_pipeline(images(600), mesh, batch_size_per_device=64)
        for batch in pipeline:
            assert batch["image"].shape == (64 * mesh.shape["data"], 4, 4, 3)
            for leaf in batch.values():
                assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), leaf.ndim)
                assert leaf.addressable_shards[0].data.shape[0] == 64

    def test_measuring_throughput(self, devices):
        pipeline = create_sharded_pipeline(images(256), create_1d_mesh(devices=devices), 4)
        throughput = measure_throughput(pipeline, num_batches=50)
        assert throughput.examples_per_second > 0

    @pytest.mark.parametrize("num_rows", [1, 7, 8, 9])
    def test_uneven_batches_keep_every_leaf(self, devices, num_rows):
        padded = images(num_rows).batch(num_rows).pipe(PadToDivisible(len(devices)))[0]
        mesh = create_1d_mesh(devices=devices)
        (sharded,) = images(num_rows).batch(num_rows).shard_to(mesh)
        size = -(-num_rows // len(devices)) * len(devices)
        for batch in (padded, sharded):
            assert set(batch) == {"image", "label", "valid_mask"}
            assert all(leaf.shape[0] == size for leaf in batch.values())
            assert batch["valid_mask"].dtype == np.bool_
            np.testing.assert_array_equal(batch["valid_mask"], np.arange(size) < num_rows)
            np.testing.assert_array_equal(batch["label"][:num_rows], np.arange(num_rows) % 10)

    def test_one_device_is_no_other_program(self, devices):
        mesh = create_1d_mesh(devices=devices)
        labels = [
            np.asarray(batch["label"])[np.asarray(batch["valid_mask"])]
            for batch in images(100).batch(16).shard_to(mesh)
        ]
        np.testing.assert_array_equal(np.concatenate(labels), np.arange(100) % 10)


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

    def test_elementwise_computation_follows_its_data(self, devices):
        x = whole_batch(create_2d_mesh(devices=devices), P("data"))["x"]
        for y in (jnp.sin(x), jnp.copy(x)):
            assert y.sharding.is_equivalent_to(x.sharding, 2)
        np.testing.assert_allclose(jnp.sin(x), np.sin(np.asarray(x)), rtol=1e-6)

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

    def test_uncommitted_arrays_go_where_the_batch_is(self, devices):
        x = whole_batch(create_1d_mesh(devices=devices))["x"]
        for y in (x + jnp.ones_like(x), x + jnp.arange(x.size).reshape(x.shape)):
            assert y.devices() == set(devices)

    @pytest.mark.parametrize("spec", [P("model", "data"), P()])
    def test_sharding_constraints(self, spec):
        mesh = mesh_4x2()
        x = whole_batch(mesh, P("data"))["x"]
        constrained = NamedSharding(mesh, spec)
        y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, constrained))(x)
        assert y.sharding.is_equivalent_to(constrained, 2)
        np.testing.assert_array_equal(y, np.asarray(x) + 1)

    def test_data_parallel_training(self, devices):
        placement, mesh = DevicePlacement(), create_1d_mesh(devices=devices)
        params = placement.replicate_across_devices(new_params(), list(mesh.devices.flat))
        batch = whole_batch(mesh)
        assert len(batch["x"].addressable_shards) == len(devices)
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

    def test_random_numbers_beside_a_sharded_batch(self, devices):
        @jax.jit
        def noisy(key, x):
            return x + jax.random.uniform(key, x.shape)

        x = whole_batch(create_1d_mesh(devices=devices))["x"]
        y = noisy(jax.random.key(42), x)
        assert y.sharding.is_equivalent_to(x.sharding, 2)
        np.testing.assert_array_equal(y, noisy(jax.random.key(42), np.asarray(x)))
