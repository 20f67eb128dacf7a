"""Meshes for any number of devices, and logical axes on them."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from grain_shard.errors import ShardingError
from grain_shard.training import (
    MeshRules,
    create_1d_mesh,
    create_2d_mesh,
    create_data_parallel_sharding,
    create_named_sharding,
    data_parallel_rules,
    fsdp_rules,
    global_batch_size,
    partition_spec_for_names,
)

TENSOR_PARALLEL = MeshRules(data="data", mlp="model", heads="model")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_1d_mesh(num_devices):
    devices = jax.devices()[:num_devices]
    mesh = create_1d_mesh(devices=devices)
    assert dict(mesh.shape) == {"data": num_devices}
    assert mesh.axis_types == (AxisType.Auto,)
    assert dict(create_1d_mesh("model", devices).shape) == {"model": num_devices}


@pytest.mark.parametrize(
    ("num_devices", "shape"),
    [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (2, 2)), (6, (3, 2)), (7, (7, 1)), (8, (4, 2))],
)
def test_defect_in_seed_001_2d_mesh_fits_four_devices_only(num_devices, shape):
    mesh = create_2d_mesh(devices=jax.devices()[:num_devices])
    assert (mesh.shape["data"], mesh.shape["model"]) == shape


def test_2d_mesh_with_a_given_second_axis():
    mesh = create_2d_mesh(("data", "fsdp"), second_axis_size=8)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8}
    with pytest.raises(ShardingError) as error:
        create_2d_mesh(second_axis_size=3)
    assert str(error.value) == (
        "8 devices do not split into rows of 3.\n"
        "  remedy: pass second_axis_size as one of 1, 2, 4, 8."
    )


def test_global_batch_size():
    mesh = create_2d_mesh()
    assert global_batch_size(64, mesh, "data") == 256
    assert global_batch_size(64, mesh, "model") == 128
    assert global_batch_size(64, mesh, ("data", "model")) == 512


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: global_batch_size(64, mesh, "batch"),
        lambda mesh: create_named_sharding(mesh, "data", "batch"),
        lambda mesh: create_data_parallel_sharding(mesh, "batch"),
    ],
)
def test_an_axis_that_the_mesh_does_not_have(use):
    with pytest.raises(ShardingError, match="'batch', which does not exist") as error:
        use(create_2d_mesh())
    assert error.value.remedy == "name an axis of the mesh ('data', 'model'), or leave 'batch' out."
    assert "data=4, model=2" in str(error.value)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_rows_are_split_over_the_data_axis_or_several(num_devices):
    sharding = create_data_parallel_sharding(create_1d_mesh(devices=jax.devices()[:num_devices]))
    assert sharding.spec == P("data")
    assert sharding.shard_shape((16, 3)) == (16 // num_devices, 3)
    both = create_data_parallel_sharding(create_2d_mesh(), ("data", "model"))
    assert both.spec == P(("data", "model"))


def test_named_sharding():
    mesh = create_2d_mesh()
    assert create_named_sharding(mesh).is_fully_replicated
    assert create_named_sharding(mesh, None, ("data", "model")).shard_shape((3, 16)) == (3, 2)


@pytest.mark.parametrize(
    ("rules", "up", "down"),
    [
        (data_parallel_rules(), P(None, None), P(None, None)),
        (fsdp_rules(), P("data", None), P(None, "data")),
        (fsdp_rules(model_axis="model"), P("model", None), P("model", None)),
        (TENSOR_PARALLEL, P(None, "model"), P("model", None)),
    ],
)
def test_rules(rules, up, down):
    assert partition_spec_for_names(rules, "data", None) == P("data", None)
    assert partition_spec_for_names(rules, "embed", "mlp") == P(*rules("embed", "mlp")) == up
    assert partition_spec_for_names(rules, "mlp", "embed") == P(*rules("mlp", "embed")) == down


def test_defect_in_peer_fsdp_rules_with_a_model_axis_name_it_twice():
    mesh, rules = create_2d_mesh(), fsdp_rules(data_axis="data", model_axis="model")
    assert partition_spec_for_names(rules, "data", "embed") == P("data", "model")
    sharding = create_named_sharding(mesh, *rules("embed", "mlp"))
    assert sharding.shard_shape((8, 16)) == (4, 16)


def test_a_mesh_axis_goes_to_the_first_dim_that_it_is_for():
    assert fsdp_rules()("data", "embed") == ("data", None)
    assert fsdp_rules()("embed", "data", None) == ("data", None, None)
    rules = dataclasses.replace(TENSOR_PARALLEL, embed="data")
    assert rules("embed", "heads") == ("data", "model")


def test_rules_list_the_logical_axes():
    said = r"'mpl' is not a logical axis: use one of \['data', 'embed'"
    with pytest.raises(ValueError, match=said):
        fsdp_rules()("embed", "mpl")
