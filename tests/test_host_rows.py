"""`host_rows`: the batches for a trainer that puts them on the devices itself.

On several hosts: `test_hosts_same_batches.py`. With such a trainer: `tests/clients/keras_fit.py`.
"""

import grain
import jax
import numpy as np
import pytest

from grain_shard import DevicePut, ShardingError, ShardingTree, hosts_mesh
from tests.conftest import data_mesh, ids, numbered
from tests.pipelines import KINDS, assert_same_batches


def of_kind(kind):
    ds = KINDS[kind](lambda i: {"id": np.int32(i), "tokens": np.arange(3) + i})
    return ds.shard_to(data_mesh(4), rows="global" if kind == "stream" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_values_of_the_batches_with_padding_and_mask(kind):
    batches = list(of_kind(kind).host_rows())
    assert {type(leaf) for leaf in jax.tree.leaves(batches)} == {np.ndarray}
    for batch, like in zip(batches, of_kind(kind), strict=True):
        assert batch.keys() == like.keys() == {"id", "tokens", "valid_mask"}
        assert_same_batches([batch], [like | {"tokens": np.asarray(like["tokens"], np.int64)}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_either_goes_on_in_the_other(kind):
    ds = of_kind(kind)
    for first, then in ((ds, ds.host_rows()), (ds.host_rows(), ds)):
        with iter(first) as batches, iter(then) as later:
            next(batches)
            later.set_state(batches.get_state())
            assert ids(later) == ids(batches) != []


def test_a_trainer_gets_them_in_the_form_that_it_wants():
    pairs = list(of_kind("random access").host_rows().map(lambda b: (b["id"], b["valid_mask"])))
    assert [(x.tolist(), mask.tolist()) for x, mask in pairs] == [
        ([0, 1, 2, 3], [True] * 4),
        ([4, 5, 0, 0], [True, True, False, False]),
    ]


def test_epochs_and_lengths_and_shapes_are_those_of_the_rows():
    ds = of_kind("random access").host_rows()
    with ds.epochs(2) as epochs:
        rows = [batch["id"] for epoch in epochs for batch in epoch]
    assert [type(array) for array in rows] == [np.ndarray] * 4
    assert (len(ds), ds.records_per_batch()) == (2, 4)
    assert ds.abstract_batch()["tokens"] == jax.ShapeDtypeStruct((4, 3), np.int64)
    assert repr(ds).endswith("mesh (data=4), on the host>")


def test_values_that_no_device_can_hold_are_refused_as_for_devices():
    ds = grain.MapDataset.range(4).map(lambda i: {"id": i + 2**40}).batch(4)
    for sharded in (ds.shard_to(data_mesh(4)), ds.shard_to(data_mesh(4)).host_rows()):
        with pytest.raises(ShardingError, match="batch\\['id'\\]"):
            next(iter(sharded))


def test_the_last_stage_alone_keeps_the_rows_of_this_host():
    """Without `ShardBatch` a host would put the rows of all hosts on its devices."""
    target = ShardingTree.of(hosts_mesh({"data": 4}, hosts=2, devices_per_host=2))
    batches = numbered(16, 8)
    streamed = batches.to_iter_dataset().map(dict)
    for ds, rows in ((batches, None), (streamed, "global"), (batches, "local")):
        host = ds.pipe(DevicePut(target, rows=rows)).host
        assert host.first()["id"].tolist() == list(range(8 if rows == "local" else 4))
