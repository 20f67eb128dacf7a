"""Every row of the tables of docs/coming_from.md is kept by a test.

A test is registered under the beginning of the row's left cell: here, where the row alone makes
the promise, or in `ELSEWHERE`, where the promise is one of the package's own. A row without a test
fails, and so does a test without a row.
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
from jax.sharding import PartitionSpec as P

from grain_shard.placement import distribute_batch
from grain_shard.training import (
    create_1d_mesh,
)

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "coming_from.md").read_text()

TESTS = {}

# By the test that keeps them, the rows that promise no more than the package does anyway.
ELSEWHERE = {
    "test_contract.py: test_every_record_is_in_exactly_one_valid_row": (
        "a short last batch wraps around",
        "`Pipeline(source, batch_size=...)`",
        "`DataLoader(batch_size=per_gpu)`",
        "the last batch repeats samples",
        "`drop_last=True`",
        "`batch(global_batch_size, drop_remainder=True)`",
        "`DistributedSampler(dataset",
        "`dataset.shard(num_hosts",
        "`.batch(per_host)`",
    ),
    "test_hosts_streams.py: test_local_rows_are_those_of_each_hosts_own_slice": (
        "`ShardByJaxProcess()` on the source",
    ),
    "test_changing_runs.py: TestEpochs": ("`for epoch in range(n)",),
    "test_contract.py: TestState": ("a sampler's state",),
    "test_hosts_elastic.py: test_killed_and_resumed_with_other_hosts_and_sizes_it_is_one_run": (
        "`grain.checkpoint.CheckpointSave(it)`",
    ),
    "test_contract.py: test_the_batches_are_grains_own_in_order": (
        "`experimental_distribute_dataset`",
    ),
    "test_contract.py: test_concatenated_valid_rows_are_the_records_in_order": (
        "`grain.DataLoader(source, sampler, operations)`",
    ),
    "test_lifecycle.py: TestMemory": ("`prefetch(AUTOTUNE)`",),
    "test_workers.py: TestTheSameAsWithout": (
        "`num_workers=8`",
        "`.mp_prefetch(MultiprocessingOptions(8))`",
    ),
    "test_from_iterable.py: test_a_loaders_batches_are_padded_masked_and_placed": (
        "`for batch in loader`",
    ),
    "test_transforms.py: TestPlaces": ("`grain.experimental.device_put(ds, sharding)`",),
    "test_placement.py: TestShardBatchDim": ("`placement.shard_batch_dim`",),
    "test_placement.py: TestPrefetch": ("`prefetch_to_device` starts", "after `close`"),
    "test_placement.py: TestPrefetchState": ("it has no state",),
    "test_data_parallel.py: TestDataParallelTrainStep": (
        "`data_parallel_train_step` is",
        "its `state` has",
        "its `loss_fn(variables",
    ),
    "test_data_parallel.py: test_defect_in_peer_gradients_become_scalars": (
        "`reduce_gradient_tree`",
    ),
    "test_place_state.py: test_defect_in_peer_fsdp_replicates": (
        '`place_model_state_on_shards(state, mesh, "fsdp")`',
    ),
    "test_place_state.py: test_by_path": ("with a dict of paths",),
    "test_meshes.py: test_2d_mesh_with_a_given_second_axis": ("`.create_hybrid_mesh(4, 2)`",),
    "test_meshes.py: test_rules": ("`fsdp_rules()`",),
    "test_throughput.py: TestCreateShardedPipeline": ("the guide's `create_sharded_pipeline`",),
}


def row(*beginnings):
    def register(test):
        TESTS.update(dict.fromkeys(beginnings, test))
        return test

    return register


def rows_of_the_page():
    """The left cells of all tables, but that of names."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ")[0] for line in lines]
    heads = {"`datarax.distributed`", "datarax", "PyTorch", "tf.data", "Grain"}
    names = PAGE[PAGE.index("## datarax") : PAGE.index("For each name that is not kept")]
    return [cell for cell in cells if cell not in heads and f"| {cell} |" not in names]


for keeper, beginnings in ELSEWHERE.items():
    row(*beginnings)(lambda mesh, keeper=keeper: assert_defined(keeper))


def assert_defined(keeper):
    file, name = keeper.split(": ")
    assert re.search(rf"(def|class) {name}\b", (HERE / file).read_text()), keeper


@pytest.mark.parametrize("cell", rows_of_the_page())
def test_row(cell, mesh):
    (beginning,) = [beginning for beginning in TESTS if cell.startswith(beginning)]
    TESTS[beginning](mesh)


def test_no_test_is_without_its_row():
    for beginning in TESTS:
        assert any(cell.startswith(beginning) for cell in rows_of_the_page()), beginning


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
        """The first table of the page: the left column's names, by the right column."""
        page = PAGE[PAGE.index("## datarax") :]
        _, first_table, *_ = re.split(r"^\|---\|---\|\n", page, flags=re.MULTILINE)
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

    def test_they_are_those_of_datarax(self):
        datarax = pytest.importorskip("datarax.distributed", exc_type=ImportError)
        assert sorted(datarax.__all__) == DATARAX_NAMES

    @pytest.mark.parametrize("module", ["grain_shard.placement", "grain_shard.training"])
    def test_each_name_that_is_kept_is_there_and_has_an_example(self, module):
        public = importlib.import_module(module)
        assert set(self.table[f"`{module}`"]) <= set(public.__all__)
        for name in public.__all__:
            assert ">>> " in getattr(public, name).__doc__, name


def numbers(count):
    return grain.MapDataset.range(count).map(lambda i: {"id": i})


def ids_of(batches):
    return [np.asarray(b["id"])[np.asarray(b["valid_mask"])].tolist() for b in batches]


# datarax: what JAX has a line for


@row("`DeviceMeshManager.create_device_mesh(")
def device_mesh(mesh):
    assert dict(jax.make_mesh((4, 2), ("data", "model")).shape) == {"data": 4, "model": 2}


@row("`.create_data_parallel_mesh()`")
def data_parallel_mesh(mesh):
    assert dict(create_1d_mesh().shape) == {"data": 8}
    assert dict(create_1d_mesh("model", jax.devices()[:4]).shape) == {"model": 4}


@row("`.get_mesh_info(mesh)`")
def mesh_info(mesh):
    assert (mesh.size, dict(mesh.shape)) == (8, {"data": 8})


@row("`reduce_mean(metrics)`")
def reductions(mesh):
    (batch,) = numbers(6).batch(8).shard_to(mesh)
    with jax.set_mesh(mesh):
        reduced = jax.jit(lambda x: (jnp.mean(x), jnp.sum(x), jnp.max(x), jnp.min(x)))(batch["id"])
        mask = batch["valid_mask"]
        masked = jax.jit(lambda x, mask: jnp.sum(x * mask) / jnp.sum(mask))(batch["id"], mask)
    assert [float(value) for value in reduced] == [15 / 8, 15, 5, 0]
    assert float(masked) == 2.5


@row("`reduce_mean_collective`")
def collectives(mesh):
    def reduce(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.pmean(x, "data"), jax.lax.psum(x, "data"), gathered[None]

    reduced = jax.shard_map(
        reduce, mesh=mesh, in_specs=P("data"), out_specs=(P(), P(), P("data")), check_vma=False
    )
    mean, total, gathered = reduced(distribute_batch(np.arange(8.0), mesh))
    assert (float(mean[0]), float(total[0])) == (3.5, 28)
    np.testing.assert_array_equal(np.asarray(gathered)[5], np.arange(8))


@row("`collect_from_devices(metrics)`")
def collected(mesh):
    (batch,) = numbers(8).batch(8).shard_to(mesh)
    assert [int(x) for x in list(batch["id"])] == list(range(8))


# datarax: what is kept and differs


# PyTorch


# tf.data and Grain


@row("`.to_iter_dataset()`", "`.to_iter_dataset(ReadOptions(8, 32))`")
def read_options(mesh):
    batches = numbers(16).batch(8)
    plain = ids_of(batches.shard_to(mesh))
    assert ids_of(batches.to_iter_dataset().shard_to(mesh)) == plain

    def threads_and_buffer(read_options, **options):
        ds = batches.to_iter_dataset(grain.ReadOptions(*read_options)).shard_to(mesh, **options)
        with iter(ds) as iterator:
            next(iterator)
            return str(iterator.stats().read_threads), ds.settings.cpu_buffer_size

    assert threads_and_buffer((8, 32)) == ("8", 32)
    assert threads_and_buffer((8, 32), num_threads=2) == ("2", 32)
    assert threads_and_buffer((8, 32), cpu_buffer_size=3) == ("8", 3)
    assert threads_and_buffer((16, 500))[1] == 4  # Grain's defaults are no wish


@row("`assert_equal_output_after_checkpoint(ds)`")
def output_after_checkpoint(mesh):
    ds = numbers(30).batch(8).shard_to(mesh)
    with pytest.raises(ValueError, match="truth value"):
        grain.experimental.assert_equal_output_after_checkpoint(ds)
    as_numpy = ds.map(lambda batch: jax.tree.map(np.asarray, batch))
    grain.experimental.assert_equal_output_after_checkpoint(as_numpy)
