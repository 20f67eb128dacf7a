"""Writes and reads the files of a checkpoint that hold the state of an iterator.

The state of a random-access pipeline is the same on every host. The first host writes it into
``state.json``. The state of a stream differs between hosts. Each host writes its own state into
``state-<host>-of-<hosts>.json``. The states of feeds are in files that any number of hosts can
read; see `feed_files`.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from etils import epath

from grain_shard.errors import StateError
from grain_shard.hosts.feed_files import FeedFile, OwnFeeds, read_feeds, write_feeds
from grain_shard.hosts.json_files import listed, read_object, write_object

# The key of a state for the kind of its pipeline, and its three values.
KIND = "kind"
RANDOM_ACCESS, STREAM, FEEDS = "random access", "stream", "feeds"

# A key that is added to the state of a Grain iterator: the number of processes that saved it.
PROCESSES = "processes"

_SHARED = "state.json"
_OF_GRAIN = re.compile(r"process_0-of-(\d+)\.json")  # Grain writes one such file for each process
_NO_FEEDS = OwnFeeds()


def write_state(directory: Any, state: dict[str, Any], feeds: OwnFeeds = _NO_FEEDS) -> None:
    """Writes the state of this host's iterator into files. Every host must call this.

    Args:
        directory: A folder that exists.
        state: The state that ``get_state`` returned.
        feeds: The feeds of this host. They are used only if the pipeline is made of feeds.
    """
    directory = epath.Path(directory)
    if state.get(KIND) == FEEDS:
        write_feeds(directory, state, feeds.saved)
    elif not is_shared(state):
        write_object(directory / _own_name(), state)
    elif jax.process_index() == 0:
        write_object(directory / _SHARED, state)


def read_state(directory: Any, feeds: OwnFeeds = _NO_FEEDS) -> dict[str, Any]:
    """Reads the state for this host's iterator, and only the files that this host needs.

    Args:
        directory: The folder into which the state was written.
        feeds: The feeds of this host. They are used only if the pipeline is made of feeds.

    Returns:
        The state. It may be the state of a Grain iterator, to which the number of processes is
        added.

    Raises:
        StateError: The folder has no state for this host (the message lists its files); a file is
            damaged; or files are not from the same step and pipeline.
    """
    directory = epath.Path(directory)
    try:
        found = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    except OSError as error:
        remedy = "pass the folder into which the state was saved."
        raise StateError(f"{directory} cannot be read: {error}\n  remedy: {remedy}") from error
    for name in (_SHARED, _own_name()):  # of random access, or of a stream
        if name in found:
            return read_object(directory / name)
    # `named` returns None for a file that does not hold feeds.
    if files := [file for file in map(FeedFile.named, found) if file]:
        return read_feeds(directory, files, feeds.run)
    for match in filter(None, map(_OF_GRAIN.fullmatch, found)):
        state = read_object(directory / match[0])
        if KIND not in state:  # the state of an iterator of Grain
            return {**state, PROCESSES: int(match[1])}
        if is_shared(state):  # Grain's own CheckpointSave got an iterator of ours
            return state
    remedy = (
        "restore on the number of hosts that saved the state, because a stream saves a state of its"
        " own on each host."
    )
    if not any(name.startswith("state-") for name in found):  # not the state of a stream
        remedy = "pass the folder into which the state was saved, or restore another step."
    raise StateError(
        f"no state for host {jax.process_index()} of {jax.process_count()} in {directory}.\n"
        f"  found:  {listed(found)}\n"
        f"  remedy: {remedy}"
    )


def is_shared(state: dict[str, Any]) -> bool:
    """Returns True if the state is the same on all hosts, as in random access."""
    return state.get(KIND) == RANDOM_ACCESS


def _own_name() -> str:
    return f"state-{jax.process_index()}-of-{jax.process_count()}.json"
