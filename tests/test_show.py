"""What `show` says of batches and datasets, progress bars, and what an object says of itself."""

import builtins
import collections
import contextlib
import io
import re
import threading

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import grain_shard
from grain_shard import ShardingTree, from_iterable, hosts_mesh, prefetch_to_device, rehearse
from tests.conftest import background_threads, data_mesh, numbered, refused
from tests.counting_source import Source
from tests.pipelines import KINDS, feeds_of


def record(i):
    return {
        "image": np.zeros((28, 28, 1), np.uint8),
        "tokens": np.arange(64, dtype=np.int64),
        "meta": {"weight": np.float32(1), "name": f"record {i}"},
    }


def mesh_2d():
    return jax.make_mesh((4, 2), ("data", "seq"))


SPECS = {"image": P("data"), "tokens": P("data", "seq"), "meta": P(("data", "seq"))}


def lines(text):
    """The lines of a text, with one space between words."""
    return {" ".join(line.split()) for line in text.splitlines()}


def drawn(text):
    """The drawings below the table of leaves: their titles, and the cells of all their lines."""
    below = text.partition("  a batch ")[2].splitlines()[1:]
    titles = [line.strip() for line in below if line.startswith("  batch[")]
    rows = [line.strip() for line in below if re.match("  (rows|[0-9]+:)", line)]
    return titles, [re.split(r"\s{2,}", row) for row in rows]


@pytest.fixture
def shown(capsys):
    """Shows a thing, and returns the text in the terminal."""

    def show(thing):
        grain_shard.show(thing)
        return capsys.readouterr().out

    return show


def placed(shape, *spec):
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh_2d(), P(*spec)))


def struct(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_2d(), P(*spec)))


@pytest.mark.parametrize(
    ("leaf", "line"),
    [
        # Dims are written as JAX writes them; then the rows and the bytes on each device.
        (placed((8, 4), "data"), "f32[8@data,4] 2 32 bytes"),
        (struct((8, 4), np.int32, "data", "seq"), "i32[8@data,4@seq] 2 16 bytes"),
        (struct((8,), np.bool_, ("data", "seq")), "bool[8@(data,seq)] 1 1 byte"),
        (struct((8, 4), np.uint8, None, "seq"), "u8[8,4@seq] 8 16 bytes"),
        (struct((8, 4), jax.numpy.bfloat16), "bf16[8,4] 8 64 bytes"),
        (placed(()), "f32[] 4 bytes"),
        (jax.device_put(np.zeros(3, np.float32)), "f32[3] 3 12 bytes"),
        (np.array(["a", "b"]), "str[2] on the host"),
        (np.zeros((2, 3), np.float32), "f32[2,3] on the host"),
        (7, "int on the host"),
    ],
)
def test_the_line_of_a_leaf(leaf, line, shown):
    assert f"batch['x'] {line}" in lines(shown({"x": leaf}))


# The lines about a batch of 32 records.
OF_A_BATCH = {
    "batch['image'] u8[32@data,28,28,1] 8 6.3 kB",
    "batch['meta']['name'] str[32] on the host",
    "batch['meta']['weight'] f32[32@(data,seq)] 4 16 bytes",
    "batch['tokens'] i32[32@data,64@seq] 8 1.0 kB",
    "batch['valid_mask'] bool[32@(data,seq)] 4 4 bytes",
    "a batch 7.3 kB",
}


OF_SHARD_TO = "which does not say which arrays its batches have"


def nothing_of(records):
    return records.to_iter_dataset().filter(lambda record: False)


class TestInATerminal:
    def test_a_dataset_reads_one_batch_and_starts_no_thread(self, shown, monkeypatch):
        source = Source(100)
        ds = grain.MapDataset.source(source).map(record).batch(32).shard_to(mesh_2d(), SPECS)
        source.requests.clear()

        def start(thread):
            raise AssertionError(f"{thread.name} was started")

        monkeypatch.setattr(threading.Thread, "start", start)
        assert lines(shown(ds)) >= OF_A_BATCH | {
            "mesh data=4, seq=2",
            "batches 4",
            "rows of this host 32 of 32: 0:32",
            "buffers at most 2 batches on the devices, 4 on the host",
        }
        assert source.requests == collections.Counter(range(32))

    def test_a_list_of_thousands_of_records_takes_no_more_than_a_screen(self, shown):
        text = shown([record(i) for i in range(1797)])
        assert len(text.splitlines()) <= 40
        assert "  7,172 more leaves " in text

    def test_drawings_that_do_not_fit_a_screen_are_cut_off(self, shown):
        rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
        arrays = [jax.ShapeDtypeStruct((8 * i,), "int8", sharding=rows) for i in range(9)]
        *others, last = shown(arrays).splitlines()
        assert (len(others), last) == (39, "  and more")

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_batch_that_the_shards_do_not_divide_has_padding(self, kind, shown):
        ds = KINDS[kind](lambda i: {"x": i})  # batches of 4
        of_shards = lines(shown(ds.shard_to(data_mesh(8))))
        assert "rows of a batch 8: 4 records + 4 of padding" in of_shards
        assert "padding" not in shown(ds.shard_to(data_mesh(4)))

    def test_a_stream(self, shown):
        stream = grain.MapDataset.range(10).to_iter_dataset().map(lambda i: {"x": i}).batch(4)
        assert lines(shown(stream.shard_to(data_mesh(2)))) >= {
            "batches unknown until the stream ends",
            "batch['x'] i32[4@data] 2 8 bytes",
        }
        assert not background_threads()

    def test_an_iterator_says_how_many_reads_go_side_by_side_and_why(self, shown, mesh):
        ds = grain.MapDataset.range(800).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        of_dataset = lines(shown(ds))
        with iter(ds) as iterator:
            added = {line for line in lines(shown(iterator)) - of_dataset if " " in line}
        assert added == {"reads side by side 1 (no read is done yet)"}

    @pytest.mark.parametrize(
        ("thing", "message"),
        [
            (lambda ds: ds.batch(8), OF_SHARD_TO),
            (lambda ds: iter(ds.batch(8).to_iter_dataset()), OF_SHARD_TO),
            (lambda ds: ds.batch(8).shard_to(data_mesh(8)).map(dict), OF_SHARD_TO),
            (lambda ds: nothing_of(ds).batch(4).shard_to(data_mesh(2)), "no batch"),
        ],
    )
    def test_what_is_not_sharded_or_has_no_batch_is_refused(self, thing, message):
        records = grain.MapDataset.range(8).map(lambda i: {"x": i})
        with refused(message):
            grain_shard.show(thing(records))

    def test_keys_are_not_taken_for_styles(self, shown):
        batch = {"[/bold]": placed(8, "data"), "a[red]": np.zeros(2), ":smile:": np.zeros(2)}
        text = shown(batch)
        for key in batch:
            assert f"batch['{key}']" in text
        assert drawn(text)[0] == ["batch['[/bold]']"]

    def test_a_batch_of_text_alone(self, shown):
        ds = grain.MapDataset.range(8).map(lambda i: {"name": str(i)}).batch(4)
        text = shown(ds.shard_to(data_mesh(2), mask_key=None))
        assert "batch['name'] str[4] on the host" in lines(text)


@pytest.mark.slow
def test_one_host_of_two_may_look_alone():
    def look():
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))  # model over hosts
        ds = grain.MapDataset.range(64).map(lambda i: {"x": np.float32(i)}).batch(16)
        ds = ds.shard_to(mesh, timeout_s=5)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if jax.process_index() == 1:
                grain_shard.show(ds)
        return out.getvalue()

    nothing, shown = rehearse.run(look, hosts=2, devices_per_host=4)
    assert nothing == ""
    assert "data=4, model=2; 2 hosts" in shown
    assert "f32[16@data]" in shown
    assert "16 of 16: 0:16" in shown


class TestAbstractBatch:
    @pytest.mark.parametrize("spec", [SPECS, P("data"), P("seq"), P(("data", "seq")), P()])
    @pytest.mark.parametrize("kind", ["random access", "stream", "workers"])
    def test_it_is_what_batches_are(self, spec, kind):
        ds = grain.MapDataset.range(50).map(record).batch(16)
        options = {"num_workers": 1} if kind == "workers" else {}
        if kind == "stream":
            ds = ds.to_iter_dataset().map(lambda batch: batch)
        sharded = ds.shard_to(mesh_2d(), spec, **options)
        abstract = sharded.abstract_batch()
        # Batches of workers are the same, and without workers they are here sooner.
        with iter(ds.shard_to(mesh_2d(), spec) if kind == "workers" else sharded) as batches:
            real = next(batches)
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        for expected, leaf in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
            assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
            if isinstance(expected, jax.Array):
                assert isinstance(leaf, jax.ShapeDtypeStruct)
                assert leaf.sharding.is_equivalent_to(expected.sharding, expected.ndim)


class ZMQInteractiveShell:
    """What Jupyter's shell is called, by which rich knows it."""


class TestInANotebook:
    @pytest.fixture
    def displayed(self, monkeypatch):
        """What a notebook was given to display, by its type."""
        pytest.importorskip("IPython")
        shown = []
        monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
        monkeypatch.setattr("IPython.display.display", shown.append)
        return shown

    def test_a_dataset_is_tables(self, displayed, capsys):
        ds = grain.MapDataset.range(100).map(record).batch(32).shard_to(mesh_2d(), SPECS)
        grain_shard.show(ds)
        (page,) = displayed
        formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
        shown, _ = formatter.format(page)
        assert "rows of this host" in shown["text/html"]
        assert "u8[32@data,28,28,1]" in shown["text/html"]
        assert "devices 2, 3" in shown["text/html"]
        assert capsys.readouterr().out == ""
        # Viewers that show no HTML get the text of a terminal, without the codes of its colors.
        assert lines(shown["text/plain"]) >= OF_A_BATCH | {"mesh data=4, seq=2"}
        assert "\x1b" not in shown["text/plain"]

    def test_ipython_in_a_terminal_is_a_terminal(self, displayed, monkeypatch, shown):
        monkeypatch.setattr(builtins, "get_ipython", object, raising=False)
        assert "batch['x']" in shown({"x": np.zeros(3)})
        assert displayed == []


class TestDrawings:
    def test_rows_go_down_and_other_dims_across(self, shown):
        assert drawn(shown({"x": placed((8, 6), "data", "seq")}))[1] == [
            ["rows", "dim 1: 0:3", "dim 1: 3:6"],
            ["0:2", "device 0", "device 1"],
            ["2:4", "device 2", "device 3"],
            ["4:6", "device 4", "device 5"],
            ["6:8", "device 6", "device 7"],
        ]

    def test_leaves_that_are_cut_alike_share_a_drawing_and_values_are_not_looked_at(self, shown):
        shapes = {"image": (8, 6, 5), "label": (8,), "valid_mask": (8,)}
        batch = {name: placed(shape, "data") for name, shape in shapes.items()}
        batch["image"].delete()
        assert drawn(shown(batch)) == (
            ["batch['image'], batch['label'], batch['valid_mask']"],
            [
                ["rows", "held by"],  # and no dims after the last sharded one
                ["0:2", "devices 0, 1"],
                ["2:4", "devices 2, 3"],
                ["4:6", "devices 4, 5"],
                ["6:8", "devices 6, 7"],
            ],
        )

    def test_leaves_are_drawn_but_for_those_on_no_mesh(self, shown):
        arrays = {str(spec): placed((8, 8), *spec) for spec in [("data",), ("data", "seq"), ()]}
        others = {"text": np.array(["a"]), "host": np.zeros(3), "scalar": jax.numpy.zeros(())}
        others["no rows"] = placed((0, 8), "data")
        titles, cells = drawn(shown({**arrays, **others}))
        assert len(titles) == len(arrays)
        assert ["0:8", "devices 0, 1, 2, 3, 4, 5, 6, 7"] in cells
        assert drawn(shown(others)) == ([], [])

    def test_devices_are_named_by_host_where_there_are_several(self, shown):
        mesh = hosts_mesh({"data": 2, "model": 2}, hosts=2, devices_per_host=2)
        mesh = Mesh(mesh.devices.T, ("data", "model"))
        leaf = jax.ShapeDtypeStruct((4,), np.int32, sharding=NamedSharding(mesh, P("data")))
        assert drawn(shown({"x": leaf}))[1] == [
            ["rows", "held by"],
            ["0:2", "host 0: 0, host 1: 2"],
            ["2:4", "host 0: 1, host 1: 3"],
        ]

    def test_a_large_mesh_is_shortened_and_says_so(self, shown):
        mesh = hosts_mesh({"data": 64, "seq": 16}, hosts=256, devices_per_host=4)
        sharding = NamedSharding(mesh, P("data", "seq"))
        leaf = jax.ShapeDtypeStruct((128, 32), np.int32, sharding=sharding)
        (title,), cells = drawn(shown({"x": leaf}))
        assert [len(line) for line in cells] == [1 + 4] * (1 + 16)
        assert "the first 16 of 64 shards of the rows; the first 4 of 16 shards across" in title


def test_a_progress_bar_has_a_total_unless_it_is_over_a_stream():
    records = grain.MapDataset.range(50).map(lambda i: {"x": i})
    for ds, total in ((records, 7), (records.to_iter_dataset(), None)):
        bar = tqdm(ds.batch(8).shard_to(data_mesh(8)), file=io.StringIO())
        assert bar.total == total
        assert sum(1 for _ in bar) == bar.n == 7


# What an object says of itself, in a notebook or a debugger.


def batches():
    return numbered(20, 8).shard_to(data_mesh(2))


def after_one(iterator):
    next(iterator)
    return iterator


def closed(iterator):
    iterator.close()
    return iterator


def unsharded_stream():
    return numbered(20, 8).to_iter_dataset().filter(lambda batch: True)


def stream():
    return unsharded_stream().shard_to(data_mesh(2))


ITERATOR = "<ShardedIterator of random access, mesh (data=2), {}>"
PAD = (
    "<PadToDivisible(divisor=4, remainder='pad', mask_key='valid_mask', global_batch_size=None,"
    " pad_value=0)>"
)
LAYOUT = "BatchLayout(divisor=2, shards=(0, 1), mesh=(data=2), num_hosts=1, amplification=1)"
LONG_LAYOUT = "BatchLayout(divisor=9, shards=<9>, mesh=(), num_hosts=1, amplification=1)"
DATASET = "<ShardedDataset of random access, 3 batches, 8 rows a batch, P('data'), mesh (data=2)>"
BY_MESH = "ShardByMesh(shard_index=0, shard_count=1, drop_remainder=False)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (batches, DATASET),
        (stream, "<ShardedDataset of stream, P('data'), mesh (data=2)>"),
        (lambda: iter(stream()), "<ShardedIterator of stream, mesh (data=2), not begun>"),
        (lambda: iter(batches()), ITERATOR.format("not begun")),
        (lambda: after_one(iter(batches())), ITERATOR.format("under way")),
        (lambda: closed(iter(batches())), ITERATOR.format("closed")),
        (lambda: batches().epochs(3), f"<Epochs: 3 of {ITERATOR.format('not begun')}>"),
        (lambda: next(batches().epochs(3)), "<EpochBatches: epoch 0, 3 of 3 batches left>"),
        (
            lambda: after_one(next(after_one(batches().epochs(2)))),
            "<EpochBatches: epoch 1, 2 of 3 batches left>",
        ),
        (lambda: prefetch_to_device(iter([1])), "<ShardedIterator of stream, not begun>"),
        (lambda: feeds_of(lambda feed, i: i, 4, 8), "<batches of 8 rows, of 4 feeds>"),
        (lambda: ShardingTree.of(data_mesh(2)), f"ShardingTree(mesh=(data=2), {P('data')!r})"),
        (lambda: ShardingTree.of(data_mesh(2)).layout(), LAYOUT),
        (lambda: grain_shard.BatchLayout(9, tuple(range(9))), LONG_LAYOUT),
        (lambda: grain_shard.ShardByMesh(data_mesh(2)), BY_MESH),
        (lambda: from_iterable([], rows="global"), "<from_iterable(list, rows='global')>"),
        (lambda: grain_shard.mix([numbered(8, 8)] * 2, {0: [3, 1]}), "<mix({0: [3, 1]})>"),
        (lambda: grain_shard.BatchSchedule({0: 4}), "BatchSchedule(sizes={0: 4})"),
        (grain_shard.DevicePlacement, "DevicePlacement(default_device=None)"),
        (lambda: numbered(20, 8).pipe(grain_shard.PadToDivisible(4)), PAD),
        (lambda: unsharded_stream().pipe(grain_shard.PadToDivisible(4)), PAD),
    ],
)
def test_an_object_says_what_it_is(make, text):
    assert repr(make()) == text
