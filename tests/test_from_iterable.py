"""`from_iterable`: batches of any loader. On several hosts: test_hosts_changing_runs.py."""

import re

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import (
    BatchLayout,
    DevicePut,
    PadToDivisible,
    ShardBatch,
    ShardingError,
    ShardingTree,
    StateError,
    from_iterable,
    hosts_mesh,
)
from grain_shard.placement import prefetch_to_device
from tests.conftest import Restorable, data_mesh, ids, refused
from tests.pipelines import after

EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def make_batches():
    for numbers in EXPECTED:
        yield {"id": np.array(numbers, np.int32)}


def grains_loader():
    return grain.DataLoader(
        data_source=[{"id": np.int32(i)} for i in range(10)],
        sampler=grain.samplers.IndexSampler(10, num_epochs=1, shuffle=False),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


class Tensor:
    """What PyTorch's loader yields: no numpy array, but numpy can make one of it."""

    def __init__(self, values):
        self._values = np.array(values, np.int32)

    def __array__(self, dtype=None, copy=None):
        return self._values


class TorchLoader:
    """The part of ``torch.utils.data.DataLoader`` that a loop uses."""

    def __len__(self):
        return 3

    def __iter__(self):
        return ({"id": Tensor(numbers)} for numbers in EXPECTED)


class StatefulLoader:
    """A loader with a state of its own, as torchdata's and Hugging Face's are.

    A loaded state is that of the next iterator, and of no later one.
    """

    def __init__(self):
        self.next, self.begin = 0, 0

    def __iter__(self):
        self.next, self.begin = self.begin, 0
        while self.next < len(EXPECTED):
            self.next += 1
            yield {"id": np.array(EXPECTED[self.next - 1], np.int32)}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.begin = state["next"]


class StatefulIterator(StatefulLoader):
    """A loader that is its own iterator, and has the state of one."""

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(EXPECTED):
            raise StopIteration
        self.next += 1
        return {"id": np.array(EXPECTED[self.next - 1], np.int32)}

    def load_state_dict(self, state):
        self.next = state["next"]


class NeedsArguments(StatefulLoader):
    """Stands for MosaicML's StreamingDataset, whose loader knows the arguments."""

    def state_dict(self, num_samples):
        raise AssertionError("called without its loader")


LOADERS = {
    "list": lambda: list(make_batches()),
    "generator": make_batches,
    "generator function": lambda: make_batches,
    "function that makes a list": lambda: lambda: list(make_batches()),
    "grain.DataLoader": grains_loader,
    "a loader of tensors": TorchLoader,
    "an iterator with a state": lambda: Restorable(list(make_batches())),
    "a loader with a state_dict": StatefulLoader,
    "an iterator with a state_dict": StatefulIterator,
    "a state_dict with arguments": NeedsArguments,
}
ITERATORS_WITH_STATE = {"an iterator with a state", "an iterator with a state_dict"}
MANY_PASSES = set(LOADERS) - {"generator"} - ITERATORS_WITH_STATE
WITH_STATE = {"grain.DataLoader", "a loader with a state_dict"} | ITERATORS_WITH_STATE


@pytest.mark.parametrize("rows", ["global", "local"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_loaders_batches_are_padded_masked_and_placed(name, rows):
    ds = from_iterable(LOADERS[name](), rows=rows).shard_to(data_mesh(4))
    batches = list(ds)
    assert ids(batches) == EXPECTED
    assert {batch["id"].shape for batch in batches} == {(4,)}
    assert np.asarray(batches[-1]["id"]).tolist() == [8, 9, 0, 0]
    assert np.asarray(batches[-1]["valid_mask"]).tolist() == [True, True, False, False]


def test_a_short_batch_may_be_dropped():
    ds = from_iterable(make_batches, rows="local").shard_to(data_mesh(2), remainder="drop")
    assert ids(ds) == EXPECTED[:2]


@pytest.mark.parametrize("name", sorted(MANY_PASSES | WITH_STATE))
def test_a_second_pass_asks_the_loader_again_or_goes_back(name):
    ds = from_iterable(LOADERS[name](), rows="global").shard_to(data_mesh(4))
    assert ids(ds) == ids(ds) == EXPECTED
    with iter(ds) as iterator:
        assert ids(iterator) == EXPECTED
        iterator.reset()
        assert ids(iterator) == EXPECTED


def test_a_second_pass_over_a_generator_is_refused_with_the_remedy():
    ds = from_iterable(make_batches(), rows="global").shard_to(data_mesh(4))
    with iter(ds) as iterator:
        first = next(iterator)
        for again in (lambda: iter(ds), iterator.reset):
            with pytest.raises(ShardingError, match=r"only once.*has begun[^§]*pass a function"):
                again()
        assert ids([first, *iterator]) == EXPECTED, "what is refused changes nothing"


@pytest.mark.parametrize("name", LOADERS)
def test_what_batches_look_like_is_told_only_if_that_costs_the_loop_no_batch(name):
    ds = from_iterable(LOADERS[name](), rows="global").shard_to(data_mesh(4))
    if name in MANY_PASSES:
        assert ds.abstract_batch()["id"].shape == (4,)
    else:
        with pytest.raises(ShardingError, match="pass a function that makes the iterator"):
            ds.abstract_batch()
    assert ids(ds) == EXPECTED


@pytest.mark.parametrize("name", sorted(WITH_STATE))
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_state_of_the_loader_becomes_one_of_the_loop(name, mapped, stop_after):
    def build():
        ds = from_iterable(LOADERS[name](), rows="local")
        return (ds.map(lambda batch: batch) if mapped else ds).shard_to(data_mesh(2))

    seen, state = after(build(), stop_after)
    with iter(build()) as iterator:
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert seen + ids(iterator) == EXPECTED


@pytest.mark.parametrize("name", sorted(set(LOADERS) - WITH_STATE))
def test_without_a_state_of_the_loader_there_is_none(name, caplog):
    ds = from_iterable(LOADERS[name](), rows="local").shard_to(data_mesh(2))
    with iter(ds) as iterator:
        (said,) = [text for text in caplog.messages if "this loop cannot be resumed" in text]
        assert "has no state" in said
        assert "remedy: pass a Grain dataset" in said
        next(iterator)
        with pytest.raises(StateError, match=r"has no state[^§]*remedy: pass a Grain dataset"):
            iterator.get_state()
        with pytest.raises(StateError, match="has no state"):
            iterator.set_state({"kind": "stream", "parent": {"parent": None, "rows": 4}})
        assert ids(iterator) == EXPECTED[1:], "a refused state changes nothing"


def test_a_state_that_is_no_json_is_named_by_its_path_before_the_first_batch(caplog, capsys):
    class Unsaved(StatefulIterator):
        def state_dict(self):
            return {"next": self.next, "clock": [Tensor([0])]}

    ds = from_iterable(Unsaved).shard_to(data_mesh(2))
    grain_shard.show(ds)
    problem = "state['state']['clock'][0] is of type Tensor"
    assert problem in re.sub(r"\s+", " ", capsys.readouterr().out)
    for _ in range(2):
        iter(ds).close()
    (said,) = [text for text in caplog.messages if "this loop cannot be resumed" in text]
    assert problem in said


def test_feeds_without_a_state_say_so_with_the_first_batch(caplog, capsys):
    def make_feed(feed):
        return from_iterable(lambda: ({"id": np.int32(i)} for i in range(8)))

    ds = grain_shard.feeds(make_feed, num_feeds=2).batch(4).shard_to(data_mesh(2))
    with iter(ds) as iterator:
        next(iterator)
        (said,) = [text for text in caplog.messages if "this loop cannot be resumed" in text]
        assert "a generator has no state" in said
    grain_shard.show(ds)
    assert "a generator has no state" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_grains_nodes_may_follow():
    ds = from_iterable(make_batches, rows="global").map(lambda batch: {"id": batch["id"] + 1})
    ds = ds.filter(lambda batch: len(batch["id"]) == 4).shard_to(data_mesh(2))
    assert ids(ds) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_the_stages_by_hand_take_it_too():
    shardings = ShardingTree.of(data_mesh(2))
    ds = from_iterable(make_batches, rows="local").pipe(grain_shard.PadToDivisible(4))
    assert ids(ds.pipe(DevicePut(shardings))) == EXPECTED


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_iterable(make_batches, rows="all"), "rows='all' is not one of global, local"),
        (
            lambda: from_iterable(grain.MapDataset.range(3), rows="local"),
            "is a Grain dataset already",
        ),
        (
            lambda: from_iterable(make_batches, rows="local").shard_to(data_mesh(2), rows="global"),
            "from_iterable got rows='local', but .shard_to got rows='global'",
        ),
        (
            lambda: list(from_iterable([{"id": np.int32(3)}], rows="local").shard_to(data_mesh(2))),
            "no leaf with a leading axis",
        ),
        (
            lambda: from_iterable(make_batches).shard_to(
                hosts_mesh({"data": 4}, hosts=2, devices_per_host=2)
            ),
            'pass rows="local" if each host',
        ),
    ],
)
def test_misuse_is_refused_and_says_what_to_do(call, message):
    with refused(message):
        call()


def test_what_cannot_be_iterated_over_is_refused():
    said = "got 3, which is not iterable: pass an iterable of batches"
    with pytest.raises(TypeError, match=said):
        from_iterable(3, rows="local")


def test_a_class_is_called_for_its_batches():
    class Batches:
        __iter__ = staticmethod(make_batches)

    ds = from_iterable(Batches)
    assert str(ds) == "from_iterable(Batches)"
    assert ids(ds.shard_to(data_mesh(2))) == EXPECTED


@pytest.mark.parametrize(("said", "again"), [(None, None), ("local", "local")])
def test_one_host_need_not_say_what_it_yields_or_may_say_it_twice(said, again):
    ds = from_iterable(make_batches, rows=said).shard_to(data_mesh(2), rows=again)
    assert ids(ds) == EXPECTED


@pytest.mark.parametrize("above", ["map", "prefetch_to_device", "another stage"])
def test_what_stands_above_a_stage_runs_without_a_state(above):
    padded = from_iterable(make_batches).pipe(PadToDivisible(2, "drop", mask_key=None))
    if above == "map":
        found = padded.map(lambda batch: {"id": batch["id"]}).shard_to(data_mesh(2))
    elif above == "prefetch_to_device":
        found = prefetch_to_device(padded)
    else:
        found = padded.pipe(ShardBatch(BatchLayout(2, (0, 1)))).shard_to(data_mesh(2))
    with iter(found) as batches:
        assert [batch["id"].tolist() for batch in batches] == EXPECTED[:2]


def test_a_batch_that_is_none_is_a_batch():
    with prefetch_to_device([None, {"x": np.ones(2)}, None]) as batches:
        assert [batch is None for batch in batches] == [True, False, True]


def test_a_closed_iterator_without_devices_cannot_go_to_a_state():
    iterator = iter(from_iterable(StatefulLoader()).pipe(PadToDivisible(2)))
    state = iterator.get_state()
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        iterator.set_state(state)
