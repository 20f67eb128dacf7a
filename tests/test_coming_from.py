"""Every row of the tables of docs/coming_from.md is kept by a test.

A test is registered under the beginning of the row's left cell: here, where the row alone makes
the promise, or in `ELSEWHERE`, where the promise is one of the package's own. A row without a test
fails, and so does a test without a row.
"""

import enum
import inspect
import re
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import grain_shard
import grain_shard.placement
import grain_shard.training
from grain_shard.placement import distribute_batch
from tests.conftest import ids, numbered

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "coming_from.md").read_text()

HEADS = {"datarax and substrax", "PyTorch", "tf.data", "Grain"}
# The table of names, up to the next blank line.
NAMES = PAGE[PAGE.index("| names of |") :].partition("\n\n")[0].splitlines()

TESTS = {}

# By the test that keeps them, the rows that promise no more than the package does anyway.
ELSEWHERE = {
    "test_contract.py: test_every_record_is_in_exactly_one_valid_row": (
        "`Pipeline(source, stages, batch_size)`",
        "`JaxProcessSharderModule`",
        "`DataLoader(batch_size=per_gpu)`",
        "the last batch repeats samples",
        "`drop_last=True`",
        "`batch(global_batch_size, drop_remainder=True)`",
        "`DistributedSampler(dataset",
        "`dataset.shard(num_hosts",
        "`.batch(per_host)`",
    ),
    "test_hosts_streams.py: test_hosts_with_streams_stop_together_and_lose_or_repeat_nothing": (
        "`ShardByJaxProcess()` on the source",
    ),
    "test_changing_runs.py: TestEpochs": ("`for epoch in range(n)",),
    "test_check.py: test_a_fault_is_named_with_its_source_or_function_and_its_leaf": (
        "random augmentation in",
    ),
    "test_contract.py: TestState": ("a sampler's state",),
    "test_contract.py: test_concatenated_valid_rows_are_the_records_in_order": (
        "`experimental_distribute_dataset`",
        "`grain.DataLoader(source, sampler, operations)`",
        "`jax.make_array_from_process_local_data`",
    ),
    "test_workers.py: TestTheSameAsWithout": (
        "`num_workers=8`",
        "`.mp_prefetch(MultiprocessingOptions(8))`",
    ),
    "test_workers.py: test_the_same_processes_make_the_batches_of_all_epochs": (
        "`persistent_workers=True`",
    ),
    "test_from_iterable.py: test_a_loaders_batches_are_padded_masked_and_placed": (
        "`for batch in loader`",
    ),
    "test_transforms.py: test_grains_own_acceptance_test_passes": (
        "`assert_equal_output_after_checkpoint(ds)`",
    ),
    "test_transforms.py: TestPlaces": ("`grain.experimental.device_put(ds, sharding)`",),
    "test_placement.py: TestShardBatchDim": ("`placement.shard_batch_dim`",),
    "test_placement.py: TestPrefetch": ("after `close`",),
    "test_placement.py: TestPrefetchState": ("`prefetch_to_device` has no state",),
    "test_meshes.py: test_2d_mesh_with_a_given_second_axis": ("`.create_hybrid_mesh(4, 2)`",),
    "test_meshes.py: test_1d_mesh": ("`.create_data_parallel_mesh()`",),
    "test_meshes.py: test_rules": ("`fsdp_rules()`",),
    "test_place_state.py: test_by_path": ("`DataParallelStrategy`",),
    "test_placement.py: TestDevices": ("`detect_devices()`",),
    "test_hosts_elastic.py: test_killed_and_resumed_with_other_hosts_and_sizes_it_is_one_run": (
        "`grain.checkpoint.CheckpointSave(it)`",
        "`IteratorCheckpoint(folder)",
    ),
}


def row(*beginnings):
    def register(test):
        TESTS.update(dict.fromkeys(beginnings, test))
        return test

    return register


def rows_of_the_page():
    """The left cells of all tables, but that of names."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ")[0] for line in lines if line not in NAMES]
    return [cell for cell in cells if cell not in HEADS]


@row("`Dataset`, `collate_fn`")
def a_map_style_dataset_is_a_source_and_a_map_pads_its_records(mesh):
    class Dataset:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return {"id": index, "tokens": np.arange(index)}

    def padded(record):
        return record | {"tokens": np.resize(record["tokens"], 20)}

    ds = grain.MapDataset.source(Dataset()).map(padded).batch(8).shard_to(mesh)
    assert [i for batch in ids(ds) for i in batch] == list(range(20))


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


def table_of_names():
    """The names that are kept, by module."""
    rows = [line.strip("| ").split("|") for line in NAMES[2:]]
    return {module.strip(" `"): re.findall(r"`(\w+)`", kept) for module, kept in rows}


# The page leaves them out. A name that is neither here nor on the page is new in their package.
NOT_KEPT = {
    "substrax.devices": "DeviceInfo DeviceKind DeviceLike detect_devices visible_devices",
    "substrax.mesh": "DataParallelStrategy DeviceMeshManager FSDPStrategy MultiDimensionalStrategy"
    " ParallelismConfig PipelineParallelStrategy ShardingConfig ShardingStrategy"
    " TensorParallelStrategy",
    "substrax.spmd": "all_gather collect_from_devices reduce_custom reduce_max reduce_mean"
    " reduce_mean_collective reduce_min reduce_sum reduce_sum_collective",
    "datarax.sharding": "JaxProcessSharderConfig JaxProcessSharderModule",
}


class TestNamesOfDataraxAndSubstrax:
    @pytest.mark.parametrize("module", table_of_names() | NOT_KEPT)
    def test_the_table_has_those_of_the_installed_package(self, module):
        theirs = set(pytest.importorskip(module, exc_type=ImportError).__all__)
        kept = table_of_names().get(module, [])
        assert set(kept) <= theirs
        if module in NOT_KEPT:
            assert sorted(kept + NOT_KEPT[module].split()) == sorted(theirs)

    @pytest.mark.parametrize("module", table_of_names())
    def test_what_is_kept_takes_their_arguments_in_their_order(self, module):
        theirs = pytest.importorskip(module, exc_type=ImportError)
        for name in table_of_names()[module]:
            pairs = [(getattr(theirs, name), ours_of(name))]
            pairs += [
                (method, getattr(ours_of(name), attribute))
                for attribute, method in vars(pairs[0][0]).items()
                if inspect.isclass(pairs[0][0]) and not attribute.startswith("_")
            ]
            for their, our in pairs:
                if inspect.isroutine(their):
                    kinds, ours = [signature_of(one) for one in (their, our)]
                    assert ours[: len(kinds)] == kinds, (name, their)
                elif isinstance(their, enum.Enum):
                    assert our.value == their.value


OURS = [grain_shard.placement, grain_shard.training]


def ours_of(name):
    return next(getattr(module, name) for module in OURS if name in module.__all__)


def signature_of(function):
    """The kinds of the arguments; the names of those that are passed by name."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [(p.kind, p.name if p.kind == named else "") for p in parameters]


@row("`DeviceMeshManager.create_device_mesh(", "`.get_mesh_info(mesh)`")
def device_mesh(mesh):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    assert (mesh.size, dict(mesh.shape)) == (8, {"data": 4, "model": 2})


@row("`reduce_mean(metrics)`")
def reductions(mesh):
    (batch,) = numbered(6, 8).shard_to(mesh)
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

    specs = {"in_specs": P("data"), "out_specs": (P(), P(), P("data"))}
    reduced = jax.shard_map(reduce, mesh=mesh, **specs, check_vma=False)
    mean, total, gathered = reduced(distribute_batch(np.arange(8.0), mesh))
    assert (float(mean[0]), float(total[0])) == (3.5, 28)
    np.testing.assert_array_equal(np.asarray(gathered)[5], np.arange(8))


@row("`collect_from_devices(metrics)`")
def collected(mesh):
    (batch,) = numbered(8, 8).shard_to(mesh)
    assert [int(x) for x in list(batch["id"])] == list(range(8))


@row("`.to_iter_dataset()`", "`.to_iter_dataset(ReadOptions(8, 32))`")
def read_options(mesh):
    batches = numbered(16, 8)
    assert ids(batches.to_iter_dataset().shard_to(mesh)) == ids(batches.shard_to(mesh))

    def threads_and_buffer(read_options, **options):
        ds = batches.to_iter_dataset(grain.ReadOptions(*read_options)).shard_to(mesh, **options)
        with iter(ds) as iterator:
            next(iterator)
            return str(iterator.stats().read_threads), ds.settings.cpu_buffer_size

    assert threads_and_buffer((8, 32)) == ("8", 32)
    # Grain fills in 16 and 500, so these are no wish.
    assert threads_and_buffer((15, 500)) == ("15", 4)
    assert threads_and_buffer((16, 499))[1] == 499
    assert threads_and_buffer((0, 500)) == ("1", 4)
    assert threads_and_buffer((8, 32), num_threads=2) == ("2", 32)
    assert threads_and_buffer((8, 32), cpu_buffer_size=3) == ("8", 3)
    assert threads_and_buffer((16, 500))[1] == 4
