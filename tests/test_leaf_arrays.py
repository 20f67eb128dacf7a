"""A leaf whose array fails, such as a lazy or cut image: its record has failed like any other."""

import grain
import numpy as np
import pytest

import grain_shard
from tests.conftest import data_mesh
from tests.pipelines import IN_TURN, shared_out


class Image:
    """An image that is decoded when NumPy asks for its array.

    Args:
        number: The value of its pixels.
        fail: Function that is called with the number of the try, from 1. It may raise.
    """

    def __init__(self, number, fail=lambda number: None):
        self.number, self.tries, self._fail = number, 0, fail

    def __array__(self, dtype=None, copy=None):
        self.tries += 1
        self._fail(self.tries)
        return np.full((2, 2), self.number, np.float32)


def cut(number):
    raise ValueError("the image is cut")


def away_twice(number):
    if number <= 2:
        raise ConnectionError("the image is away")


def images(fail):
    """Sixteen records, of which record 5 has an image that fails."""
    return grain.MapDataset.range(16).map(
        lambda i: {"id": i, "image": [Image(i, fail) if i == 5 else Image(i)]}
    )


def filtered(records):
    def make_feed(feed):
        stream = records[feed.shard_index :: feed.shard_count].to_iter_dataset()
        # The filter and the function still see the image.
        return stream.filter(lambda row: row["image"][0].number < 16).map(dict)

    return grain_shard.feeds(make_feed, num_feeds=2).batch(4)


WAYS = {
    "random access": lambda records: records.batch(4),
    "feeds": lambda records: shared_out(records, 2, 4),
    "feeds in turn": lambda records: shared_out(records, 2, 4, IN_TURN),
    "feeds with functions": filtered,
}
each_way = pytest.mark.parametrize("way", WAYS)
with_and_without_workers = pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.slow)]
)


def place(way):
    """The place of record 5. In feeds it is record 2 of feed 1."""
    if way == "random access":
        return "record 5 of the dataset before .batch, for batch 1"
    return "record 2 of the dataset before .to_iter_dataset"


@each_way
@with_and_without_workers
class TestAFailedArray:
    def test_names_its_record(self, way, num_workers):
        ds = WAYS[way](images(cut)).shard_to(data_mesh(2), num_workers=num_workers)
        with iter(ds) as batches, pytest.raises(ValueError, match="image is cut") as caught:
            list(batches)
        assert f"grain_shard: while evaluating {place(way)}" in caught.value.__notes__

    def test_is_masked_and_all_other_rows_are_there(self, way, num_workers):
        options = {"on_bad_record": "mask", "num_workers": num_workers}
        with iter(WAYS[way](images(cut)).shard_to(data_mesh(2), **options)) as batches:
            assert rows_of(batches) == [(i, i) for i in range(16) if i != 5]
            (bad,) = batches.stats().faults.listed
        assert bad.error == "ValueError: the image is cut"
        assert f"{bad.record} of" in place(way)

    def test_is_tried_again_if_its_error_may_pass(self, way, num_workers):
        ds = WAYS[way](images(away_twice)).shard_to(data_mesh(2), num_workers=num_workers)
        with iter(ds) as batches:
            assert rows_of(batches) == [(i, i) for i in range(16)]
            counts = batches.stats().faults
        assert (counts.retries, counts.bad_records) == (2, 0)


def rows_of(batches):
    """The id and a pixel of each valid row, in the order of the ids."""
    rows = []
    for batch in batches:
        valid = np.asarray(batch["valid_mask"])
        pixels = np.asarray(batch["image"][0])[:, 0, 0]
        rows += zip(np.asarray(batch["id"])[valid].tolist(), pixels[valid].tolist(), strict=True)
    return sorted(rows)


def test_the_first_record_may_be_the_one_that_fails():
    records = grain.MapDataset.range(8).map(lambda i: {"id": i, "image": [Image(i, cut)]})
    good = grain.MapDataset.range(8, 16).map(lambda i: {"id": i, "image": [Image(i)]})
    both = grain.MapDataset.concatenate([records, good])
    ds = both.batch(4).shard_to(data_mesh(2), on_bad_record="mask", max_bad_records=8)
    assert rows_of(ds) == [(i, i) for i in range(8, 16)]


def test_after_a_failed_array_no_other_one_is_made():
    # Each of them would be tried again, with pauses, if a store is away.
    made = [Image(i, cut) for i in range(64)]
    records = grain.MapDataset.range(72).map(
        lambda i: {"image": np.zeros((2, 2), np.float32) if i < 8 else made[i - 8]}
    )
    with (
        iter(records.batch(72).shard_to(data_mesh(1), num_threads=1)) as batches,
        pytest.raises(ValueError, match="cut"),
    ):
        next(batches)
    assert [image.tries for image in made[1:]] == [0] * 63


def test_an_image_is_decoded_once():
    made = [Image(i) for i in range(8)]
    records = grain.MapDataset.source(made).map(lambda image: {"image": image})
    list(records.batch(4).shard_to(data_mesh(1)))
    # Records of the first batch, and the middle one, are also read to compare them.
    assert [image.tries for image in made[5:]] == [1] * 3


def test_a_leaf_of_a_whole_batch_is_tried_again_and_named():
    whole = grain.MapDataset.range(8).batch(4).map(lambda batch: {"x": Rows(batch, tries)})
    tries = []
    with iter(whole.shard_to(data_mesh(2))) as batches:
        list(batches)
        assert batches.stats().faults.retries == 1


class Rows:
    """Rows of a batch, the second of which is away at the first try."""

    def __init__(self, rows, tries):
        self._rows, self._tries = rows, tries

    def __array__(self, dtype=None, copy=None):
        if self._rows[0] == 4 and not self._tries:
            self._tries.append(1)
            raise ConnectionError("the rows are away")
        return self._rows
