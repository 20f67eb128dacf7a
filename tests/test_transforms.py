"""Each stage alone, the options of `.shard_to`, and the layout that all of them share."""

import dataclasses

import grain
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import (
    BatchLayout,
    DevicePut,
    PadToDivisible,
    ShardBatch,
    ShardingError,
    ShardingTree,
    ValidateBatchSize,
    hosts_mesh,
)
from grain_shard.training import HardwareType
from tests.conftest import data_mesh, ids, numbered, to_numpy


def records(n):
    return grain.MapDataset.range(n).map(lambda i: {"x": np.int32(i)})


def as_map(n, batch, **options):
    return records(n).batch(batch, **options)


def as_iter(n, batch, **options):
    return records(n).to_iter_dataset().batch(batch, **options)


BOTH = pytest.mark.parametrize("build", [as_map, as_iter], ids=["MapDataset", "IterDataset"])


def lists(ds):
    """Every batch as lists, in which True stands out from 1."""
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), dict(b)) for b in ds]


@pytest.mark.filterwarnings("ignore:a batch has rows of padding")
class TestPadToDivisible:
    @BOTH
    @pytest.mark.parametrize(
        ("n", "batch", "pad", "expected"),
        [
            # Of each batch the rows, and how many of them are valid.
            (4, 2, PadToDivisible(2), [([0, 1], 2), ([2, 3], 2)]),
            (5, 3, PadToDivisible(2), [([0, 1, 2, 0], 3), ([3, 4, 0, 0], 2)]),
            (3, 2, PadToDivisible(2, mask_key="real"), [([0, 1], 2), ([2, 0], 1)]),
            (3, 2, PadToDivisible(1, mask_key=None), [([0, 1], 2), ([2, 0], 1)]),
            (3, 3, PadToDivisible(4, pad_value=-1), [([0, 1, 2, -1], 3)]),
            (5, 2, PadToDivisible(2, "drop", None), [([0, 1], 2), ([2, 3], 2)]),
            (4, 2, PadToDivisible(2, "error", None), [([0, 1], 2), ([2, 3], 2)]),
            # Fewer records than one batch: as large as a full one all the same.
            (1, 3, PadToDivisible(2, mask_key=None), [([0, 0, 0, 0], 1)]),
            # To a size of one's own.
            (3, 2, PadToDivisible(2, "pad", None, 3), [([0, 1, 0, 0], 2), ([2, 0, 0, 0], 1)]),
        ],
    )
    def test_table(self, build, n, batch, pad, expected):
        masks = {pad.mask_key} - {None}
        assert lists(build(n, batch).pipe(pad)) == [
            {"x": rows, **{key: [row < valid for row in range(len(rows))] for key in masks}}
            for rows, valid in expected
        ]

    @BOTH
    def test_a_short_batch_that_must_not_be_is_refused(self, build):
        with pytest.raises(ShardingError, match=r"full|fill"):
            list(build(5, 2).pipe(PadToDivisible(2, "error")))


class TestShardBatch:
    @BOTH
    @pytest.mark.parametrize(
        ("divisor", "shards", "expected"),
        [
            (1, (0,), [[0, 1, 2, 3], [4, 5, 6, 7]]),
            (2, (1,), [[2, 3], [6, 7]]),
            (4, (0, 3), [[0, 3], [4, 7]]),
            (4, (0, 1, 2, 3), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ],
    )
    def test_table(self, build, divisor, shards, expected):
        shard = ShardBatch(BatchLayout(divisor, shards))
        assert [b["x"] for b in lists(build(8, 4).pipe(shard))] == expected

    @BOTH
    def test_rows_that_the_shards_do_not_divide_are_refused(self, build):
        with pytest.raises(ShardingError) as refusal:
            list(build(6, 6).pipe(ShardBatch(BatchLayout(4, (0,)))))
        assert str(refusal.value) == (
            "a batch of 6 rows does not split into 4 shards.\n"
            "  remedy: use a batch size of 8, or put PadToDivisible(4) before ShardBatch."
        )

    def test_a_batch_that_must_be_read_whole_is_and_says_so(self):
        ds = records(8).batch(4).map(lambda b: {"x": b["x"] - b["x"].mean()})
        with pytest.warns(UserWarning, match="shards, but reads every row"):
            half = ds.pipe(ShardBatch(BatchLayout(2, (1,))))
        assert [b["x"] for b in lists(half)] == [[0.5, 1.5], [0.5, 1.5]]

    def test_it_takes_slices_and_later_epochs_like_any_map_dataset(self):
        ds = as_map(8, 4).pipe(ShardBatch(BatchLayout(2, (1,))))
        assert [b["x"] for b in lists(ds[1:])] == [[6, 7]]
        assert ds[2]["x"].tolist() == [2, 3]
        assert len(ds) == 2
        assert len(ds[:1]) == 1


class TestValidateBatchSize:
    @BOTH
    def test_lets_what_works_through_unchanged(self, build):
        ds = build(5, 4).pipe(ValidateBatchSize(2, must_divide=True))
        assert lists(ds) == [{"x": [0, 1, 2, 3]}, {"x": [4]}]

    @BOTH
    @pytest.mark.parametrize(("batch", "divisor", "padding"), [(3, 2, 1), (12, 8, 4), (1, 4, 3)])
    def test_refuses_or_names_what_does_not_divide(self, build, batch, divisor, padding, caplog):
        with pytest.raises(ShardingError, match=f"{batch} rows does not split into {divisor}"):
            build(24, batch).pipe(ValidateBatchSize(divisor, must_divide=True))
        build(24, batch).pipe(ValidateBatchSize(divisor))
        assert caplog.messages == [
            f"grain_shard: a batch of {batch} rows does not split into {divisor} shards, so each"
            f" batch gets {padding} more, as padding."
        ]

    @BOTH
    @pytest.mark.parametrize(
        ("batch", "said"), [(64, "below minimum"), (8 * 100, "below critical"), (8 * 512, None)]
    )
    def test_compares_the_rows_of_a_shard_with_the_hardware_if_asked(self, build, batch, said):
        validate = ValidateBatchSize(8, shortfall=HardwareType.TPU_V5E.shortfall)
        if said:
            with pytest.warns(UserWarning, match=f"rows per shard: .*{said}"):
                build(batch, batch).pipe(validate)
        else:
            build(batch, batch).pipe(validate)


STAGES = [
    (ValidateBatchSize(4), {"must_divide": True}),
    (PadToDivisible(4), {"mask_key": None}),
    (ShardBatch(BatchLayout(4, (0, 1))), {"layout": BatchLayout(4, (2, 3))}),
    (DevicePut(ShardingTree.of(data_mesh(2))), {"cpu_buffer_size": 3}),
]


@pytest.mark.parametrize(("stage", "change"), STAGES, ids=[type(s).__name__ for s, _ in STAGES])
class TestValues:
    """A stage is a value, like `grain.transforms.Batch`."""

    def test_it_is_its_options_which_cannot_be_changed(self, stage, change):
        same, other = dataclasses.replace(stage), dataclasses.replace(stage, **change)
        assert (stage, hash(stage)) == (same, hash(same))
        assert stage != other
        ((name, value),) = change.items()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stage, name, 1)
        assert repr(other).startswith(type(stage).__name__ + "(")
        assert f"{name}={value!r}" in repr(other)

    @BOTH
    def test_its_node_is_called_by_its_name_and_is_of_the_same_kind(self, stage, change, build):
        node, name = build(8, 4).pipe(stage), type(stage).__name__
        assert str(node).startswith("<ShardedDataset" if name == "DevicePut" else name)
        assert "object at 0x" not in str(node)
        same_kind = grain.MapDataset if build is as_map else grain.IterDataset
        assert isinstance(node, grain.IterDataset if name == "DevicePut" else same_kind)
        assert len(list(node.map(lambda b: b))) == 2  # and goes on like any of Grain's


CHECKPOINTED = {
    "PadToDivisible, iter of unknown size": lambda: (
        as_iter(22, 4).map(lambda b: b).pipe(PadToDivisible(8, global_batch_size=4))
    ),
    "the chain, map": lambda: as_map(22, 4).shard_to(data_mesh(8)),
    "the chain, iter": lambda: as_iter(22, 4).shard_to(data_mesh(8)),
    "the chain, dropping": lambda: as_iter(22, 4).shard_to(data_mesh(2), remainder="drop"),
    "the chain, shuffled over epochs": lambda: (
        records(10).seed(1).shuffle().repeat(2).batch(4).shard_to(data_mesh(8))
    ),
    "the chain, after packing": lambda: (
        grain.experimental.FirstFitPackIterDataset(
            records(30).to_iter_dataset().map(lambda r: {"x": np.full(r["x"] % 5 + 1, r["x"])}),
            length_struct={"x": 8},
            num_packing_bins=3,
        )
        .map(lambda packed: {"x": packed["x"]})
        .batch(2)
        .shard_to(data_mesh(2))
    ),
}


@pytest.mark.parametrize("build", CHECKPOINTED.values(), ids=CHECKPOINTED.keys())
def test_grains_own_acceptance_test_passes(build):
    grain.experimental.assert_equal_output_after_checkpoint(build().map(to_numpy))


class TestSpecs:
    """Where each leaf's rows live."""

    def place(self, record, mesh, *args, n=8, batch=8, **options):
        ds = grain.MapDataset.range(n).map(record).batch(batch)
        return next(iter(ds.shard_to(mesh, *args, **options)))

    def test_a_tree_prefix_of_specs_and_a_mask_that_lies_like_the_finest_rows(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"))
        specs = {"image": P("data"), "tokens": P("data", "model"), "id": P(("data", "model"))}
        record = {"image": [np.zeros(6), np.zeros((6, 2))], "tokens": np.zeros(10), "id": 0}
        batch = self.place(lambda i: record, mesh, specs, mask_key="real")
        expected = {**specs, "image": [P("data")] * 2, "real": specs["id"]}
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, batch) == expected

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
    def test_a_batch_lies_as_device_put_would_lay_it(self, spec, axis_type):
        """So JAX's tutorial on distributed arrays, and all that computes with them, holds of it."""
        mesh = jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)
        rows = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
        specs = {"x": spec, "y": P(*spec[:1])}
        record = lambda i: {"x": rows[i], "y": rows[i, 0]}  # noqa: E731
        ours = self.place(record, mesh, specs, n=64, batch=64, mask_key=None)["x"]
        theirs = jax.device_put(rows, NamedSharding(mesh, spec))
        assert ours.committed
        assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
        for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert mine.device == other.device
            np.testing.assert_array_equal(mine.data, other.data)

    def test_the_default_is_the_axis_data_or_the_only_one(self):
        for shape, axes, rows in [((2, 4), ("model", "data"), "data"), ((8,), ("rows",), "rows")]:
            batch = self.place(lambda i: {"id": np.int32(i)}, jax.make_mesh(shape, axes))
            assert batch["id"].sharding.spec == P(rows)

    @pytest.mark.parametrize(
        "dtype",
        [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int8, np.uint32, bool],
        ids=lambda dtype: np.dtype(dtype).name,
    )
    def test_dtypes_are_kept(self, mesh, dtype):
        batch = self.place(lambda i: {"x": np.array([i % 2, 1], dtype)}, mesh, n=5)
        assert batch["x"].dtype == np.dtype(dtype)
        rows = np.asarray(batch["x"]).astype(int).tolist()
        assert rows == [[i % 2, 1] for i in range(5)] + [[0, 0]] * 3

    def test_jax_arrays_out_of_map_are_placed_like_any_other(self, mesh):
        batch = self.place(lambda i: {"x": jnp.full(3, i), "s": jnp.float32(i)}, mesh, n=5)
        assert batch["x"][:, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
        assert batch["s"].sharding.spec == P("data")

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)], ids=str)
    def test_records_without_elements(self, mesh, shape):
        batch = self.place(lambda i: {"id": i, "none": np.zeros(shape)}, mesh, n=5)
        assert batch["none"].shape == (8, *shape)


class TestPlaces:
    """What may stand where the mesh stands."""

    @pytest.mark.parametrize("num_devices", [1, 8])
    def test_a_sharding(self, num_devices):
        sharding = NamedSharding(data_mesh(num_devices), P("data"))
        for place in (sharding, sharding.mesh):
            (batch,) = numbered(8, 8).shard_to(place)
            assert ids([batch]) == [list(range(8))]
            assert batch["id"].sharding == sharding


class TestInstallation:
    CLASSES = (grain.MapDataset, grain.IterDataset)

    @pytest.fixture(autouse=True)
    def leaves_it_installed(self):
        yield
        for cls in self.CLASSES:
            if "shard_to" in vars(cls):
                del cls.shard_to
        grain_shard.install()

    def test_twice_is_once(self):
        grain_shard.install()
        grain_shard.install()
        for cls in self.CLASSES:
            assert cls.shard_to is grain_shard.shard_to
        grain_shard.uninstall()
        for cls in self.CLASSES:
            assert not hasattr(cls, "shard_to")
        grain_shard.uninstall()

    def test_the_function_needs_no_installation(self, mesh):
        grain_shard.uninstall()
        assert ids(numbered(8, 8).pipe(grain_shard.shard_to, mesh)) == [list(range(8))]

    @pytest.mark.parametrize("cls", CLASSES)
    def test_a_method_of_that_name_that_is_not_ours_is_left_alone_with_a_warning(self, cls):
        def theirs(self):
            pass

        grain_shard.uninstall()
        cls.shard_to = theirs
        with pytest.warns(UserWarning, match=r"ds\.pipe\(grain_shard\.shard_to, mesh\)") as caught:
            grain_shard.install()
        assert len(caught) == 1
        assert cls.__name__ in str(caught[0].message)
        grain_shard.uninstall()
        assert cls.shard_to is theirs
        (other,) = {*self.CLASSES} - {cls}
        assert not hasattr(other, "shard_to")


class TestDonation:
    @pytest.mark.parametrize("num_devices", [1, 8])
    def test_a_batch_given_away_hurts_no_later_one(self, num_devices):
        step = jax.jit(
            lambda b: jax.tree.map(lambda x: ~x if x.dtype == bool else x * 2 + 1, b),
            donate_argnums=0,
        )
        ds = numbered(80, 8).shard_to(data_mesh(num_devices), device_buffer_size=3)
        for k, batch in enumerate(ds):
            expected = np.arange(8 * k, 8 * k + 8)
            out = step(batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(batch)), "it was donated"
            np.testing.assert_array_equal(out["id"], expected * 2 + 1)
            np.testing.assert_array_equal(out["image"][:, 0, 0], expected * 2 + 1)
            assert not np.asarray(out["valid_mask"]).any()


MESHES = [
    # (axes, spec of one leaf, spec of another leaf)
    ({"data": 8}, P("data"), P()),
    ({"data": 8, "model": 1}, P("data"), P(None, "model")),
    ({"data": 2, "model": 4}, P(("model", "data")), P("model")),
    ({"data": 1, "model": 8}, P("data"), P("model")),
    ({"data": 4, "model": 2}, P("data"), P(("data", "model"))),
    ({"data": 4, "model": 2}, P("model"), P("data")),
    ({"a": 2, "b": 2, "c": 2}, P(("a", "c")), P(("c", "b", "a"))),
    ({"a": 2, "b": 2, "c": 2}, P(None, "b"), P("b", ("a", "c"))),
]


class TestLayout:
    """Against JAX's own word on where the rows of an array live."""

    @hypothesis.settings(deadline=None, max_examples=250)
    @hypothesis.given(data=st.data())
    def test_the_rows_of_every_host_are_those_that_jax_says_its_devices_hold(self, data):
        axes, *specs = data.draw(st.sampled_from(MESHES), label="mesh")
        order = data.draw(st.permutations(range(8)), label="device order")
        devices_per_host = data.draw(st.sampled_from([1, 2, 4, 8]), label="devices per host")
        specs = data.draw(st.sampled_from([specs[:1], specs[1:], specs]), label="leaves")
        hosts = 8 // devices_per_host
        devices = hosts_mesh({"all": 8}, hosts=hosts, devices_per_host=devices_per_host).devices
        mesh = Mesh(devices[list(order)].reshape(tuple(axes.values())), tuple(axes))
        target = ShardingTree.of(mesh, dict(enumerate(specs)))
        layouts = list(target.layouts().values())
        divisor, amplification = layouts[0].divisor, layouts[0].amplification
        size = divisor * data.draw(st.integers(1, 3), label="rows per shard")
        expected = {host: set() for host in range(hosts)}
        for spec in specs:
            shape = (size, *[8] * (len(spec) - 1))
            indices = NamedSharding(mesh, spec).devices_indices_map(shape)
            for device, index in indices.items():
                expected[device.process_index] |= set(range(size)[index[0]])
        for host, layout in enumerate(layouts):
            rows = layout.rows(size).tolist()
            assert rows == sorted(expected[host])
            in_ranges = [row for start, stop in layout.ranges(size) for row in range(start, stop)]
            assert in_ranges == rows
            assert layout.divisor == divisor
            assert layout.num_hosts == hosts
            assert layout.amplification == amplification
            assert layout.global_batch_size(len(rows)) == size
            for row in rows:
                assert rows[layout.host_row(row, size)] == row
        shown = f"num_hosts={hosts}, amplification={amplification:g})"
        assert repr(layouts[0]).endswith(shown)
        assert set().union(*expected.values()) == set(range(size)), "the hosts hold all of it"
        assert amplification == pytest.approx(sum(map(len, expected.values())) / size)

    def test_a_host_without_a_device_in_the_mesh_is_told_so(self):
        devices = hosts_mesh({"data": 8}, hosts=2, devices_per_host=4).devices
        of_host_1 = Mesh(devices[4:], ("data",))
        sharding = NamedSharding(of_host_1, P("data"))
        with pytest.raises(ShardingError, match="host 0 has no device in the mesh"):
            ShardingTree([sharding]).layout()

    def test_the_divisor_is_the_least_that_fits_every_leaf(self):
        mesh = jax.make_mesh((4, 2), ("a", "b"))
        for specs, divisor in [
            ([P()], 1),
            ([P("a")], 4),
            ([P("a"), P("b")], 4),
            ([P("b"), P(None, "a")], 2),
            ([P(("a", "b")), P("b")], 8),
        ]:
            shardings = [NamedSharding(mesh, spec) for spec in specs]
            assert ShardingTree(shardings).layout().divisor == divisor
