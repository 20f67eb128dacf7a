"""A run goes on from the checkpoint that Grain's own iterators have written, or says how it can."""

import logging

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags

from grain_shard import StateError, rehearse
from grain_shard.checkpoint import CheckpointRestore
from tests.conftest import data_mesh, ids, numbered
from tests.on_hosts import own_rows


def records():
    return grain.MapDataset.range(44).seed(3).shuffle().map(lambda i: {"id": np.int32(i)})


def plain():
    return records().batch(4).to_iter_dataset()


def in_threads():
    return grain.experimental.ThreadPrefetchIterDataset(plain(), prefetch_buffer_size=2)


def in_workers():
    flags.FLAGS.mark_as_parsed()
    return plain().mp_prefetch(grain.MultiprocessingOptions(2))


def batched_as_a_stream():
    return records().to_iter_dataset().batch(4)


def restore(iterator, folder, by):
    with ocp.CheckpointManager(folder) as manager:
        manager.restore(1, args=ocp.args.Composite(data=by(iterator)))


HANDLERS = [CheckpointRestore, grain.checkpoint.CheckpointRestore]


def save_after_three_elements(ds, folder):
    """Grain saves its own iterator."""
    taken = iter(ds)
    for _ in range(3):
        next(taken)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(taken)))
        manager.wait_until_finished()
    if hasattr(taken, "close"):
        taken.close()


def batches_after_three():
    return [batch["id"].tolist() for batch in plain()][3:]


@pytest.mark.parametrize("by", HANDLERS)
def test_records_are_counted_so_the_run_goes_on_and_the_log_says_what_is_assumed(
    by, tmp_path, caplog
):
    elastic = grain.experimental.ElasticIterator(records(), 4, grain.sharding.NoSharding())
    save_after_three_elements(elastic, tmp_path)
    with iter(records().batch(4).shard_to(data_mesh(2))) as iterator:
        restore(iterator, tmp_path, by)
        assert iterator.get_state()["record"] == 12
        assert ids(iterator) == batches_after_three()
    (line,) = [line for line in caplog.records if "iterator of Grain" in line.getMessage()]
    assert "goes on after the first 12 records" in line.getMessage()
    assert line.levelno == logging.WARNING


@pytest.mark.parametrize("by", HANDLERS)
@pytest.mark.parametrize(
    ("build", "seek"),
    [
        (plain, {"step": 3}),
        (in_threads, {"step": 3}),
        (batched_as_a_stream, {"record": 12}),
        pytest.param(in_workers, {"step": 3}, marks=pytest.mark.slow),
    ],
)
def test_elements_may_be_batches_or_records_and_the_error_has_the_seek_of_both(
    build, seek, by, tmp_path
):
    save_after_three_elements(build(), tmp_path)
    with iter(records().batch(4).shard_to(data_mesh(2))) as iterator:
        with pytest.raises(StateError) as refusal:
            restore(iterator, tmp_path, by)
        given = next(iter(seek.values()))
        text = str(refusal.value)
        assert f"if .batch stood before .to_iter_dataset(), call batches.seek({given})." in text
        assert f".batch stood after .to_iter_dataset(), call batches.seek(record={given})." in text
        iterator.seek(**seek)
        assert ids(iterator) == batches_after_three()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"next_index": 3},
            r"stood before .+, call batches.seek\(3\)\. .+ after .+ batches.seek\(record=3\)\.",
        ),
        ({"next_index": 3.0}, "the state is not the state of a random-access pipeline"),
        ({"global_next_index": 99}, "there is no record 99"),
        ({"next_index": 3, "processes": 2}, r"seek\(record=6 \* b\)"),
        ({"last_seen_indices": {"0": 7}, "worker_count": 0}, "it lacks 'step'"),  # a DataLoader's
    ],
)
def test_a_place_that_is_not_there_or_not_known_is_refused_and_changes_nothing(state, message):
    with iter(numbered(44, 4).shard_to(data_mesh(2))) as iterator:
        next(iterator)
        before = iterator.get_state()
        with pytest.raises(StateError, match=message):
            iterator.set_state(state)
        assert iterator.get_state() == before


def move_over(folder):
    """On a host: how each handler refuses what Grain saved, and the rows after the seek."""
    part = records()[jax.process_index() :: jax.process_count()]
    save_after_three_elements(part.batch(2).to_iter_dataset(), folder)
    texts = []
    with iter(records().batch(4).shard_to(data_mesh(2), timeout_s=30)) as iterator:
        for by in HANDLERS:
            with pytest.raises(StateError) as refusal:
                restore(iterator, folder, by)
            texts.append(str(refusal.value))
        iterator.seek(record=6 * 2)
        return texts, list(own_rows(next(iterator)).values())


@pytest.mark.slow
def test_of_two_processes_the_error_has_the_seek_that_goes_on(tmp_path):
    found = rehearse.run(move_over, str(tmp_path), hosts=2, timeout_s=60)
    for texts, _ in found:
        for text in texts:
            assert "2 processes" in text
            assert "batches.seek(record=6 * b)" in text
    assert [row for _, rows in found for row in rows] == batches_after_three()[0]
