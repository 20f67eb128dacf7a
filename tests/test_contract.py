"""The contract of a random-access pipeline on one host: C1, C2, C3, C5 and C6.

What a host reads, and how small its state is: test_hosts_same_batches.py.

Every test runs with what the package learns from Grain's private attributes, and without it.
"""

import contextlib
import json

import grain
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard import StateError
from tests.conftest import data_mesh, ids, numbered, to_numpy

pytestmark = pytest.mark.usefixtures("hints")


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("num_records", "global_batch_size", "remainder", "expected"),
    [
        (8, 4, "pad", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (10, 4, "pad", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (3, 8, "pad", [[0, 1, 2]]),  # N < B
        (22, 16, "pad", [list(range(16)), list(range(16, 22))]),
        (22, 16, "drop", [list(range(16))]),
        (16, 8, "error", [list(range(8)), list(range(8, 16))]),
    ],
)
def test_every_record_is_in_exactly_one_valid_row(
    hints, num_devices, num_records, global_batch_size, remainder, expected
):
    if hints == "public path only" and num_records < global_batch_size:
        pytest.skip("only Grain's hints tell B if the first batch is a short one")
    if remainder != "pad" and global_batch_size % num_devices:
        pytest.skip("refused; see test_errors.py")
    ds = numbered(num_records, global_batch_size).shard_to(
        data_mesh(num_devices), remainder=remainder
    )
    batches = list(ds)
    assert ids(batches) == expected
    assert len(ds) == len(expected)
    padded = -(-global_batch_size // num_devices) * num_devices
    for batch in batches:
        mask = np.asarray(batch["valid_mask"])
        assert mask.shape == (padded,)
        assert mask.dtype == np.bool_
        assert batch["id"].shape == (padded,)
        assert batch["image"].shape == (padded, 2, 3)
        assert not np.asarray(batch["image"])[~mask].any(), "a padding row is zeros"


def factorizations(num_devices):
    """Every way to lay out the devices on two axes."""
    return [(a, num_devices // a) for a in range(1, num_devices + 1) if num_devices % a == 0]


SPECS = [P("data"), P(("data", "model")), P(("model", "data")), P("model"), P(None, "model"), P()]


@hypothesis.settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_concatenated_valid_rows_are_the_records_in_order(data):
    num_records = data.draw(st.integers(1, 40), label="records")
    global_batch_size = data.draw(st.integers(1, 20), label="B")
    num_devices = data.draw(st.sampled_from([1, 2, 4, 8]), label="devices")
    shape = data.draw(st.sampled_from(factorizations(num_devices)), label="mesh")
    order = data.draw(st.permutations(range(num_devices)), label="device order")
    spec = data.draw(st.sampled_from(SPECS), label="spec")
    remainder = data.draw(st.sampled_from(["pad", "drop"]), label="remainder")
    devices = np.array(jax.devices())[list(order)].reshape(shape)
    mesh = Mesh(devices, ("data", "model"))
    ds = (
        grain.MapDataset.range(num_records)
        .seed(num_records)
        .shuffle()
        .random_map(lambda i, rng: {"id": np.int32(i), "x": rng.normal(size=8)})
    )
    blocks = {
        str(i) for i in NamedSharding(mesh, P(*spec[:1])).devices_indices_map((840,)).values()
    }
    divisor = len(blocks)
    full = num_records // global_batch_size
    if remainder == "drop" and (global_batch_size % divisor or not full):
        return  # refused; see test_errors.py
    sharded = ds.batch(global_batch_size).shard_to(mesh, spec, remainder=remainder)
    batches = [to_numpy(batch) for batch in sharded]
    rows = [row for batch in ids(batches) for row in batch]
    records = list(ds)[: full * global_batch_size if remainder == "drop" else None]
    assert rows == [int(record["id"]) for record in records]
    random = np.concatenate([batch["x"][batch["valid_mask"]] for batch in batches])
    expected = np.stack([record["x"] for record in records])
    np.testing.assert_array_equal(random, expected.astype(np.float32), "as in one process")
    assert len(batches) == len(sharded)
    assert len({jax.tree.map(np.shape, b)["x"] for b in batches}) == 1, "C6: static shapes"


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ds: ds.repeat(2).batch(4), [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]),
        (lambda ds: ds.batch(4).repeat(2), [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]),
        (lambda ds: ds.batch(4, drop_remainder=True).repeat(2), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (lambda ds: ds.batch(2)[1:], [[2, 3], [4]]),
        (lambda ds: ds.batch(2)[::-1], [[4], [2, 3], [0, 1]]),
        (lambda ds: ds[1:4].batch(2), [[1, 2], [3]]),
        (lambda ds: ds.batch(2).seed(1), [[0, 1], [2, 3], [4]]),
        (lambda ds: ds.batch(4).map(lambda b: b), [[0, 1, 2, 3], [4]]),
        (lambda ds: ds.batch(4).to_iter_dataset(), [[0, 1, 2, 3], [4]]),
        (lambda ds: ds.batch(4).to_iter_dataset(grain.ReadOptions(1, 1)), [[0, 1, 2, 3], [4]]),
        (lambda ds: ds.to_iter_dataset().batch(4), [[0, 1, 2, 3], [4]]),
        (
            lambda ds: grain.MapDataset.concatenate([ds, ds]).batch(4),
            [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]],
        ),
        (
            lambda ds: grain.MapDataset.mix([ds, ds], [1, 1]).batch(5),
            [[0, 0, 1, 1, 2], [2, 3, 3, 4, 4]],
        ),
    ],
)
def test_what_stands_around_batch_keeps_its_meaning(hints, build, expected):
    if hints == "public path only" and expected[0] == [4]:
        pytest.skip("only Grain's hints tell B if the first batch is a short one")
    ds = build(_five())
    assert ids(ds.shard_to(data_mesh(2))) == expected


def _five():
    return grain.MapDataset.range(5).map(lambda i: {"id": np.int32(i)})


def test_repeat_after_batch_without_reseeding_repeats_the_first_epoch():
    ds = _five().seed(0).shuffle().batch(2)
    batches = ids(ds.repeat(2, reseed_each_epoch=False).shard_to(data_mesh(2)))
    assert batches[:3] == batches[3:]


def mixed(weights):
    return grain.MapDataset.mix([_five(), _five()], weights).batch(2)


def repeated(**options):
    return _five().repeat(2, **options).batch(2)


def in_windows(window_size):
    window = {"window_size": window_size, "seed": 0}
    return grain.experimental.WindowShuffleMapDataset(_five(), **window).batch(2)


class HuggingFace(list):
    """As much of a `datasets.Dataset` as says what it is: its hash of all that made it."""

    def __init__(self, fingerprint):
        super().__init__({"x": np.int32(i)} for i in range(25))
        self._fingerprint = fingerprint


def hugging_face(fingerprint):
    return grain.MapDataset.source(HuggingFace(fingerprint)).batch(4)


class TestState:
    """C5: one small state, that of the batch that the user last got."""

    @pytest.mark.parametrize("stop_after", [0, 1, 3, 6, 7])
    @pytest.mark.parametrize("into", ["a fresh iterator", "a used iterator", "itself"])
    def test_a_json_round_trip_gives_the_same_continuation(self, stop_after, into):
        ds = numbered(25, 4).shard_to(data_mesh(4))
        expected = [to_numpy(batch) for batch in ds]
        iterator = iter(ds)
        for _ in range(stop_after):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        if into != "itself":
            iterator = iter(ds)
            if into == "a used iterator":
                next(iterator), next(iterator)
        iterator.set_state(state)
        assert iterator.get_state() == state
        rest = [to_numpy(batch) for batch in iterator]
        assert len(rest) == len(expected) - stop_after
        for ours, theirs in zip(rest, expected[stop_after:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)

    def test_it_does_not_depend_on_devices_threads_or_buffers(self):
        saved = iter(numbered(25, 4).shard_to(data_mesh(2), num_threads=1))
        next(saved), next(saved)
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        options = {"num_threads": 4, "cpu_buffer_size": 3, "device_buffer_size": 1}
        with iter(numbered(25, 4).shard_to(mesh, P(("data", "model")), **options)) as restored:
            restored.set_state(saved.get_state())
            assert ids(restored) == ids(saved)

    @pytest.mark.parametrize(
        # The second name is the one without private names of Grain; "" if the change is unseen.
        ("named", "without", "saved", "now"),
        [
            ("records", "source", lambda: numbered(25, 4), lambda: numbered(26, 4)),
            (
                "transforms",
                "transforms",
                lambda: numbered(25, 4),
                lambda: numbered(25, 4).map(lambda b: b),
            ),
            ("seeds", "transforms", lambda: numbered(25, 4), lambda: numbered(25, 4).seed(4)),
            ("transforms", "", lambda: mixed([1, 9]), lambda: mixed([9, 1])),
            ("transforms", "", repeated, lambda: repeated(reseed_each_epoch=False)),
            ("transforms", "", lambda: in_windows(4), lambda: in_windows(8)),
            ("source", "", lambda: hugging_face("7aa4"), lambda: hugging_face("3b2b")),
        ],
        ids=["records", "a map", "a seed", "weights", "reseeding", "window", "Hugging Face"],
    )
    def test_a_state_of_another_pipeline_is_refused_and_says_what_changed(
        self, hints, named, without, saved, now
    ):
        if hints == "public path only":
            named = without
        state = iter(saved().shard_to(data_mesh(2))).get_state()
        iter(saved().shard_to(data_mesh(2))).set_state(state)
        with (
            pytest.raises(StateError, match=rf"\b{named}\b.* changed")
            if named
            else contextlib.nullcontext()
        ):
            iter(now().shard_to(data_mesh(2))).set_state(state)

    def test_a_position_past_the_end_is_refused(self, hints):
        # Only Grain's hints tell records from batches.
        past = {"step": 8} if hints == "public path only" else {"record": 26}
        iterator = iter(numbered(25, 4).shard_to(data_mesh(2)))
        with pytest.raises(StateError, match="remedy"):
            iterator.set_state({**iterator.get_state(), **past})
        assert ids(iterator)[0] == [0, 1, 2, 3], "a refused state changes nothing"

    def test_a_moved_line_of_code_is_not_another_pipeline(self):
        def build(fn):
            return numbered(8, 4).map(fn).shard_to(data_mesh(2))

        def same_name(batch):
            return batch

        first = same_name

        def same_name(batch):
            return batch

        iter(build(same_name)).set_state(iter(build(first)).get_state())


def test_a_step_compiles_once(mesh):
    traces = []

    @jax.jit
    def step(batch):
        traces.append(1)
        return batch["image"].sum()

    for batch in numbered(21, 8).shard_to(mesh):
        step(batch)
    assert len(traces) == 1
