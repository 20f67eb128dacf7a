"""What a checkpoint's folder may hold, and what is said of what it should not."""

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from grain_shard import StateError
from grain_shard.checkpoint import CheckpointItem
from grain_shard.hosts.state_files import read_state, write_state


def test_a_state_of_a_stream_is_in_a_file_of_the_host(tmp_path):
    state = {"kind": "stream", "parent": {"next": 5}}
    write_state(tmp_path, state)
    assert [path.name for path in tmp_path.iterdir()] == ["state-0-of-1.json"]
    assert read_state(tmp_path) == state


@pytest.mark.parametrize("name", ["state.json", "state-0-of-1.json"])
@pytest.mark.parametrize("content", [b"", b'{"batch": 3', b"\xff\xfe\x00", b"5", b"null"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StateError, match=rf"{name} is damaged: .+\n  remedy: restore another step"):
        read_state(tmp_path)


def test_a_folder_without_a_state_lists_what_is_there(tmp_path):
    (tmp_path / "state-1-of-2.json").write_text('{"kind": "stream", "parent": {}}')
    match = (
        r"host 0 of 1(.|\n)*found:  state-1-of-2\.json\n  remedy: restore on the number of hosts"
        r" that saved"
    )
    with pytest.raises(StateError, match=match):
        read_state(tmp_path)


@pytest.mark.parametrize("name", [".", "not there"])
def test_a_folder_whose_files_are_gone_is_not_taken_for_that_of_a_stream(tmp_path, name):
    with pytest.raises(
        StateError,
        match=r"found:  nothing\n  remedy: pass the folder into which the state was saved",
    ):
        read_state(tmp_path / name)


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
