"""A pipeline without `.batch`: its records are not cut up in silence as if they were batches."""

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import BatchSchedule, ShardingError
from tests.conftest import Made, data_mesh, refused


def labeled(i):
    return {"image": np.full((16, 4), i, np.uint8), "label": i % 10}


def image(i):
    return {"image": np.full((16, 4), i, np.uint8)}


def whole_batch(i):
    return {"image": np.zeros((16, 4), np.uint8), "label": np.full(16, i)}


def kept(record):
    return True


def records(make=labeled):
    return grain.MapDataset.range(32).map(make)


def first(ds, **options):
    with iter(ds.shard_to(data_mesh(8), **options)) as batches:
        return next(batches)


WITHOUT_BATCH = {
    "random access": records,
    "looked through": lambda: records().to_iter_dataset(),
    "a stream": lambda: records().to_iter_dataset().filter(kept),
    "a mixture": lambda: grain.MapDataset.mix([records(), records()]),
}


@pytest.mark.parametrize("build", WITHOUT_BATCH.values(), ids=WITHOUT_BATCH)
@pytest.mark.parametrize("rows", ["global", "local"])
def test_a_record_with_a_value_beside_arrays_is_refused(build, rows):
    with pytest.raises(ShardingError) as refusal:
        first(build(), rows=rows)
    assert str(refusal.value) == (
        "batch['label']: the pipeline has no .batch, so each record would be split along dim"
        " 0, like a batch of rows. But this leaf is a scalar, and has no dim 0.\n"
        "  leaf:   int64[]   mesh: data=8\n"
        "  remedy: call .batch(global_batch_size) before .shard_to. If each element is a whole"
        " batch, give this leaf one value per row, or drop the leaf."
    )


def test_a_state_from_before_the_first_batch_hides_nothing():
    with iter(WITHOUT_BATCH["a stream"]().shard_to(data_mesh(8))) as batches:
        batches.set_state(batches.get_state())
        with refused("the pipeline has no .batch"):
            next(batches)


def test_random_access_is_refused_when_the_pipeline_is_built():
    with refused("But this leaf is a scalar, and has no dim 0"):
        records().shard_to(data_mesh(8))


def with_step(batch):
    return batch | {"step": 3}


def loaded(element):
    return grain_shard.from_iterable([element] * 2, rows="global")


WITH_BATCH = {
    "random access": lambda: records().batch(16),
    "a number of the batch": lambda: records().batch(16).map(with_step),
    "of a stream": lambda: records().to_iter_dataset().filter(kept).batch(16),
    "in the middle": lambda: records().batch(16).to_iter_dataset().filter(kept),
    "in the parts of a mixture": lambda: grain.MapDataset.mix([records().batch(16)] * 2),
    "a schedule": lambda: records().pipe(BatchSchedule({0: 16})).map(with_step),
    "batches cut anew": lambda: grain.experimental.RebatchIterDataset(
        records().to_iter_dataset().batch(16), 8
    ),
    "a stream of one's own": lambda: Made(whole_batch),
    "another library's": lambda: loaded(whole_batch(0)),
}


@pytest.mark.parametrize("build", WITH_BATCH.values(), ids=WITH_BATCH)
def test_what_makes_batches_is_taken_without_a_word(build):
    assert first(build())["image"].shape[-1] == 4


@pytest.mark.parametrize(
    "build",
    [
        lambda: loaded(labeled(0)),
        lambda: Made(lambda i: with_step(whole_batch(i))),
        lambda: loaded(whole_batch(0)).map(with_step),
    ],
)
def test_a_stream_of_ones_own_may_have_a_number_of_the_batch_so_it_only_warns(build):
    with pytest.warns(UserWarning, match=r"a number for all 16 rows .* call \.batch") as warned:
        assert first(build())["image"].shape[-1] == 4
    assert len(warned) == 1


@pytest.mark.parametrize("make", [image, whole_batch])
def test_of_arrays_alone_nothing_tells_so_random_access_warns_once(make):
    with pytest.warns(UserWarning, match=r"the pipeline has no \.batch.*for 16 rows") as warned:
        batch = first(records(make))
    assert len(warned) == 1
    assert batch["image"].shape == (16, 4)


def test_what_is_placed_ahead_as_it_is_counts_as_batches():
    with grain_shard.prefetch_to_device(records()) as batches:
        assert next(batches)["image"].shape == (16, 4)
