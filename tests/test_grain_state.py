"""The error for a checkpoint of Grain's own iterators gives the `seek` that goes on."""

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags

from grain_shard import StateError
from grain_shard.checkpoint import CheckpointRestore
from tests.conftest import data_mesh, ids, numbered


def records():
    return grain.MapDataset.range(44).seed(3).shuffle().map(lambda i: {"id": np.int32(i)})


def plain():
    return iter(records().batch(4).to_iter_dataset())


def in_workers():
    flags.FLAGS.mark_as_parsed()
    ds = records().batch(4).to_iter_dataset()
    return iter(ds.mp_prefetch(grain.MultiprocessingOptions(2)))


def batched_as_a_stream():
    return iter(records().to_iter_dataset().batch(4))


def elastic():
    return iter(grain.experimental.ElasticIterator(records(), 4, grain.sharding.NoSharding()))


@pytest.mark.parametrize("by", [CheckpointRestore, grain.checkpoint.CheckpointRestore])
@pytest.mark.parametrize(
    ("build", "text", "seek"),
    [
        (plain, "call batches.seek(3). Else call batches.seek(record=3 * n)", {"step": 3}),
        (batched_as_a_stream, "Else call batches.seek(record=12 * n)", {"record": 12}),
        (elastic, "call batches.seek(record=12)", {"record": 12}),
        pytest.param(in_workers, "call batches.seek(3)", {"step": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_seek_of_the_error_goes_on_after_what_was_read(build, text, seek, by, tmp_path):
    taken = build()
    for _ in range(3):
        next(taken)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(taken)))
    getattr(taken, "close", lambda: None)()
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        iter(records().batch(4).shard_to(data_mesh(2))) as iterator,
    ):
        with pytest.raises(StateError) as refusal:
            manager.restore(1, args=ocp.args.Composite(data=by(iterator)))
        assert text in str(refusal.value)
        iterator.seek(**seek)
        assert ids(iterator) == [batch["id"].tolist() for batch in plain()][3:]


def test_the_records_of_all_processes_are_counted(tmp_path):
    for process in range(2):
        (tmp_path / f"process_{process}-of-2.json").write_text('{"next_index": 6}')
    iterator = iter(records().batch(4).shard_to(data_mesh(2)))
    with iterator, pytest.raises(StateError, match=r"call batches\.seek\(record=12 \* n\)"):
        iterator.read_state(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"next_index": "3"}, "the state is not the state of a random-access pipeline"),
        ({"next_index": 1 << 4000, "processes": "4"}, r"batches\.seek\("),
        ({"iterators_in_use_states": 5}, "the state is not the state of a random-access pipeline"),
        ({"iterators_in_use_states": [{"next_index": 3}, 5]}, r"batches\.seek\(3\)"),
        ({"last_seen_indices": {"0": 7}, "worker_count": 0}, "it lacks 'step'"),  # a DataLoader's
    ],
)
def test_a_refused_state_changes_nothing(state, message):
    with iter(numbered(44, 4).shard_to(data_mesh(2))) as iterator:
        next(iterator)
        before = iterator.get_state()
        with pytest.raises(StateError, match=message):
            iterator.set_state(state)
        assert iterator.get_state() == before


def test_a_state_that_grains_own_argument_saved_is_restored(tmp_path):
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        iter(records().batch(4).shard_to(data_mesh(2))) as taken,
        iter(records().batch(4).shard_to(data_mesh(1))) as other,
    ):
        next(taken)
        manager.save(1, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(taken)))
        manager.wait_until_finished()
        assert list((tmp_path / "1" / "data").glob("process_0-of-*"))
        other.read_state(tmp_path / "1" / "data")
        assert ids(other) == ids(taken)
