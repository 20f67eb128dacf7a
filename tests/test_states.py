"""States from a storage: they go on with the right rows, or are refused by name."""

import collections
import contextlib
import copy
import functools
import itertools
import json
import os
import re
import types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grain_shard import StateError, from_iterable
from grain_shard.checkpoint import CheckpointItem
from tests.conftest import Restorable, data_mesh, ids
from tests.pipelines import shared_out


class Loader:
    """An iterator of a user, whose state has all that a state may have."""

    def __init__(self):
        self.at, self.rng = 0, np.random.Generator(np.random.MT19937(3))

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return {"id": self.at * 1000 + self.rng.permutation(8)}

    def get_state(self):
        rng = self.rng.bit_generator.state
        more = (2.0, 0.1, b"\0\xff", {3: "x", "__tuple__": 5}, np.arange(3), [], None, True)
        return {"at": np.int64(self.at), "rng": rng, "more": more}

    def set_state(self, state):
        *plain, array, empty, none, true = state["more"]
        assert plain == [2.0, 0.1, b"\0\xff", {3: "x", "__tuple__": 5}]
        assert (array.dtype, array.tolist(), empty, none, true) == (int, [0, 1, 2], [], None, True)
        self.at, self.rng.bit_generator.state = state["at"], state["rng"]


def records():
    return grain.MapDataset.range(80).seed(1).shuffle().map(lambda i: {"id": np.int32(i)})


BUILD = {
    "random access": lambda: iter(records().batch(8).shard_to(data_mesh(2))),
    "epochs": lambda: records().batch(8).shard_to(data_mesh(2)).epochs(2),
    "stream": lambda: iter(records().to_iter_dataset().batch(8).shard_to(data_mesh(2))),
    "loader": lambda: iter(from_iterable(Loader()).shard_to(data_mesh(2))),
    "feeds": lambda: iter(shared_out(records(), 4, 8).shard_to(data_mesh(2))),
}
EVERY_KIND = pytest.mark.parametrize("kind", BUILD)


@functools.cache
def saved(kind):
    """A state after three batches, as JSON, and the rows of the next batch."""
    with BUILD[kind]() as iterator:
        batches = next(iterator) if kind == "epochs" else iterator
        for _ in range(3):
            next(batches)
        state = iterator.get_state()
        return json.dumps(state), ids([next(batches)])


def rows_after(kind, state):
    with BUILD[kind]() as iterator:
        iterator.set_state(state)
        return ids([next(next(iterator) if kind == "epochs" else iterator)])


def each(change, *types_, state):
    """The state with each value of some types changed."""
    if isinstance(state, dict):
        return {key: each(change, *types_, state=value) for key, value in state.items()}
    if isinstance(state, list):
        return [each(change, *types_, state=value) for value in state]
    return change(state) if type(state) in types_ else state


def small(change):
    return lambda value: change(value) if abs(value) < 100 else value


STORAGES = {
    "JSON": lambda state: state,
    "arrays": lambda state: each(np.asarray, int, bool, state=state),
    "scalars": lambda state: each(lambda v: np.asarray(v)[()], int, bool, state=state),
    "arrays of JAX": lambda state: each(small(jnp.asarray), int, state=state),
    "uint8": lambda state: each(small(np.uint8), int, state=state),
    "another order": lambda state: collections.OrderedDict(reversed(state.items())),
}


@EVERY_KIND
@pytest.mark.parametrize("store", STORAGES.values(), ids=STORAGES)
def test_a_state_goes_on_whatever_types_a_storage_gave_its_values(kind, store):
    state, rows = saved(kind)
    assert rows_after(kind, store(json.loads(state))) == rows


@EVERY_KIND
def test_a_state_goes_on_from_a_tree_of_orbax(kind, tmp_path):
    state, rows = saved(kind)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", json.loads(state))
        restored = checkpointer.restore(tmp_path / "state")
    assert rows_after(kind, restored) == rows


def at(state, path):
    return functools.reduce(lambda found, key: found[key], path, state)


def nested(levels, value=0):
    return functools.reduce(lambda inner, _: [inner], range(levels), value)


IN_A_STREAM = ("feeds", "0", "state", "next_index")
ENTRY = ("feeds", "2")
IN_A_FEED = (*ENTRY, "state", "next_index")
OF_A_LOADER = ("feeds", "0", "state", "more", "__tuple__")
STEP = ("step",)
# The place of a value, the value that is put there, and what the message says of it.
WRONG = [
    *(("stream", IN_A_STREAM, value, "values differ") for value in (25, -1, "24", None, [24], {})),
    *(("feeds", IN_A_FEED, value, "entry of feed 2") for value in (7, -1, "6", 10**30, {"a": 1})),
    *(("feeds", ENTRY, value, "entry of feed 2") for value in (None, 3, [], {"__tuple__": 5})),
    *(
        ("feeds", STEP, value, "not a whole number of 0 or more")
        for value in (-1, "2", None, 10**30, 3.0)
    ),
    *(
        ("random access", STEP, value, "no such position")
        for value in (10**30, 25, -1, "1", None, True, 1.5, 3.0)
    ),
    ("stream", IN_A_STREAM, 24.0, "values differ"),
    ("feeds", IN_A_FEED, float("nan"), "entry of feed 2"),
    *(("random access", ("record",), value, "no such position") for value in (-1, 81)),
    *(("random access", ("epoch",), value, "no such position") for value in (-1, 1, 10**30)),
    ("random access", ("kind",), "stream", "of kind 'stream', and this is "),
    ("feeds", ("kind",), "stream", "of kind 'stream', and this is "),
    ("feeds", ("remainder",), "drop", "remainder: saved 'drop', now "),
    ("feeds", ("feeds",), None, "feeds are None, not a dict"),
    ("feeds", ("feeds",), [1], r"feeds are \[1\], not a dict"),
    ("loader", (*OF_A_LOADER, 2, "__bytes__"), "€", "values differ"),
    ("loader", (*OF_A_LOADER, 0), 2.5, "values differ"),
    ("random access", STEP, nested(3000), r"state\['step'\](\[0\]){7}\.\.\. is of type list"),
    ("random access", ("more",), 1, r"has other fields: \['more'\]"),
    ("feeds", ("more",), 1, r"has other fields: \['more'\]"),
    ("stream", ("more",), 1, r"has other fields: \['more'\]"),
    ("stream", ("feeds", "0", "rows"), 7, "values differ"),
    ("stream", STEP, "2", "not a whole number of 0 or more"),
    ("stream", ("batch_sizes",), [4], r"batch_sizes: saved \[4\], now \[8\]"),
    ("stream", ("feeds",), {}, "no entry for the stream"),
]
for kind_, path_ in (("random access", STEP), ("stream", IN_A_STREAM), ("feeds", IN_A_FEED)):
    name = "".join(rf"\['{key}'\]" for key in path_)
    WRONG += [
        (kind_, path_, value, rf"state{name} {what}")
        for value, what in [
            (np.float32(3), r"is of type float32\[\]"),
            (jnp.bfloat16(3), r"is of type bfloat16\[\]"),
            (np.asarray("3"), r"is of type <U1\[\]"),
            (np.asarray(3, object), r"is of type object\[\]"),
            (np.arange(3), r"is of type int64\[3\]"),
            (np.array([3]), r"is of type int64\[1\]"),
            (jnp.zeros((1, 1)), r"is of type float32\[1, 1\]"),
            (jax.random.key(3), r"is of type key<fry>\[\]"),
            (1j, "is of type complex"),
            ({3: 1}, "is of type dict"),
            (types.MappingProxyType({}), "is of type mappingproxy"),
            ((3,), "is of type tuple"),
            (b"3", "is of type bytes"),
            (1 << 20_000, "is of type int"),
            (object(), "is of type object"),
        ]
    ]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[0]}: {wrong[3]}")
def test_a_wrong_value_is_refused_by_its_place_and_type(wrong):
    kind, path, value, match = wrong
    state, rows = json.loads(saved(kind)[0]), saved(kind)[1]
    with BUILD[kind]() as iterator:
        iterator.set_state(copy.deepcopy(state))
        at(state, path[:-1])[path[-1]] = value
        with pytest.raises(StateError, match=rf"{match}(.|\n)*remedy: "):
            iterator.set_state(state)
        assert ids([next(iterator)]) == rows, "a refused state changes nothing"


@EVERY_KIND
@pytest.mark.parametrize(
    "state", [None, 5, "state", [], {}, {"iterators_in_use_states": 5}, {"kind": 5}, np.arange(3)]
)
def test_what_is_no_state_is_refused(kind, state):
    with BUILD[kind]() as iterator, pytest.raises(StateError, match="remedy: "):
        iterator.set_state(state)


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats()
OF_A_USER = st.recursive(
    PLAIN | st.binary() | st.builds(np.array, st.lists(st.floats())),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.sampled_from(["__tuple__", "__float__", "a"]), inner)
    ),
    max_leaves=8,
)
JUNK = (
    OF_A_USER
    | st.integers(0, 100)
    | st.integers(50, 3000).map(nested)
    | st.builds(np.array, PLAIN)
    | st.builds(lambda bits: 1 << bits, st.integers(0, 30_000))
)


class Holding(Restorable):
    """Batches whose iterator has a given state."""

    def __init__(self, state):
        super().__init__([{"x": np.zeros(2)}] * 9)
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.restored = state


@given(OF_A_USER)
@settings(deadline=None)
def test_a_state_of_a_user_comes_back_from_json_as_it_was(state):
    source = Holding(state)
    with iter(from_iterable(source).shard_to(data_mesh(1), mask_key=None)) as iterator:
        next(iterator)
        iterator.set_state(json.loads(json.dumps(iterator.get_state())))
        next(iterator)
    np.testing.assert_equal(source.restored, state)
    assert repr(source.restored) == repr(state), "with the types of all values"


def places(state, path=()):
    yield path
    items = (
        state
        if isinstance(state, dict)
        else dict(enumerate(state if isinstance(state, list) else ()))
    )
    for key, value in items.items():
        yield from places(value, (*path, key))


@pytest.mark.parametrize("kind", ["random access", "stream", "loader", "feeds"])
def test_a_changed_state_gives_the_right_rows_or_a_state_error(kind):
    text, rows = saved(kind)

    @settings(max_examples=80, deadline=None, database=None)
    @given(st.sampled_from(sorted(places(json.loads(text)), key=repr)), JUNK, st.booleans())
    def property_(path, junk, removes):
        holder = {"state": json.loads(text)}
        *before, last = ("state", *path)
        if removes:
            del at(holder, before)[last]
            assume(path)
        else:
            at(holder, before)[last] = junk
        with contextlib.suppress(StateError):
            iterator.set_state(holder["state"])
            found = ids(itertools.islice(iterator, 1))
            # Another step or record of random access is the state of another place, or of the end.
            assert found == rows or (kind == "random access" and path[0] in ("step", "record"))

    with BUILD[kind]() as iterator:
        property_()


# Folders.


class Heavy(Loader):
    def get_state(self):
        return "x" * 2**24


def test_a_state_that_is_too_large_to_be_read_again_is_not_written(tmp_path):
    iterator, said = iter(from_iterable(Heavy()).shard_to(data_mesh(2))), "a seed and a count"
    with iterator, pytest.raises(StateError, match=rf"too large for (.|\n)*{said}"):
        iterator.write_state(tmp_path)
    assert not list(tmp_path.iterdir())


def restore(folder):
    with BUILD["feeds"]() as iterator:
        iterator.read_state(folder)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(2**40)


FOUND = {
    "nothing": lambda path: path.write_bytes(b""),
    "half a file": lambda path: path.write_bytes(b'{"batch": 3'),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "UTF-16": lambda path: path.write_text('{"step": 3}', encoding="utf-16"),
    "a number": lambda path: path.write_text("5"),
    "null": lambda path: path.write_text("null"),
    "a long number": lambda path: path.write_text('{"step": 1%s}' % ("0" * 10**5)),
    "lists in lists": lambda path: path.write_text("[" * 10**6),
    "dicts in dicts": lambda path: path.write_text('{"a":' * 3000 + "1" + "}" * 3000),
    "101 levels": lambda path: path.write_text(json.dumps({"a": nested(100)})),
    "a terabyte": sparse,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a folder": lambda path: path.symlink_to("/"),
}


@pytest.mark.parametrize(
    "name", ["state.json", "state-0-of-1.json", "feeds-00000-00003-of-00004.json"]
)
@pytest.mark.parametrize("put", FOUND.values(), ids=FOUND)
def test_a_damaged_file_is_named(tmp_path, name, put):
    put(tmp_path / name)
    with pytest.raises(StateError, match=rf"{name} is damaged: .+\n  remedy: restore another step"):
        restore(tmp_path)


@pytest.mark.parametrize("to", ["state.json", "not there"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, to):
    (tmp_path / "state.json").symlink_to(tmp_path / to)
    with pytest.raises(StateError, match=r"state\.json cannot be read: (.|\n)*remedy: "):
        restore(tmp_path)


BILLION = 10**9
# Names of files, and what the message says of them.
NAMES = [
    (["state-1-of-2.json"], r"found:  state-1-of-2\.json\n.*on the number of hosts that saved"),
    ([f"other-{i}" for i in range(99)], r"found:  other-0, .* and 91 more\n"),
    (["a\nb\udcff"], r"found:  'a\\nb\\udcff'\n"),
    (["feeds-0-0-of-1.json", "feeds-00000-0000\u0661-of-00002.json"], "no state for host 0"),
    (["feeds-00003-00001-of-00004.json", "feeds-00000-00004-of-00004.json"], "no state for host 0"),
    ([f"feeds-00000-{BILLION - 1}-of-{BILLION}.json"], "holds a different set of feeds"),
    ([f"feeds-00001-00001-of-{BILLION}.json"], f"lacks 999999999 of {BILLION} feeds: 0, 2 to 999"),
    ([f"feeds-00000-{10**40}-of-{10**41}.json"], f"lacks {9 * 10**40 - 1} of "),
    (
        [f"feeds-{2 * i:05d}-{2 * i:05d}-of-00099.json" for i in range(50)],
        r"lacks 49 of 99 feeds: 1, 3, .*15 and 41 more\.\n  found:  .* and 42 more\n",
    ),
    (["feeds-00000-00007-of-00009.json", "feeds-00002-00008-of-00009.json"], "both hold feed 2"),
    (
        ["feeds-00000-00000-of-00002.json", "feeds-00001-00001-of-00003.json"],
        "differ in the number of feeds",
    ),
]


@pytest.mark.parametrize(("names", "match"), NAMES)
def test_the_names_of_files_may_say_anything(tmp_path, names, match):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(StateError, match=match):
        restore(tmp_path)


@pytest.mark.parametrize("name", [".", "not there"])
def test_a_folder_whose_files_are_gone_is_not_taken_for_that_of_a_stream(tmp_path, name):
    said = r"found:  nothing\n  remedy: pass the folder into which the state was saved"
    with pytest.raises(StateError, match=said):
        restore(tmp_path / name)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "state").write_text("{}")
    with pytest.raises(StateError, match=r"state cannot be read: (.|\n)*remedy: pass the folder"):
        restore(tmp_path / "state")


NUMBERS = st.integers(0, 5) | st.integers(0, 10**20)
NAME = st.one_of(
    st.sampled_from(["state.json", "state-0-of-1.json", "process_0-of-1.json"]),
    st.builds("feeds-{:05d}-{:05d}-of-{:05d}.json".format, NUMBERS, NUMBERS, NUMBERS),
)
CONTENT = st.binary() | st.one_of(
    *(st.just(saved(kind)[0].encode()) for kind in ("random access", "stream", "feeds")),
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)).map(
        lambda value: json.dumps(value).encode()
    ),
)


@pytest.mark.parametrize("kind", ["random access", "stream", "feeds"])
def test_any_folder_gives_a_state_or_a_state_error(kind, tmp_path_factory):
    @settings(max_examples=80, deadline=None, database=None)
    @given(st.dictionaries(NAME, CONTENT, min_size=1, max_size=4))
    def property_(files):
        folder = tmp_path_factory.mktemp("state")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        with contextlib.suppress(StateError):
            iterator.read_state(folder)
            next(iterator)

    with BUILD[kind]() as iterator:
        property_()


class ItemOfKauldron(CheckpointItem):
    def __init__(self, iterator):
        self.iter = iterator


def test_a_checkpoint_item_of_kauldron_is_saved_and_restored_by_its_protocol(tmp_path, mesh):
    ds = grain.MapDataset.range(24).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
    items = [ItemOfKauldron(iter(ds)), ItemOfKauldron(iter(ds))]
    next(items[0].iter)
    handlers = {"ds": items[0].__kd_ocp_handlers__()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        manager.save(1, args=ocp.args.Composite(ds=items[0].__kd_ocp_save_args__()))
        value = manager.restore(1, args=ocp.args.Composite(ds=items[1].__kd_ocp_restore_args__()))
    assert items[1].__kd_ocp_restore_post__(value["ds"]) is items[1]
    np.testing.assert_array_equal(next(items[1].iter)["x"], np.arange(8, 16))
    for item in items:
        item.iter.close()


def crop(record):
    return record


def flip(record):
    return record


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (lambda ds: ds.map(crop).map(flip), ".map (flip) after .map (crop) was added"),
        (lambda ds: ds.map(dict).map(crop), ".map (dict) after .shuffle was added"),
        (lambda ds: ds.map(flip), ".map (flip) after .shuffle has other arguments, or was another"),
        (lambda ds: ds, "a transformation after .shuffle was removed"),
        (lambda ds: ds.map(crop)[1:9], ".slice after .map (crop) was added"),
    ],
)
def test_a_restore_names_the_transformation_that_changed(now, change):
    def sharded(ds):
        return ds.batch(4).shard_to(data_mesh(2), mask_key=None)

    shuffled = grain.MapDataset.source([{"x": i} for i in range(16)]).seed(1).shuffle()
    state = json.loads(json.dumps(iter(sharded(shuffled.map(crop))).get_state()))
    assert {type(value) for value in state.values()} <= {str, int}
    with pytest.raises(StateError, match=re.escape(f"  transforms: {change}")):
        iter(sharded(now(shuffled))).set_state(state)


@pytest.mark.parametrize("remainder", ["pad", "drop", "error"])
@pytest.mark.parametrize("is_endless", [False, True], ids=["10^12 records", "endless"])
def test_a_state_of_a_large_job_has_less_than_200_bytes(is_endless, remainder):
    num_records = 10**9 if is_endless else 10**12
    records = grain.MapDataset.range(num_records).seed(1)
    for _ in range(8):
        records = records.map(lambda record: record)
    records = records.repeat() if is_endless else records
    ds = records.map(lambda i: {"x": np.int32(i // 1000)}).batch(1000)
    with iter(ds.shard_to(data_mesh(1), remainder=remainder)) as iterator:
        iterator.seek(10**9 - 2)
        next(iterator)
        state = iterator.get_state()
        assert state["step"] == 10**9 - 1
        assert len(json.dumps(state)) < 200
        iterator.set_state(json.loads(json.dumps(state)))
        assert set(next(iterator)["x"].tolist()) == {(10**9 - 1) % (num_records // 1000)}


def test_an_entry_of_a_stream_without_its_rows_is_refused():
    state = json.loads(saved("stream")[0])
    state["feeds"]["0"] = json.loads(saved("feeds")[0])["feeds"]["0"]
    with BUILD["stream"]() as iterator, pytest.raises(StateError, match="entry of stream 0"):
        iterator.set_state(state)
