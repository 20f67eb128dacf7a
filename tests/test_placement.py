"""`DevicePlacement`: every method, and every defect of datarax's that it must not have."""

import json
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from grain_shard import from_iterable, rehearse
from grain_shard.errors import ShardingError, StateError
from grain_shard.placement import (
    DevicePlacement,
    HardwareType,
    distribute_batch,
    place_on_device,
    prefetch_to_device,
)
from grain_shard.training import data_parallel_train_step, place_model_state_on_shards
from tests.conftest import Restorable, background_threads, data_mesh, eventually
from tests.on_hosts import refuse_collective_device_put

NINE_ROWS = "batch['x']: dim 0 has size 9, which is not divisible by mesh axis 'data' (size 8)"


@pytest.fixture(params=[1, 2, 4, 8])
def num_devices(request):
    return request.param


def mixed():
    """Numpy, JAX and Python leaves of several ranks."""
    return {
        "image": np.arange(48, dtype=np.float32).reshape(8, 2, 3),
        "label": jnp.arange(8),
        "step": 3,
        "scale": np.float32(0.5),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(0), 8),
    }


def assert_same_values(placed, data):
    assert jax.tree.structure(placed) == jax.tree.structure(data)
    for ours, theirs in zip(jax.tree.leaves(placed), jax.tree.leaves(data), strict=True):
        assert isinstance(ours, jax.Array)
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_array_equal(ours, theirs)


def refusal(call):
    """The text of the ShardingError that the call raises, with all that the error knows."""
    with pytest.raises(ShardingError) as caught:
        call()
    text, error = str(caught.value), caught.value
    known = {"leaf:": error.leaf, "mesh:": error.mesh_axes, "remedy:": error.remedy}
    assert all(part in text for part, fact in known.items() if fact)
    return text


def values(batches):
    return [np.asarray(batch).tolist() for batch in batches]


class TestDevices:
    def test_nothing_is_looked_up_before_it_is_needed(self, monkeypatch):
        def woken(*args):
            raise AssertionError("starts the backend")

        with monkeypatch.context() as patched:
            for name in ("devices", "local_devices", "device_count", "process_index"):
                patched.setattr(jax, name, woken)
            placement = DevicePlacement()
        assert placement.default_device == jax.local_devices()[0]
        assert placement.hardware_type == HardwareType.CPU
        assert placement.num_devices == 8

    def test_a_default_device_of_ones_own(self):
        placement = DevicePlacement(jax.devices()[3])
        assert placement.place_on_device(np.ones(2)).devices() == {jax.devices()[3]}
        assert next(placement.prefetch_to_device([np.ones(2)])).devices() == {jax.devices()[3]}

    def test_batch_sizes_are_those_for_its_chip(self):
        placement = DevicePlacement()
        assert placement.get_batch_size_recommendation().optimal_batch_size == 32
        assert placement.get_batch_size_recommendation(HardwareType.H100).optimal_batch_size == 320
        valid, words = placement.validate_batch_size(8)
        assert valid
        assert "below critical size 16" in words
        assert "acceptable" in placement.validate_batch_size(8, warn_suboptimal=False)[1]

    def test_device_info_is_plain_json(self):
        info = DevicePlacement().get_device_info()
        assert info == {
            "num_devices": 8,
            "hardware_type": "cpu",
            "platforms": ["cpu"],
            "device_kinds": ["cpu"],
            "devices": [{"id": i, "platform": "cpu", "device_kind": "cpu"} for i in range(8)],
            "process_index": 0,
            "process_count": 1,
            "local_devices": list(range(8)),
            "memory": dict.fromkeys(range(8)),
        }
        json.dumps(info)

    def test_device_info_tells_the_memory_where_the_backend_does(self, monkeypatch):
        figures = {"bytes_in_use": 1, "bytes_limit": 2}
        told = {"memory_stats": lambda: {**figures, "num_allocs": 3}}
        device = SimpleNamespace(id=7, platform="cpu", device_kind="cpu", **told)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        assert DevicePlacement().get_device_info()["memory"] == {7: figures}


class TestPlaceOnDevice:
    @pytest.mark.parametrize("device_index", [0, 7])
    def test_every_kind_of_leaf(self, device_index):
        device = jax.devices()[device_index]
        by_sharding = distribute_batch(mixed(), SingleDeviceSharding(device))
        for placed in (place_on_device(mixed(), device), by_sharding):
            assert_same_values(placed, mixed())
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(placed))
            assert all(leaf.committed for leaf in jax.tree.leaves(placed))

    def test_what_was_sharded_comes_together(self, mesh):
        sharded = jax.device_put(np.arange(8), NamedSharding(mesh, P("data")))
        placed = place_on_device(sharded)
        assert placed.devices() == {jax.devices()[0]}
        assert placed.tolist() == list(range(8))

    def test_trees_without_leaves_and_text_which_stays_on_the_host(self):
        assert place_on_device(()) == ()
        names = np.array(["a", "b"])
        placed = place_on_device({"a": None, "b": 1, "names": names})
        assert placed["a"] is None
        assert placed["b"].tolist() == 1
        assert placed["names"] is names

    def test_python_objects_are_refused(self):
        text = refusal(lambda: place_on_device({"x": [np.ones(2), object()]}))
        assert text.startswith("batch['x'][1]: the class object is neither an array")


class TestDistributeBatch:
    def test_one_spec_for_mixed_ranks(self, num_devices):
        sharding = NamedSharding(data_mesh(num_devices), P("data", None, None))
        placed = distribute_batch(mixed(), sharding)
        assert_same_values(placed, mixed())
        assert {k: v.sharding.spec for k, v in placed.items()} == {
            "image": P("data", None, None),
            "label": P("data"),
            "step": P(),
            "scale": P(),
            "key": P(),
            "keys": P("data"),
        }
        assert distribute_batch(placed, sharding)["image"].sharding == sharding
        rows = [shard.data.shape for shard in placed["image"].addressable_shards]
        assert rows == [(8 // num_devices, 2, 3)] * num_devices

    def test_a_tree_prefix_of_shardings(self, num_devices):
        mesh = data_mesh(num_devices)
        by_rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        data = {"x": {"a": np.ones((8, 2)), "b": np.ones(8)}, "y": np.ones(3)}
        placed = distribute_batch(data, {"x": by_rows, "y": whole})
        assert placed["x"]["a"].sharding == placed["x"]["b"].sharding == by_rows
        assert placed["y"].sharding == whole

    def test_errors_have_four_parts(self, num_devices):
        mesh = data_mesh(num_devices)
        sharding = NamedSharding(mesh, P("data"))
        no_spec = refusal(lambda: distribute_batch({"x": np.ones(8)}, {"y": sharding}))
        assert no_spec.startswith("batch['x']: the leaf has no spec.")
        if num_devices > 1:
            assert refusal(lambda: distribute_batch({"x": np.ones((9, 2))}, sharding)) == (
                f"batch['x']: dim 0 has size 9, which is not divisible by mesh axis 'data'"
                f" (size {num_devices}).\n"
                f"  leaf:   float64[9, 2]   spec: P('data')   mesh: data={num_devices}\n"
                f"  remedy: pad dim 0 to {-(-9 // num_devices) * num_devices} before .batch, or"
                " drop 'data' from this leaf's spec."
            )


@pytest.mark.parametrize("place", [place_on_device, distribute_batch])
def test_no_memory_is_shared_with_the_loaders_buffer(place, mesh):
    # Page-aligned memory, such as Grain's workers return, is what the CPU backend aliases.
    memory = np.zeros(8 * 4096 + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    buffer = memory[start : start + 8 * 4096].reshape(8, 4096)
    onto = jax.devices()[0] if place is place_on_device else NamedSharding(mesh, P("data"))
    placed = place(buffer, onto)
    buffer[:] = 1
    assert int(placed.sum()) == 0


def in_a_train_step(data, mesh):
    def loss_fn(params, batch):
        return jnp.sum(batch["x"]) * params

    sgd = optax.sgd(0.1)
    with jax.set_mesh(mesh):
        data_parallel_train_step(loss_fn, sgd, data, (jnp.ones(()), sgd.init(jnp.ones(()))))


# Whatever places a tree, from a mesh with the axis "data".
PLACERS = {
    "distribute_batch": lambda data, mesh: distribute_batch(data, NamedSharding(mesh, P("data"))),
    "shard_batch_dim": lambda data, mesh: DevicePlacement().shard_batch_dim(data, mesh),
    "replicate_across_devices": lambda data, mesh: DevicePlacement().replicate_across_devices(
        data, list(mesh.devices.flat)
    ),
    "prefetch_to_device": lambda data, mesh: next(prefetch_to_device([data], device=mesh)),
    "place_model_state_on_shards": place_model_state_on_shards,
    "data_parallel_train_step": in_a_train_step,
}


class TestAllPlacersAgree:
    @pytest.mark.parametrize("placer", PLACERS)
    @pytest.mark.parametrize(
        ("leaf", "words"),
        [
            (np.ma.masked_equal(np.arange(8), 3), "the leaf is a masked array"),
            (np.arange(8).astype("datetime64[s]"), "the leaf has a dtype that JAX lacks: date"),
            (np.arange(8).astype(">f4"), "the leaf has a dtype that JAX lacks: >f4"),
            (np.array([None] * 8), "the leaf holds Python objects"),
        ],
        ids=["masked", "datetime64", "big-endian", "objects"],
    )
    def test_what_no_device_can_hold_is_refused(self, placer, leaf, words, mesh):
        text = refusal(lambda: PLACERS[placer]({"x": leaf}, mesh))
        path = "x" if placer == "place_model_state_on_shards" else "batch['x']"
        assert text.startswith(f"{path}: {words}")
        assert f"leaf:   {leaf.dtype}[8]   mesh: data=8" in text

    @pytest.mark.parametrize("placer", [p for p in PLACERS if p != "data_parallel_train_step"])
    def test_text_stays_on_the_host(self, placer, mesh):
        names = np.array(["cat", "dog"])
        placed = PLACERS[placer]({"name": names, "title": "pets", "x": np.ones(8)}, mesh)
        assert isinstance(placed["name"], np.ndarray)
        assert placed["name"].tolist() == ["cat", "dog"]
        assert placed["title"].tolist() == "pets"
        assert placed["x"].devices() == set(mesh.devices.flat)


class TestReplicate:
    def test_every_device_holds_every_leaf(self, num_devices):
        devices = jax.devices()[:num_devices]
        placed = DevicePlacement().replicate_across_devices(mixed(), devices)
        assert_same_values(placed, mixed())
        for leaf in jax.tree.leaves(placed):
            assert leaf.sharding.is_fully_replicated
            assert leaf.devices() == set(devices)

    def test_without_a_mesh_in_use_it_takes_all_devices(self):
        (placed,) = DevicePlacement().replicate_across_devices([1])
        assert placed.sharding.num_devices == 8

    def test_it_goes_with_a_batch_on_the_mesh_in_use(self, axis_type):
        devices = np.array(jax.devices())[[0, 2, 1, 3]].reshape(2, 2)
        mesh = Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)
        placement = DevicePlacement()
        batch = placement.shard_batch_dim(np.ones((4, 3), np.float32), mesh)
        with jax.set_mesh(mesh):
            weights = placement.replicate_across_devices(np.ones((3, 2), np.float32))
        assert weights.sharding.mesh == mesh
        np.testing.assert_array_equal(jax.jit(jnp.dot)(batch, weights), np.full((4, 2), 3))


class TestShardBatchDim:
    def test_defect_in_peer_numpy_leaves_are_left_alone(self, num_devices, axis_type):
        mesh = data_mesh(num_devices, axis_type=axis_type)
        data = {"images": np.ones((8, 28, 28, 3), np.float32), "labels": np.arange(8)}
        placed = DevicePlacement().shard_batch_dim(data, mesh)
        assert_same_values(placed, data)
        for leaf in placed.values():
            assert leaf.sharding == NamedSharding(mesh, P("data"))
            assert leaf.addressable_shards[0].data.shape[0] == 8 // num_devices

    def test_another_dim_and_another_axis(self):
        mesh = jax.make_mesh((2, 4), ("a", "b"))
        data = {"x": np.ones((3, 8, 5)), "y": np.ones(3), "n": 1}
        placed = DevicePlacement().shard_batch_dim(data, mesh, batch_axis=1, mesh_axis="b")
        assert placed["x"].sharding.spec == P(None, "b")
        assert placed["y"].sharding.is_fully_replicated
        assert placed["n"].sharding.is_fully_replicated

    @pytest.mark.parametrize(
        ("rows", "options", "words"),
        [
            (8, {"mesh_axis": "batch"}, "the mesh axis 'batch', which does not exist"),
            (9, {}, NINE_ROWS),
            (8, {"batch_axis": 1}, "the spec has entries for 2 dims, but the leaf has rank 1"),
            (8, {"batch_axis": -1}, "batch_axis=-1"),
        ],
    )
    def test_defect_in_peer_what_does_not_fit_passes(self, mesh, rows, options, words):
        data = {"x": np.ones(rows)}
        text = refusal(lambda: DevicePlacement().shard_batch_dim(data, mesh, **options))
        assert words in text
        assert "data=8" in text or "batch_axis=-1" in text


def stream(ds):
    return ds.to_iter_dataset(grain.ReadOptions(1, 1)).map(lambda batch: batch)


def data_loader():
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 12, 1),
        sampler=grain.samplers.SequentialSampler(12, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(2)],
    )


def pairs():
    return grain.MapDataset.range(12).batch(2)


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
ARRAYS = [np.array(pair) for pair in PAIRS]


WITH_STATE = {
    "MapDataset": pairs,
    "IterDataset": lambda: stream(pairs()),
    "an iterator of Grain's": lambda: iter(stream(pairs())),
    "DataLoader": data_loader,
    "an iterator of DataLoader's": lambda: iter(data_loader()),
    "an iterator with a state": lambda: Restorable(ARRAYS),
}


class TestPrefetch:
    @pytest.mark.parametrize("source", WITH_STATE.values(), ids=WITH_STATE)
    def test_any_source_in_order_to_its_end(self, source):
        iterator = prefetch_to_device(source(), size=1)
        assert values(iterator) == PAIRS
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        iterator.close()
        with pytest.raises(ValueError, match="closed iterator"):
            next(iterator)

    def test_batches_may_differ_in_shape_and_structure(self):
        batches = [np.ones(3), {"x": np.ones((2, 2))}, {}, (1, 2)]
        placed = list(prefetch_to_device(batches))
        assert jax.tree.map(np.shape, placed) == jax.tree.map(np.shape, batches)

    def test_an_element_that_a_filter_dropped_is_skipped(self):
        ds = grain.MapDataset.range(4).filter(lambda i: i != 1)
        assert values(prefetch_to_device(ds)) == [0, 2, 3]
        assert values(prefetch_to_device(ds.to_iter_dataset())) == [0, 2, 3]

    def test_buffer_sizes_are_checked(self):
        assert refusal(lambda: prefetch_to_device([], size=0)).startswith("size=0")
        by_method = DevicePlacement().prefetch_to_device
        assert refusal(lambda: by_method([], buffer_size=0)).startswith("buffer_size=0")
        assert "cpu_buffer_size=0" in refusal(lambda: prefetch_to_device([], cpu_buffer_size=0))

    def test_what_is_not_iterable_is_refused(self):
        with pytest.raises(TypeError, match="not iterable"):
            prefetch_to_device(3)


class TestPrefetchState:
    @pytest.mark.parametrize("source", WITH_STATE.values(), ids=WITH_STATE)
    @pytest.mark.parametrize("stop_after", [0, 2, 6])
    @pytest.mark.parametrize("into", ["a fresh iterator", "a used iterator", "itself"])
    def test_defect_in_peer_resuming_skips_what_was_prefetched(self, source, stop_after, into):
        iterator = prefetch_to_device(source())
        assert values(next(iterator) for _ in range(stop_after)) == PAIRS[:stop_after]
        state = json.loads(json.dumps(iterator.get_state()))
        if into != "itself":
            iterator.close()
            iterator = prefetch_to_device(source())
            if into == "a used iterator":
                next(iterator), next(iterator)
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert values(iterator) == PAIRS[stop_after:]

    @pytest.mark.parametrize("source", WITH_STATE.values(), ids=WITH_STATE)
    def test_a_state_of_something_else_is_refused(self, source):
        with prefetch_to_device(source()) as iterator:
            with pytest.raises(StateError):
                iterator.set_state({"step": 3})
            assert values(iterator) == PAIRS, "a refused state changes nothing"


class TestPrefetchLife:
    def test_it_draws_nothing_before_the_first_next(self):
        drawn = []
        before = background_threads()
        with prefetch_to_device(map(drawn.append, range(3))):
            assert background_threads() == before
        assert drawn == []

    @pytest.mark.parametrize(
        ("size", "cpu_buffer_size", "ahead"), [(2, None, 6), (1, None, 3), (1, 5, 6), (3, 1, 4)]
    )
    def test_defect_in_peer_cpu_buffer_size_is_ignored(self, size, cpu_buffer_size, ahead):
        drawn = []

        def source():
            for i in range(100):
                drawn.append(i)
                yield np.full(2, i)

        with prefetch_to_device(source(), size, cpu_buffer_size=cpu_buffer_size) as iterator:
            for k in range(4):
                next(iterator)
                eventually(lambda: len(drawn) >= k + 1 + ahead)
                assert len(drawn) <= k + 1 + ahead

    def test_an_iterator_with_a_state_is_left_to_its_owner(self):
        source = Restorable(ARRAYS)
        with prefetch_to_device(source) as iterator:
            assert values(iterator) == PAIRS
        assert source.closed == 0

    def test_an_iterator_that_it_made_itself_is_closed(self):
        made = []

        class Source:
            def __iter__(self):
                made.append(Restorable(ARRAYS))
                return made[-1]

        with prefetch_to_device(Source()) as iterator:
            next(iterator)
            iterator.set_state(iterator.get_state())
            assert values(iterator) == PAIRS[1:]
        eventually(lambda: [iterator.closed for iterator in made] == [1, 1])


def on_two_processes():
    """What each of two processes with two devices checks; see `grain_shard.rehearse`."""
    refuse_collective_device_put()
    placement, process = DevicePlacement(), jax.process_index()
    mesh = jax.make_mesh((4,), ("data",))
    mine = [4 * process + i for i in range(4)]

    def local_rows(array):
        assert array.shape == (8,)
        return np.concatenate([shard.data for shard in array.addressable_shards]).tolist()

    assert placement.default_device.process_index == process, "the peer's is host 0's"
    assert placement.place_on_device(np.ones(2)).devices() == {jax.local_devices()[0]}
    other = next(device for device in jax.devices() if device.process_index != process)
    for call in (lambda: DevicePlacement(other), lambda: place_on_device(np.ones(2), other)):
        text = refusal(call)
        assert f"belong to process {1 - process}, so process {process} (this process)" in text

    data = {"host": np.arange(8), "device": jnp.arange(8)}
    by_rows = NamedSharding(mesh, P("data"))
    for placed in (placement.shard_batch_dim(data, mesh), distribute_batch(data, by_rows)):
        assert [local_rows(leaf) for leaf in placed.values()] == [mine, mine]
    replicated = placement.replicate_across_devices({"n": 3, "key": jax.random.key(1)})
    assert all(leaf.sharding.num_devices == 4 for leaf in replicated.values())
    assert jax.random.key_data(replicated["key"].addressable_data(0)).tolist() == [0, 1]

    arrays = from_iterable((np.arange(8) + 10 * i for i in range(3)), rows="global")
    with prefetch_to_device(arrays, device=mesh) as batches:
        for i, batch in enumerate(batches):
            assert local_rows(batch) == [10 * i + row for row in mine]
            assert int(batch.sum()) == 28 + 80 * i, "a collective beside the threads"

    # What is global already.
    array = distribute_batch(np.arange(8), by_rows)
    whole = distribute_batch(array, NamedSharding(mesh, P()))
    assert whole.sharding.is_fully_replicated
    assert whole.addressable_data(0).tolist() == list(range(8))
    again = from_iterable([array], rows="global")
    assert next(prefetch_to_device(again, device=by_rows)).sharding == by_rows
    moving = prefetch_to_device(again, device=NamedSharding(mesh, P()))
    assert "A background thread must not run collectives" in refusal(lambda: next(moving))
    assert "process_allgather" in refusal(lambda: place_on_device(array))

    info = placement.get_device_info()
    return {k: info[k] for k in ("num_devices", "process_index", "process_count", "local_devices")}


@pytest.mark.slow
def test_two_processes():
    infos = rehearse.run(on_two_processes, hosts=2, devices_per_host=2)
    ids = [number for info in infos for number in info.pop("local_devices")]
    assert len(set(ids)) == 4
    assert infos == [{"num_devices": 4, "process_index": i, "process_count": 2} for i in range(2)]
