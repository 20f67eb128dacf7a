"""The first record of a source is compared with that of a restored state, at the first batch."""

import dataclasses
import threading
from collections import UserDict
from pathlib import Path
from types import MappingProxyType

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import grain_shard
from grain_shard import StateError
from grain_shard.digest import element_digest
from grain_shard.reading.first_record import FirstRecord
from tests.conftest import data_mesh, ids
from tests.pipelines import after, flat, going_on, shared_out
from tests.programs import run


class Files:
    """Ten records a file, in this order of the files; `read` gets an index and its record."""

    def __init__(self, order, read=lambda index, record: record):
        self._order, self._read = order, read

    def __len__(self):
        return 10 * len(self._order)

    def __getitem__(self, index):
        return self._read(index, 10 * self._order[index // 10] + index % 10)


def records(source, number=np.int32):
    return grain.MapDataset.source(source).map(lambda element: {"id": number(element)})


def random_access(source, **options):
    return records(source).seed(1).shuffle().batch(8).shard_to(data_mesh(2), **options)


def with_workers(source):
    return random_access(source, num_workers=1)


def feeds(source):
    return shared_out(records(source), 4, 8, grain.ReadOptions()).shard_to(data_mesh(2))


def mixture(source):
    parts = [records(source), records(range(7))]
    return grain_shard.mix(parts, weights={0: [3, 1]}).batch(8).shard_to(data_mesh(2))


def saved(ds):
    _, state = after(ds, 1)
    return state


KINDS = [random_access, feeds, mixture]


@pytest.mark.parametrize(
    "build", [*KINDS, pytest.param(with_workers, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_state_of_another_first_record_is_refused_and_the_remedy_goes_on(build):
    same = random_access if build is with_workers else build
    state = saved(same(Files([0, 1, 2, 3])))
    with iter(build(Files([3, 2, 1, 0]))) as iterator:
        iterator.set_state(state)
        with pytest.raises(StateError, match="sort the list of files") as refused:
            next(iterator)
        assert "  record 0 of the source: saved '" in str(refused.value)
        with pytest.raises(StateError) as again:
            next(iterator)
        assert again.value is refused.value
        iterator.set_state(iterator.get_state())
        assert iterator.get_state()["step"] == state["step"]
        next(iterator)
        assert iterator.get_state()["source"] != state["source"]


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("has_digest", [True, False])
def test_a_state_of_the_same_record_or_without_a_digest_goes_on(build, has_digest):
    source = Files([0, 1, 2, 3])
    state = saved(build(source))
    assert state["source"].count("-") == 1
    if not has_digest:
        state["source"] = state["source"].split("-")[0]
    with iter(build(source)) as iterator:
        iterator.set_state(state)
        assert iterator.get_state() == state
        next(iterator)


def test_epochs_compare_the_record_also_where_the_rest_of_an_epoch_is_skipped():
    with random_access(Files([0, 1, 2, 3])).epochs(3) as epochs:
        next(next(epochs))
        state = epochs.get_state()
    with random_access(Files([3, 2, 1, 0])).epochs(3) as epochs:
        epochs.set_state(state)
        next(epochs)
        with pytest.raises(StateError, match="sort the list of files"):
            next(next(epochs))


def test_seek_goes_on_with_any_records():
    state = saved(random_access(Files([0, 1, 2, 3])))
    with iter(random_access(Files([3, 2, 1, 0]))) as iterator:
        iterator.set_state(state)
        iterator.seek(state["step"])
        next(iterator)


def test_of_a_mixture_the_first_record_of_each_part_counts():
    def mixed(second):
        return grain_shard.mix([records(range(9)), records(second)], weights={0: [3, 1]}).batch(4)

    state = saved(mixed([5, 6]).shard_to(data_mesh(2)))
    with iter(mixed([6, 5]).shard_to(data_mesh(2))) as iterator:
        iterator.set_state(state)
        with pytest.raises(StateError, match="record 0 of the source: saved"):
            next(iterator)


def test_a_first_record_that_cannot_be_read_stops_no_run_that_masks():
    def read(at, record):
        if at == 0:
            raise ValueError("damaged")
        return record

    with iter(random_access(Files([0, 1], read), on_bad_record="mask")) as iterator:
        assert sorted(flat(ids(iterator))) == list(range(1, 20))
        assert "-" not in iterator.get_state()["source"]


@pytest.mark.parametrize("build", KINDS)
def test_the_first_record_is_read_once_more_for_all_epochs_of_a_dataset(build):
    asked = []
    ds = build(Files([0, 1], lambda index, record: asked.append(index) or record))
    assert sum(map(len, ids(ds))) > 7
    in_first_pass = len(asked)
    ids(ds)
    assert in_first_pass == len(asked) - in_first_pass + 1


def test_two_threads_read_the_first_record_once():
    """The loop asks for it once the threads of the pool have been told to stop."""
    reads, others = [], []

    def read(index, record):
        reads.append(index)
        if len(reads) == 1:
            others.append(threading.Thread(target=first_record.run))
            others[0].start()
            others[0].join(0.2)  # it must wait, so this thread cannot wait until it ends
        return record

    first_record = FirstRecord(records(Files([0], read)))
    first_record.run()
    others[0].join()
    assert reads == [0]


def test_a_source_that_is_not_known_is_not_compared():
    class Numbers(grain.MapDataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return self.slice(index) if isinstance(index, slice) else {"id": np.int32(index)}

    ds = Numbers().batch(8).shard_to(data_mesh(2))
    assert "-" not in saved(ds)["source"]


@dataclasses.dataclass
class Pair:
    first: object
    second: object


ELEMENTS = [
    b"abc",
    "abc",
    3,
    3.0,
    None,
    True,
    np.arange(6),
    np.arange(6).reshape(2, 3),
    np.float32(3),
    np.float64(-0.0),
    np.float64(0.0),
    np.frombuffer(bytes([1, 0, 0, 0, 0, 0, 0xF8, 0x7F])),  # a NaN of other bits than the next
    np.array([np.nan]),
    2**70,
    np.arange(6, dtype=np.int8),
    jnp.ones(2),
    np.array(["a", None], object),
    [1, 2],
    [2, 1],
    [[1], [2]],
    np.array(["a", "b"]),
    np.array([b"a", b"b"]),
    np.zeros(1, [("a", "i1"), ("b", "i4")]),
    {"a": 1, "b": [b"x"]},
    {"a": 1, "b": [b"y"]},
    {"u", "v", "w"},
    Pair(1, b"x"),
    Pair(b"x", 1),
    Image.new("RGB", (4, 4)),
    Image.new("L", (4, 4)),
    bytes(3 * 2**20),
    bytes(3 * 2**20 - 1),
]


def digests():
    return [element_digest(element) for element in ELEMENTS]


def test_digests_tell_elements_apart_and_are_the_same_in_every_process(tmp_path):
    assert len(set(digests())) == len(digests())
    script = "from tests.test_first_record import digests; print(*digests())"
    _, out, err = run(script, tmp_path / "program.py")
    assert out.split() == digests(), err


ROWS = np.arange(6, dtype=np.int32).reshape(2, 3)
GAPS = np.frombuffer(bytes(range(8)), np.dtype([("a", "i1"), ("b", "i4")], align=True))
NO_GAPS = np.zeros_like(GAPS)
NO_GAPS["a"], NO_GAPS["b"] = GAPS["a"], GAPS["b"]
SAME = [
    [
        ROWS,
        ROWS.view(np.memmap),
        np.asfortranarray(ROWS),
        jnp.asarray(ROWS),
        np.repeat(ROWS, 2, 1)[:, ::2],
    ],
    [3, np.int64(3), np.array(3), ROWS.astype(np.int64)[1, 0]],
    [0.5, np.float64(0.5), np.array(0.5)],
    [True, np.True_, np.array(True), jnp.array(True)],
    ["abc", np.str_("abc"), np.array("abc"), np.array("abc", "U9"), "/a/abc", Path("/b/abc")],
    [b"abc", np.bytes_(b"abc"), np.array(b"abc")],
    [bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)],
    [[1, b"x"], (1, b"x"), [np.int64(1), np.bytes_(b"x")]],
    [{"a": 1, "b": 2}, UserDict(b=2, a=1), MappingProxyType({"b": np.array(2), "a": 1})],
    [{"first": 1, "second": ()}, Pair(1, [])],
    [{"u", "v"}, frozenset(["v", "u"])],
    [GAPS, NO_GAPS],
]


@pytest.mark.parametrize("elements", SAME)
def test_states_of_the_same_values_in_another_container_are_equal(elements):
    def of(element):
        return saved(records([element] * 2, lambda _: 0).batch(2).shard_to(data_mesh(1)))

    assert all(of(element) == of(elements[0]) for element in elements)
    assert of(elements[0]) != of("other values")


def test_it_is_in_the_state_of_a_run_of_one_batch():
    """The run ends while a thread is about to read the record."""
    ds = records(np.arange(2)).batch(2).shard_to(data_mesh(1))
    assert {saved(ds)["source"].count("-") for _ in range(50)} == {1}


@pytest.mark.parametrize(
    "hold", [list, tuple, np.array, lambda rows: np.array(rows).view(np.memmap)]
)
def test_a_run_goes_on_over_the_same_records_in_another_container(hold):
    def ds(source):
        return records(source).batch(4).shard_to(data_mesh(2))

    _, state = after(ds(np.arange(16, dtype=np.int32)), 2)
    assert flat(going_on(ds(hold(np.arange(16, dtype=np.int32))), state)) == list(range(8, 16))
