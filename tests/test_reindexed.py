"""`.slice([3, 1, 4])`, which Grain has after 0.2.18, is known as a slice is: around .batch, too."""

import grain
import numpy as np
import pytest

from grain_shard import BatchLayout, ShardBatch
from grain_shard.errors import StateError
from grain_shard.grain_inside import nodes, routes
from tests.conftest import data_mesh, ids
from tests.counting_source import Source
from tests.pipelines import after, going_on, read_together


class ReindexMapDataset(grain.MapDataset):
    """What Grain's has, for versions of Grain without it."""

    def __init__(self, parent, indices):
        super().__init__(parent)
        self._indices, self._parent_length = indices, len(parent)

    def __len__(self):
        return len(self._indices)

    def _reindexed_index(self, index):
        epoch, offset = divmod(index, len(self))
        return self._indices[offset] + epoch * self._parent_length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[self._reindexed_index(index)]

    def __str__(self):
        return f"ReindexMapDataset(len={len(self)})"


@pytest.fixture(params=["known", "unknown"])
def slice_of(request, monkeypatch):
    """`.slice(indices)`, of which the package knows the node, or does not."""
    kind = nodes.REINDEX or ReindexMapDataset
    known = kind if request.param == "known" else None
    index_map = routes._INDICES[nodes.REINDEX]
    monkeypatch.setattr(nodes, "REINDEX", known)
    monkeypatch.delitem(routes._INDICES, kind, raising=False)
    monkeypatch.setitem(routes._INDICES, known, index_map)
    make = kind if kind is ReindexMapDataset else lambda ds, indices: ds.slice(indices)
    make.is_known = known is not None
    return make


def records(count=5):
    return grain.MapDataset.range(count).map(lambda i: {"id": np.int32(i)})


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ds, cut: cut(ds, [3, 1, 4, 1]).batch(2), [[3, 1], [4, 1]]),
        (lambda ds, cut: cut(ds.batch(2), [1, 0, 2, 0]), [[2, 3], [0, 1], [4], [0, 1]]),
        (lambda ds, cut: cut(ds.batch(2), [0, -1]), [[0, 1], [4]]),
        (lambda ds, cut: cut(ds.batch(2), [0, 2])[::-1], [[4], [0, 1]]),
        (lambda ds, cut: cut(ds.batch(2), [1, 2]).repeat(2), [[2, 3], [4]] * 2),
        (lambda ds, cut: cut(ds.batch(2), grain.MapDataset.range(2)), [[0, 1], [2, 3]]),
        (lambda ds, cut: cut(ds.batch(2), np.array([1, 0])), [[2, 3], [0, 1]]),
    ],
)
def test_batches_are_those_that_were_asked_for(slice_of, build, expected):
    if not slice_of.is_known and [4] in expected:
        pytest.skip("only Grain's hints tell where a short batch may be")
    ds = build(records(), slice_of)
    assert [batch["id"].tolist() for batch in ds] == expected
    assert ids(ds.shard_to(data_mesh(2))) == expected


@pytest.mark.filterwarnings("ignore:this host holds 1 of 2 shards, but reads every row")
def test_rows_of_a_batch_are_read_alone_if_the_node_is_known(slice_of):
    source = Source(4)
    ds = slice_of(grain.MapDataset.source(source).batch(2), [1, 0])
    rows = ds.pipe(ShardBatch(BatchLayout(2, (1,))))
    source.requests.clear()
    assert rows[0].tolist() == [3]
    assert list(source.requests.elements()) == ([3] if slice_of.is_known else [2, 3])


SHUFFLES = {
    "shuffle": lambda ds, seed: ds.seed(seed).shuffle(),
    "window shuffle": lambda ds, seed: grain.experimental.WindowShuffleMapDataset(
        ds, window_size=2, seed=seed
    ),
    "a map above it": lambda ds, seed: ds.seed(seed).shuffle().map(lambda batch: batch),
    "epochs": lambda ds, seed: ds.seed(seed).shuffle().repeat(2),
}


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
@pytest.mark.parametrize("seed", range(4))
def test_batches_may_be_shuffled_whichever_of_them_is_short(shuffle, seed):
    ds = shuffle(records(11).batch(2), seed)
    assert ids(ds.shard_to(data_mesh(2))) == [batch["id"].tolist() for batch in ds]


@pytest.mark.parametrize("remainder", ["drop", "error"])
@pytest.mark.parametrize(
    "chosen", [lambda ds: ds.shuffle(seed=1), lambda ds: ds[::-1], lambda ds: ds[1:].map(dict)]
)
def test_full_batches_may_be_chosen_whatever_becomes_of_short_ones(chosen, remainder):
    ds = chosen(records(8).batch(2))
    sharded = ds.shard_to(data_mesh(2), remainder=remainder)
    assert ids(sharded) == [batch["id"].tolist() for batch in ds]


def test_of_shuffled_batches_only_the_rows_that_are_kept_are_read():
    source = Source(8)
    ds = grain.MapDataset.source(source).batch(2).shuffle(seed=1)
    rows = list(ds.pipe(ShardBatch(BatchLayout(2, (1,)))))
    assert set(source.requests) - {0} == {1, 3, 5, 7}
    assert sorted(np.concatenate(rows).tolist()) == [1, 3, 5, 7]


def test_many_records_are_what_grain_gives_one_by_one(slice_of):
    order = grain.MapDataset.range(40).shuffle(seed=5)
    ds = slice_of(grain.MapDataset.range(50).seed(1).shuffle(), order).repeat(3)
    assert read_together(ds, 100)[0].tolist() == [ds[i] for i in range(100)]


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ([0, 1, 2, 0, 1, 2], [0, 1, 0, 2, 1, 2]),  # the same first and last two
        (grain.MapDataset.range(3), grain.MapDataset.range(3).map(lambda i: 2 - i)),
        (grain.MapDataset.range(3).shuffle(seed=1), grain.MapDataset.range(3).shuffle(seed=2)),
    ],
)
def test_a_state_of_other_indices_is_refused(slice_of, saved, now):
    if not slice_of.is_known:
        pytest.skip("then only the text of the node is compared")
    saved, now = (slice_of(records().batch(2), of).shard_to(data_mesh(2)) for of in (saved, now))
    _, state = after(saved, 1)
    going_on(saved, state)
    with pytest.raises(StateError, match=r"transforms changed"):
        going_on(now, state)
