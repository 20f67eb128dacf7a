"""Meshes for any number of devices, and logical axes on them."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from grain_shard.errors import ShardingError
from grain_shard.training.meshes import (
    create_1d_mesh,
    create_2d_mesh,
    data_parallel_rules,
    fsdp_rules,
    global_batch_size,
    tensor_parallel_rules,
)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_1d_mesh(num_devices):
    mesh = create_1d_mesh(devices=jax.devices()[:num_devices])
    assert dict(mesh.shape) == {"data": num_devices}
    assert mesh.axis_types == (AxisType.Auto,)


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


def test_2d_mesh_names_the_sizes_that_fit():
    with pytest.raises(ShardingError) as error:
        create_2d_mesh(second_axis_size=3)
    assert str(error.value) == (
        "8 devices do not split into rows of 3.\n  remedy: use a second axis of size 1, 2, 4, 8."
    )


@pytest.mark.parametrize(
    ("data_axis", "expected"), [("data", 256), ("model", 128), (("data", "model"), 512)]
)
def test_global_batch_size(data_axis, expected):
    mesh = create_2d_mesh()
    assert global_batch_size(64, mesh, data_axis) == expected


def test_global_batch_size_on_a_mesh_without_that_axis():
    with pytest.raises(ShardingError, match="'batch' does not exist") as error:
        global_batch_size(64, create_2d_mesh(), "batch")
    assert error.value.remedy == "use one of 'data', 'model'."


@pytest.mark.parametrize(
    ("rules", "up", "down", "embedding"),
    [
        (data_parallel_rules(), P(None, None), P(None, None), P(None, None)),
        (fsdp_rules(), P("data", None), P(None, "data"), P(None, "data")),
        (
            tensor_parallel_rules(),
            P(None, "model"),
            P("model", None),
            P("model", None),
        ),
    ],
)
def test_rules(rules, up, down, embedding):
    assert P(*rules("data", None)) == P("data", None)
    assert P(*rules("embed", "mlp")) == up
    assert P(*rules("mlp", "embed")) == down
    assert P(*rules("vocab", "embed")) == embedding


def test_a_mesh_axis_goes_to_the_first_dim_that_it_is_for():
    assert fsdp_rules()("data", "embed") == ("data", None)
    assert fsdp_rules()("embed", "data", None) == ("data", None, None)


def test_rules_combine():
    rules = dataclasses.replace(tensor_parallel_rules(), embed="data")
    assert rules("embed", "heads") == ("data", "model")


def test_rules_list_the_logical_axes():
    with pytest.raises(
        ValueError, match=r"'mpl' is not a logical axis; they are \['data', 'embed'"
    ):
        fsdp_rules()("embed", "mpl")
