"""`create_sharded_pipeline` on any mesh, and what `profile` promises of its figures.

Where a figure is asserted, the clock is one that the test moves on.
"""

import math
import time

import grain
import jax
import numpy as np
import pytest

from grain_shard import profile
from grain_shard.placement import prefetch_to_device
from grain_shard.spans import STAGES
from grain_shard.training import create_sharded_pipeline
from tests.conftest import data_mesh, ids, numbered, refused
from tests.pipelines import flat


def records(num_records):
    return [{"id": np.int32(i), "image": np.full(3, i, np.float32)} for i in range(num_records)]


class TestCreateShardedPipeline:
    @pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
    def test_every_device_gets_so_many_rows(self, num_devices):
        pipeline = create_sharded_pipeline(records(20), data_mesh(num_devices), 2)
        batches = list(pipeline)
        assert flat(ids(batches)) == list(range(20))
        for batch in batches:
            assert batch["image"].sharding.num_devices == num_devices
            assert batch["image"].addressable_shards[0].data.shape == (2, 3)

    def test_devices_along_another_axis_do_not_count(self):
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        (batch,) = create_sharded_pipeline(records(6), mesh, 3)
        assert batch["image"].shape == (6, 3)

    def test_the_default_is_64_rows_each(self):
        (batch,) = create_sharded_pipeline(records(5), data_mesh(2))
        assert batch["id"].shape == (128,)

    @pytest.mark.parametrize(
        "records",
        [
            grain.MapDataset.source(grain.sources.RangeDataSource(0, 8, 1)),
            grain.MapDataset.range(8).seed(1).shuffle(),
            grain.MapDataset.range(8).to_iter_dataset(),
        ],
    )
    def test_datasets_instead_of_a_source(self, records):
        pipeline = create_sharded_pipeline(records.map(lambda i: {"id": i}), data_mesh(2), 2)
        assert sorted(flat(ids(pipeline))) == list(range(8))

    def test_refusals(self, mesh):
        with refused("batch_size_per_device=0"):
            create_sharded_pipeline(records(8), mesh, 0)
        with refused("no batch"):
            create_sharded_pipeline([], mesh)
        with refused("none of the mesh axes"):
            create_sharded_pipeline(records(8), jax.make_mesh((4, 2), ("x", "y")))


def stream(ds):
    return ds.to_iter_dataset(grain.ReadOptions(1, 1)).map(lambda batch: batch)


# Every kind of iterable of the same batches, and the stages that tell their times.
KINDS = {
    "random access": (lambda ds: ds.shard_to(data_mesh(2)), ["read", "batch", "pad", "place"]),
    "stream": (lambda ds: stream(ds).shard_to(data_mesh(2)), ["read", "pad", "place"]),
    "prefetched": (prefetch_to_device, ["read", "place"]),
    "Grain alone": (stream, []),
}


def assert_finite(throughput):
    names = "examples_per_second", "bytes_per_second", "wait_share", "wait_s", "step_s"
    figures = {name: getattr(throughput, name) for name in names}
    for name, value in {**throughput.lanes_s, **figures}.items():
        assert math.isfinite(value), name
        assert value >= 0, name
    assert 0 <= throughput.wait_share <= 1
    assert "nan" not in str(throughput)


@pytest.fixture
def clock(monkeypatch):
    """Stands still until a test calls it with the seconds that pass."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds, result=None):
        now[0] += seconds
        return result

    return passes


class TestFigures:
    @pytest.mark.parametrize(("kind", "stages"), KINDS.values(), ids=KINDS)
    @pytest.mark.parametrize("step", [None, lambda batch: batch["image"].sum()])
    def test_every_kind_of_dataset_with_and_without_a_step(self, kind, stages, step):
        ds = kind(numbered(80, 4))
        throughput = profile(ds, step, 10, warmup=2)
        assert_finite(throughput)
        counts = (throughput.num_batches, throughput.num_batches_asked, throughput.warmup)
        assert counts == (10, 10, 2)
        assert throughput.examples_per_second > 0
        assert throughput.bytes_per_second > 0
        assert throughput.wait_s > 0
        assert [lane for lane in throughput.lanes_s if lane in STAGES] == stages
        assert (throughput.step_s > 0) == (step is not None)
        if step is None:
            assert throughput.wait_share == 1

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("num_records", "measured", "warmup"), [(4, 1, 0), (12, 1, 2), (20, 1, 4), (32, 3, 5)]
    )
    def test_defect_in_the_guide_few_batches_give_nan(self, kind, num_records, measured, warmup):
        throughput = profile(KINDS[kind][0](numbered(num_records, 4)), warmup=5)
        assert_finite(throughput)
        assert (throughput.num_batches, throughput.warmup) == (measured, warmup)
        assert f"{measured} of 50, then the dataset ended (after {warmup}" in str(throughput)

    @pytest.mark.parametrize("ds", [[], iter(()), grain.MapDataset.range(3)[3:].to_iter_dataset()])
    def test_an_empty_dataset_is_an_error(self, ds):
        with pytest.raises(ValueError, match="has no batch to measure"):
            profile(ds)

    def test_sizes_are_checked(self):
        with refused("num_batches=0"):
            profile([], num_batches=0)
        with refused("warmup=-1"):
            profile([], warmup=-1)

    @pytest.mark.filterwarnings("ignore:a batch has rows of padding and no mask")
    @pytest.mark.parametrize(("mask_key", "examples"), [("valid_mask", 9), ("real", 9), (None, 12)])
    def test_padding_rows_are_bytes_and_with_a_mask_no_examples(self, mask_key, examples, clock):
        # 4 + 4 + 1 rows of 4 + 24 bytes, and one of the mask.
        ds = numbered(9, 4).shard_to(data_mesh(2), mask_key=mask_key)
        throughput = profile(ds, warmup=0, step=lambda batch: clock(2, batch))
        assert throughput.examples_per_second == examples / (3 * 2)
        assert throughput.bytes_per_second == 3 * 4 * (28 + (mask_key is not None)) / (3 * 2)

    def test_the_loop_is_waiting_or_in_the_step(self, clock):
        batches = (clock(3, np.ones((8, 2), np.int8)) for _ in range(100))
        throughput = profile(batches, lambda batch: clock(1, batch), 4, warmup=2)
        assert (throughput.wait_s, throughput.step_s, throughput.wait_share) == (3, 1, 0.75)
        assert throughput.examples_per_second == 8 / 4
        assert throughput.bytes_per_second == 16 / 4

    def test_reading_is_told_from_stacking_padding_and_placing(self, clock):
        ds = grain.MapDataset.range(4 * 12).map(lambda i: clock(1, {"id": np.int32(i)})).batch(4)
        throughput = profile(ds.shard_to(data_mesh(2), num_threads=1), None, 12, warmup=0)
        assert throughput.lanes_s["read"] == 4 * 12  # its thread is the one that moves the clock
        assert not {"batch", "pad"} & set(throughput.lanes_s)
        assert {s.stage for s in throughput.recorded_spans} >= {"read", "batch", "pad", "place"}

    def test_rows_of_a_donated_batch_are_all_counted(self):
        def step(batch):
            batch["valid_mask"].delete()
            return batch["id"]

        assert_finite(profile(numbered(9, 4).shard_to(data_mesh(2)), step=step))

    def test_an_error_in_the_step_leaves_no_thread(self, mesh):
        with pytest.raises(ZeroDivisionError):
            profile(numbered(80, 8).shard_to(mesh), step=lambda batch: 1 / 0)

    def test_an_iterator_is_left_to_its_owner(self, mesh):
        with iter(numbered(80, 8).shard_to(mesh)) as iterator:
            profile(iterator, None, 3, warmup=1)
            assert ids([next(iterator)]) == [list(range(32, 40))]
