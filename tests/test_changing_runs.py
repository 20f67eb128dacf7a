"""A run that changes its mind, on one host: another batch size, a schedule, any start, epochs.

What holds throughout: a state counts records, and everything else says how they are cut.
"""

import gc
import itertools
import json

import grain
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from grain_shard import (
    BatchLayout,
    BatchSchedule,
    PadToDivisible,
    ShardBatch,
    ShardingError,
    StateError,
)
from tests.conftest import (
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    ids,
    refused,
    to_numpy,
)
from tests.pipelines import after, flat, going_on, shared_out


def records(num_records=58):
    """Shuffled and augmented, so that a record read twice or elsewhere is seen."""
    return (
        grain.MapDataset.range(num_records)
        .seed(5)
        .shuffle()
        .random_map(lambda i, rng: {"id": np.int32(i), "noise": rng.normal(size=2)})
    )


def noted(num_records, read):
    """Records in order, each of which adds its index to the list `read` when it is read."""

    def record(i):
        read.append(i)
        return {"id": np.int32(i)}

    return grain.MapDataset.range(num_records).map(record)


def in_order(num_records=58, epochs=1):
    """The ids of all epochs, as plain Grain has them."""
    return [int(record["id"]) for record in records(num_records).repeat(epochs)]


def batched(ds, sizes):
    return ds.batch(sizes) if isinstance(sizes, int) else ds.pipe(BatchSchedule(sizes))


def sharded(sizes, num_records=58, epochs=1, devices=4, **options):
    ds = batched(records(num_records), sizes)
    ds = ds if epochs == 1 else ds.repeat(epochs)
    return ds.shard_to(data_mesh(devices), **options)


def rows(batches):
    return flat(ids(batches))


slow = pytest.mark.slow
GROWING, DROP, WORKERS = {0: 3, 4: 10, 7: 16}, {"remainder": "drop"}, {"num_workers": 2}
# By name: the sizes of the run, which may be a schedule; the batches until it stops; the sizes with
# which it goes on; the rows of the batches then; and the options.
GOING_ON = {
    "one at a time": (8, 3, 1, [1] * 34, {}),
    "smaller": (8, 3, 5, [5] * 6 + [4], {}),
    "the same": (8, 3, 8, [8, 8, 8, 8, 2], {}),
    "larger": (8, 3, 16, [16, 16, 2], {}),
    "larger than what is left": (8, 3, 48, [34], {}),
    "larger than the epoch": (8, 3, 100, [34], {}),
    "epochs keep their borders": (5, 2, 4, [2] + [4] * 6, {"num_records": 12, "epochs": 3}),
    "what a larger one would have dropped": (8, 2, 4, [4], {"num_records": 20, **DROP}),
    "a schedule, then a size": ({0: 4, 3: 16}, 4, 8, [8, 8, 8, 6], {}),
    # Its third step is of 4, the next ones of 16.
    "a size, then a schedule": (8, 2, {0: 4, 3: 16}, [4, 16, 16, 6], {}),
    "a schedule, not begun": (GROWING, 0, GROWING, [3, 3, 3, 3, 10, 10, 10, 16], {}),
    "a schedule, before a change": (GROWING, 3, GROWING, [3, 10, 10, 10, 16], {}),
    "a schedule, at a change": (GROWING, 4, GROWING, [10, 10, 10, 16], {}),
    "a schedule, after a change": (GROWING, 5, GROWING, [10, 10, 16], {}),
    "a schedule, at its end": (GROWING, 8, GROWING, [], {}),
    "larger, in workers": pytest.param(8, 3, 12, [12, 12, 10], WORKERS, marks=slow),
    "a schedule, in workers": pytest.param(
        GROWING, 1, GROWING, [3, 3, 3, 10, 10, 10, 16], WORKERS, marks=slow
    ),
}


class TestAnotherBatchSize:
    @pytest.mark.parametrize(
        ("sizes", "stop_after", "then", "lengths", "options"), GOING_ON.values(), ids=GOING_ON
    )
    def test_it_goes_on_with_the_next_record(self, sizes, stop_after, then, lengths, options):
        seen, state = after(sharded(sizes, **{**options, "num_workers": 0}), stop_after)
        ds = sharded(then, **options)
        rest = going_on(ds, state)
        # Hosts know by this number that a host has come to the end.
        assert ds.host.open(ds.host.from_state(state)).total == stop_after + len(rest)
        everything = in_order(options.get("num_records", 58), options.get("epochs", 1))
        assert flat(seen + rest) == everything
        assert [len(batch) for batch in rest] == lengths

    def test_feeds_go_on_with_another_size_that_they_divide(self):
        seen, state = after(in_feeds(32), 2)
        for size in (48, 20, 4, 96):
            rest = going_on(in_feeds(size), state)
            assert sorted(flat(seen + rest)) == list(range(200))
            taken, next_state = after(in_feeds(size), 1, state)
            again = going_on(in_feeds(32), next_state)
            assert sorted(flat(seen + taken + again)) == list(range(200))


def in_feeds(size):
    return shared_out(noted(200, []), 4, size).shard_to(data_mesh(4))


def stack(elements):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *elements)


class TestWhereNoOtherSizeCanBeHad:
    @pytest.mark.parametrize(
        "build",
        [
            lambda ds, size: ds.batch(size).map(lambda batch: batch),
            lambda ds, size: ds.batch(size, batch_fn=stack),
            lambda ds, size: ds.batch(size)[1:],
        ],
        ids=["a map after .batch", "a batch_fn", "a slice of batches"],
    )
    def test_it_is_refused_and_says_why_and_what_to_do(self, build):
        _, state = after(build(records(), 8).shard_to(data_mesh(4)), 2)
        assert going_on(build(records(), 8).shard_to(data_mesh(4)), state)
        with pytest.raises(StateError) as refusal:
            going_on(build(records(), 16).shard_to(data_mesh(4)), state)
        assert "global_batch_size" in str(refusal.value).splitlines()[0]
        assert "move every .map and slice before .batch" in str(refusal.value)

    def test_data_that_has_grown_is_refused_with_the_seek_that_goes_on(self):
        _, state = after(sharded(8), 2)
        with iter(sharded(8, 66)) as batches:
            with pytest.raises(StateError) as refusal:
                batches.set_state(state)
            assert "records: saved 58, now 66" in str(refusal.value)
            remedy = (
                "If the data has changed on purpose, call batches.seek(2) in place of the restore."
            )
            assert remedy in str(refusal.value)
            batches.seek(2)
            assert len(ids(batches)) == 7

    def test_what_else_changed_is_refused_as_ever(self):
        _, state = after(sharded(8), 2)
        for other, field in [
            (sharded(16, 59), "records"),
            (sharded(16, remainder="drop"), "remainder"),
            (records().map(lambda r: r).batch(16).shard_to(data_mesh(4)), "transforms"),
            (records().seed(9).shuffle().batch(16).shard_to(data_mesh(4)), "seeds, transforms"),
        ]:
            with pytest.raises(StateError, match=rf"another pipeline: .*{field}.* changed"):
                going_on(other, state)

    @pytest.mark.parametrize(
        "then",
        [
            lambda ds: ds.map(lambda batch: batch),
            lambda ds: ds.filter(lambda batch: True),
            lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(2)),
        ],
        ids=["map", "filter", "mp_prefetch"],
    )
    def test_a_stream_of_batches_counts_them_and_says_so(self, then):
        def stream(size):
            batches = then(records(40).batch(size).to_iter_dataset())
            return batches.shard_to(data_mesh(4))

        saved, other = iter(stream(8)), iter(stream(16))
        with saved, other, pytest.raises(StateError) as refusal:
            other.set_state(saved.get_state())
        assert "batch_sizes: saved [8], now [16]" in str(refusal.value)
        assert "MapDataset down to .batch" in str(refusal.value)

    def test_where_batches_are_made_as_a_whole_now_and_were_not_it_says_that(self):
        by_record = sharded(8)
        whole = records().batch(8, batch_fn=stack).shard_to(data_mesh(4))
        in_batches = "counts its position in batches"
        with iter(by_record) as one, iter(whole) as other:
            with pytest.raises(StateError, match=f"the current pipeline {in_batches}"):
                other.set_state(one.get_state())
            with pytest.raises(StateError, match=f"the pipeline of the state {in_batches}"):
                one.set_state(other.get_state())


class TestNoShortBatch:
    """``remainder="error"`` holds of every batch, wherever a run goes on."""

    def test_a_state_behind_which_batches_would_be_short_is_refused(self):
        _, state = after(sharded(8, 24, remainder="error"), 1)
        with iter(sharded(12, 24, remainder="error")) as iterator:
            with pytest.raises(ShardingError, match="from record 8 of epoch 0 on"):
                iterator.set_state(state)
            assert rows(iterator) == in_order(24), "it goes on as if nothing had been"
        assert going_on(sharded(4, 24, remainder="error"), state)[0] == in_order(24)[8:12]

    def test_seek_and_epochs_look_at_that_too(self):
        iterator = iter(sharded(8, 24, remainder="error"))
        with iterator, pytest.raises(ShardingError, match="from record 5 of epoch 0 on"):
            iterator.seek(record=5)
        with pytest.raises(ShardingError, match="do not fill the last batch of 12 or 16 rows"):
            sharded({0: 12, 2: 16}, 24, remainder="error").epochs(2)


class TestBatchSchedule:
    def test_alone_it_is_a_dataset_of_batches_like_any_other(self):
        ds = grain.MapDataset.range(21).map(lambda i: {"id": i}).pipe(BatchSchedule({0: 2, 3: 5}))
        bounds = itertools.pairwise([0, 2, 4, 6, 11, 16, 21])
        expected = [list(range(start, stop)) for start, stop in bounds]
        assert len(ds) == 6
        assert [ds[i]["id"].tolist() for i in range(6)] == expected
        assert [ds[i]["id"].tolist() for i in range(-6, 0)] == expected, "as in a list"
        assert [batch["id"].tolist() for batch in ds[1:5:2]] == expected[1:5:2]
        assert [batch["id"].tolist() for batch in ds.to_iter_dataset()] == expected
        assert [batch["id"].tolist() for batch in ds.map(lambda batch: batch)] == expected

    def test_in_shard_to_each_size_has_one_shape_padded_to_the_shards(self):
        shapes = []

        @jax.jit
        def step(batch):
            shapes.append(batch["noise"].shape)
            return batch["noise"].sum()

        ds = sharded({0: 3, 4: 10, 7: 16})
        batches = [to_numpy(batch) for batch in ds if step(batch) is not None]
        assert shapes == [(4, 2), (12, 2), (16, 2)], "one compilation for each"
        assert len(ds) == len(batches) == 4 + 3 + 1
        assert [batch["valid_mask"].sum() for batch in batches] == [3] * 4 + [10] * 3 + [16]
        assert rows(batches) == in_order()

    def test_steps_are_counted_on_over_epochs(self):
        ds = records(10).pipe(BatchSchedule({0: 4, 4: 8}))
        assert [len(ds), len(ds.repeat(3)), len(ds.repeat())] == [3, 7, np.iinfo(np.int64).max]
        sizes = [len(batch["id"]) for batch in ds.repeat(3)]
        assert sizes == [4, 4, 2, 4, 6, 8, 2]
        assert rows(ds.repeat(3).shard_to(data_mesh(2))) == in_order(10, 3)
        assert ids(ds.to_iter_dataset().shard_to(data_mesh(2))) == ids(ds.shard_to(data_mesh(2)))

    def test_without_the_remainder_and_with_an_error_for_it(self):
        ds = sharded({0: 4, 2: 8}, 20, epochs=2, remainder="drop")
        assert [len(batch) for batch in ids(ds)] == [4, 4, 8, 8, 8]
        assert len(ds) == 5
        assert rows(sharded({0: 4, 2: 8}, 24, remainder="error")) == in_order(24)
        with pytest.raises(ShardingError, match="do not fill the last batch"):
            sharded({0: 4, 2: 8, 4: 16}, 24, epochs=2, remainder="error")
        with pytest.raises(ShardingError, match="a batch of 6 rows does not split into 4 shards"):
            sharded({0: 4, 2: 6}, 24, remainder="drop")
        with pytest.raises(ShardingError, match="fewer records than one batch of 32 rows"):
            sharded({0: 4, 2: 32}, 24, remainder="drop")

    def test_a_host_reads_its_rows_and_no_others(self):
        seen = []
        ds = noted(20, seen).pipe(BatchSchedule({0: 4, 2: 8}))
        of_host = ds.pipe(PadToDivisible(4)).pipe(ShardBatch(BatchLayout(4, (1, 3))))
        assert ids([of_host[k] for k in range(4)]) == [[1, 3], [5, 7], [10, 11, 14, 15], [18, 19]]
        assert seen == [1, 3, 5, 7, 10, 11, 14, 15, 18, 19]

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            *(
                (sizes, f"whose first key is 0. Got {sizes!r}")
                for sizes in (
                    *({}, 256, [256, 512], {5: 256}, {0.0: 256}, {"0": 256}, {False: 256}),
                    *({0: 256, -3: 512}, {0: 256, 9: 512, 5: 1024}),
                )
            ),
            ({0: 0}, "the batch size from step 0 on=0"),
            ({0: 256, 5: -1}, "the batch size from step 5 on=-1"),
            ({0: 2.5}, "the batch size from step 0 on=2.5"),
            ({0: None}, "the batch size from step 0 on=None"),
        ],
    )
    def test_a_bad_schedule_is_refused(self, sizes, message):
        with refused(message):
            BatchSchedule(sizes)

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda ds: ds.to_iter_dataset().pipe(SCHEDULE), "Streams and feeds have one batch"),
            (lambda ds: ds.filter(bool).pipe(SCHEDULE).shard_to(), "a .filter drops elements"),
            (lambda ds: ds[:0].pipe(SCHEDULE), "the dataset has no records"),
            (lambda ds: ds.batch(4).repeat().pipe(SCHEDULE), "a BatchSchedule follows .batch(4)"),
            (lambda ds: ds.pipe(SCHEDULE).map(stack).shard_to(), "move this transformation before"),
            (lambda ds: ds.pipe(SCHEDULE)[1:].shard_to(), "move this transformation before"),
            (
                lambda ds: ds.pipe(SCHEDULE).to_iter_dataset().map(len).shard_to(),
                "move this transformation",
            ),
            (
                lambda ds: ds.pipe(SCHEDULE).repeat(2, reseed_each_epoch=False),
                "call .repeat on the records, before BatchSchedule",
            ),
            (lambda ds: ds.pipe(SCHEDULE).repeat(0), "num_epochs=0 is not an integer"),
        ],
    )
    def test_where_it_cannot_stand_it_is_refused(self, build, message):
        with jax.set_mesh(data_mesh(2)), refused(message):
            build(records())


SCHEDULE = BatchSchedule({0: 2, 3: 4})


class TestSeek:
    @pytest.mark.parametrize("sizes", [8, {0: 3, 4: 10}])
    def test_to_a_step_it_is_the_rest_of_the_run(self, sizes):
        everything = ids(sharded(sizes, epochs=2))
        _, state_of_another_size = after(sharded(4, epochs=2), 3)
        with iter(sharded(sizes, epochs=2)) as iterator:
            # Whatever was restored, steps are those of this pipeline from its beginning.
            iterator.set_state(state_of_another_size)
            for step in (5, 0, len(everything) - 1, 2, len(everything)):
                iterator.seek(step)
                assert iterator.get_state()["step"] == step
                assert ids(iterator) == everything[step:]
            # The step of a training state will do.
            for step in (np.int64(2), jax.numpy.asarray(2)):
                iterator.seek(step)
                assert ids(iterator) == everything[2:]

    def test_to_a_record_a_batch_begins_with_it(self):
        everything = in_order(20, 2)
        with iter(sharded(8, 20, epochs=2)) as iterator:
            for record in (0, 5, 8, 19, 20, 33, 40):
                iterator.seek(record=record)
                assert rows(iterator) == everything[record:]
            iterator.seek(record=29)  # in the fifth batch: records 28 to 35
            assert [iterator.get_state()[key] for key in ("step", "epoch", "record")] == [4, 1, 9]

    def test_it_reads_nothing_in_vain(self):
        read = []
        ds = grain.MapDataset.range(10**12).map(lambda i: read.append(i) or {"id": np.int32(0)})
        with iter(ds.batch(8).shard_to(data_mesh(4))) as iterator:
            iterator.seek(10**11)
            assert read == []
            next(iterator)
            assert min(read) == 8 * 10**11

    @pytest.mark.usefixtures("hints")
    def test_batches_made_as_a_whole_have_steps_and_no_records(self):
        ds = records().batch(8).map(lambda batch: batch)
        with iter(ds.shard_to(data_mesh(4))) as iterator:
            iterator.seek(3)
            assert rows(iterator) == in_order()[24:]
            with pytest.raises(ShardingError, match="position counts batches"):
                iterator.seek(record=24)

    @pytest.mark.parametrize(
        ("seek", "message"),
        [
            (lambda it: it.seek(9), "there is no step 9: the dataset has 8 batches"),
            (lambda it: it.seek(-1), "there is no step -1"),
            (lambda it: it.seek("2"), "the step '2' is not an int"),
            (lambda it: it.seek(2.0), "the step 2.0 is not an int"),
            (lambda it: it.seek(record=59), "there is no record 59: all epochs together have 58"),
            (lambda it: it.seek(record=-1), "there is no record -1"),
            (lambda it: it.seek(record=1.0), "the record 1.0 is not an int"),
            (lambda it: it.seek(True), "the step True is not an int"),
            (lambda it: it.seek(), "a step or a record"),
            (lambda it: it.seek(1, record=8), "a step or a record"),
        ],
    )
    def test_what_is_not_there_is_refused_and_changes_nothing(self, seek, message):
        with iter(sharded(8)) as iterator:
            next(iterator)
            with refused(message):
                seek(iterator)
            assert rows(iterator) == in_order()[8:]


class TestEpochs:
    @pytest.mark.parametrize(
        ("remainder", "hints"),
        [
            ("pad", "with Grain's hints"),
            ("drop", "with Grain's hints"),
            ("pad", "public path only"),  # which refuses "drop" of what .repeat makes
        ],
        indirect=["hints"],
    )
    @pytest.mark.parametrize(
        "build",
        [
            lambda ds: ds.batch(8),
            lambda ds: ds.pipe(BatchSchedule({0: 4, 7: 8})),
            lambda ds: ds.batch(8).map(lambda batch: batch),
            lambda ds: ds.batch(8).repeat(2),
        ],
        ids=["records", "a schedule", "a map after .batch", "two epochs in one"],
    )
    def test_they_are_those_of_repeat_kept_apart(self, build, remainder, hints):
        whole = build(records(20)).repeat(3).shard_to(data_mesh(4), remainder=remainder)
        with build(records(20)).shard_to(data_mesh(4), remainder=remainder).epochs(3) as epochs:
            assert len(epochs) == 3
            seen = []
            for epoch, batches in enumerate(epochs):
                assert batches.epoch == epoch
                length = len(batches)
                seen.append([to_numpy(batch) for batch in batches])
                assert length == len(seen[-1])
                assert list(batches) == [], "it has come to its end"
        jax.tree.map(np.testing.assert_array_equal, flat(seen), [to_numpy(b) for b in whole])
        assert len(seen) == 3
        assert ids(seen[0]) != ids(seen[1])

    @pytest.mark.usefixtures("hints")
    def test_one_left_early_is_skipped_and_not_read_any_more(self):
        everything = ids(sharded(8, 20, epochs=3))
        with sharded(8, 20).epochs(3) as epochs:
            first = next(epochs)
            next(first)
            second = next(epochs)
            assert epochs.get_state()["step"] == 3, "it stands at the second epoch"
            assert list(first) == [], "the first one is over"
            assert ids(second) == everything[3:6]
            assert next(epochs).epoch == 2
            with pytest.raises(StopIteration):
                next(epochs)
            with pytest.raises(StopIteration):
                next(epochs)

    def test_a_loop_after_all_were_taken_by_next_starts_again(self):
        with sharded(8, 20).epochs(2) as epochs:
            taken = [ids(next(epochs)), ids(next(epochs))]
            end = epochs.get_state()
            assert [ids(batches) for batches in epochs] == taken
        with sharded(8, 20).epochs(2) as epochs:
            epochs.set_state(end)
            assert list(epochs) == [], "a restored end is the end"

    def test_an_item_is_no_batch_and_says_so(self):
        with sharded(8).epochs(2) as epochs, pytest.raises(TypeError, match="for batch in batches"):
            next(epochs)["id"]

    def test_the_next_epochs_first_batch_is_ready_when_an_epoch_ends(self):
        read = []
        with noted(16, read).batch(8).shard_to(data_mesh(4)).epochs(2) as epochs:
            assert ids(next(epochs)) == [list(range(8)), list(range(8, 16))]
            eventually(lambda: len(read) == 32)

    @pytest.mark.usefixtures("hints")
    @pytest.mark.parametrize("stop_after", [0, 2, 3, 4, 8, 9])
    def test_there_is_one_state_for_all_of_them(self, stop_after):
        everything = ids(sharded(8, 20, epochs=3))
        with sharded(8, 20).epochs(3) as epochs:
            taken = 0
            for batches in epochs:
                while taken < stop_after and next(batches, None) is not None:
                    taken += 1
                if taken == stop_after:
                    break
            state = json.loads(json.dumps(epochs.get_state()))
        with sharded(8, 20).epochs(3) as epochs:
            epochs.set_state(state)
            rest = [(batches.epoch, ids(batches)) for batches in epochs]
        assert flat(batches for _, batches in rest) == everything[stop_after:]
        assert [epoch for epoch, _ in rest] == list(range(stop_after // 3, 3))

    def test_it_is_the_state_of_any_iterator_over_the_dataset_with_batches_of_any_size(self):
        seen, state = after(sharded(8, 20), 2)
        with sharded(3, 20).epochs(2) as epochs:
            epochs.set_state(state)
            for epoch, length in ((0, 2), (1, 7)):
                batches = next(epochs)
                assert (batches.epoch, len(batches)) == (epoch, length)
                seen += ids(batches)
        assert flat(seen) == in_order(20, 2)

    def test_a_restore_in_the_middle_of_an_epoch_ends_the_one_that_was_under_way(self):
        with sharded(8, 20).epochs(2) as epochs:
            batches = next(epochs)
            next(batches)
            state = epochs.get_state()
            next(batches)
            with pytest.raises(StateError):
                epochs.set_state({**state, "records": 21})
            with pytest.raises(ShardingError):
                epochs.seek(100)
            next(batches)  # what is refused changes nothing
            epochs.set_state(state)
            assert list(batches) == []
            assert rows(next(epochs)) == in_order(20)[8:]
            epochs.seek(record=25)
            assert rows(next(epochs)) == in_order(20, 2)[25:]

    @pytest.mark.parametrize("leave", [False, True], ids=["to the end", "left in the last one"])
    def test_a_second_loop_over_them_begins_with_the_first_again(self, leave):
        with sharded(8, 20).epochs(2) as epochs:
            for batches in epochs:
                assert len([next(batches)] if leave else list(batches)) == (1 if leave else 3)
            seen = [(batches.epoch, rows(batches)) for batches in epochs]
        assert seen == [(0, in_order(20, 2)[:20]), (1, in_order(20, 2)[20:])]

    def test_a_list_of_them_may_be_looped_over(self):
        seen = [rows(batches) for batches in list(sharded(8, 20).epochs(2))]
        assert seen == [in_order(20, 2)[:20], in_order(20, 2)[20:]]

    def test_reset_goes_back_to_the_first_batch_of_an_epoch_or_of_all(self):
        with sharded(8, 20).epochs(2) as epochs:
            next(epochs)
            batches = next(epochs)
            evaluated = []
            for _ in range(2):
                batches.reset()
                evaluated.append(rows(batches))
            assert evaluated == [in_order(20, 2)[20:]] * 2
            epochs.reset()
            assert rows(next(epochs)) == in_order(20, 2)[:20]

    def test_one_that_nobody_refers_to_any_more_ends_without_the_garbage_collector(self):
        before = background_threads()
        gc.disable()
        try:
            batches = next(sharded(8).epochs(2))
            next(batches)
            threads = background_threads() - before
            assert threads
            del batches
            assert_ended(threads)
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: sharded(8).epochs(0), "n=0 is not an integer of at least 1"),
            (lambda: sharded(8).epochs(2.0), "n=2.0 is not an integer"),
            (lambda: in_feeds(8).epochs(2), "docs/streams.md#several-epochs"),
            (
                lambda: records().to_iter_dataset().map(len).batch(8).shard_to().epochs(2),
                "call iter(ds) once per epoch",
            ),
            *(
                (lambda build=build: build(records()).shard_to().epochs(2), "remove .repeat() from")
                for build in (
                    lambda ds: ds.batch(8).repeat(),
                    lambda ds: ds.repeat().batch(8),
                    lambda ds: ds.repeat().batch(8).map(dict),
                )
            ),
        ],
    )
    def test_misuse_is_refused(self, build, message):
        with jax.set_mesh(data_mesh(4)), refused(message):
            build()


@st.composite
def schedules(draw, largest):
    steps = [0, *draw(st.sets(st.integers(1, 8), max_size=2).map(sorted))]
    return {step: draw(st.integers(1, largest)) for step in steps}


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(data=st.data(), epochs=st.integers(1, 3), drops=st.booleans())
def test_records_come_in_order_whatever_the_sizes_meshes_and_interruptions(data, epochs, drops):
    """``remainder="drop"`` leaves out the end of an epoch if it is too short for a batch."""
    num_records = data.draw(st.integers(1, 40), label="records")
    everything, stop, state = in_order(num_records, epochs), 0, None
    for most_batches in (5, 5, 5, 5, None):
        sizes = data.draw(schedules(num_records if drops else 20), label="sizes")
        devices = 1 if drops else data.draw(st.sampled_from([1, 2, 4, 8]), label="devices")
        remainder = "drop" if drops else "pad"
        cut_by = sizes if len(sizes) > 1 else sizes[0]  # a schedule, or the size of `.batch`
        ds = sharded(cut_by, num_records, epochs, devices, remainder=remainder)
        taken = most_batches and data.draw(st.integers(0, most_batches), label="batches")
        with iter(ds) as iterator:
            if state is not None:
                iterator.set_state(state)
            for batch in ids(itertools.islice(iterator, taken)):
                left = -stop % num_records  # records of the epoch
                start = stop + left if drops and left < len(batch) else stop
                stop = start + len(batch)
                assert batch == everything[start:stop]
            state = json.loads(json.dumps(iterator.get_state()))
    assert stop == len(everything) or (drops and len(everything) - stop < max(sizes.values()))


@pytest.mark.parametrize("size", [3, 12, 100, 768])
def test_records_without_an_end_are_cut_by_records_whatever_the_size(size):
    ds = grain.MapDataset.range(20).map(lambda i: {"id": np.int32(i)}).repeat().batch(size)
    with iter(ds.shard_to(data_mesh(4))) as iterator:
        assert iterator.get_state()["record"] == 0, "batches of a slice or a batch_fn have none"
        ids = np.asarray(next(iterator)["id"])[:size]
    np.testing.assert_array_equal(ids, np.arange(size) % 20)
