"""The files of a state in a checkpoint: one for all hosts, one for each, or one for a few feeds.

The state of a random-access pipeline, which is the same on every host, goes into ``state.json``,
written by the first host. A host's own state goes into ``state-<host>-of-<hosts>.json``.
Those of feeds are read by any number of hosts; their files are in `feed_files`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jax
from etils import epath

from grain_shard.errors import StateError
from grain_shard.hosts.feed_files import (
    FeedFile,
    OwnFeeds,
    read_feeds,
    read_object,
    write_feeds,
)

# The key under which a state names the kind of its pipeline, and the kinds.
KIND = "kind"
RANDOM_ACCESS, STREAM, FEEDS = "random access", "stream", "feeds"

# The key that is added to the state of a Grain iterator: the number of processes that saved one.
PROCESSES = "processes"

_SHARED = "state.json"
_OF_GRAIN = re.compile(r"process_0-of-(\d+)\.json")  # Grain's handler writes one for each process
_OWN = "state-{host}-of-{hosts}.json"
_NO_FEEDS = OwnFeeds()


def write_state(directory: Any, state: dict[str, Any], feeds: OwnFeeds = _NO_FEEDS) -> None:
    """Writes the state of this host's iterator; every host calls it.

    Args:
        directory: A folder that exists.
        state: The state that ``get_state`` returned.
        feeds: The feeds of this host, if the state is of feeds.
    """
    directory = epath.Path(directory)
    if state.get(KIND) == FEEDS:
        write_feeds(directory, state, feeds.saved)
    elif not is_shared(state):
        (directory / _own_name()).write_text(json.dumps(state))
    elif jax.process_index() == 0:
        (directory / _SHARED).write_text(json.dumps(state))


def read_state(directory: Any, feeds: OwnFeeds = _NO_FEEDS) -> dict[str, Any]:
    """Reads the state for this host's iterator, from no more files than it is in.

    Args:
        directory: The folder into which the state was written.
        feeds: The feeds of this host, if its pipeline is one of feeds.

    Raises:
        StateError: There is no state, and the message lists the folder's files; a file is damaged;
            or files do not fit together.
    """
    directory = epath.Path(directory)
    found = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    for name in (_SHARED, _own_name()):
        if name in found:
            return read_object(directory / name)
    if files := [file for file in map(FeedFile.named, found) if file]:
        return read_feeds(directory, files, feeds.run)
    for match in filter(None, map(_OF_GRAIN.fullmatch, found)):
        state = read_object(directory / match[0])
        if KIND not in state:
            return {**state, PROCESSES: int(match[1])}
    remedy = "restore on as many hosts as saved the state: each host of a stream has its own state."
    if not any(name.startswith("state-") for name in found):
        remedy = "pass the folder into which the state was saved, or restore another step."
    raise StateError(
        f"no state for host {jax.process_index()} of {jax.process_count()} in {directory}.\n"
        f"  found:  {', '.join(found) or 'nothing'}\n"
        f"  remedy: {remedy}"
    )


def is_shared(state: dict[str, Any]) -> bool:
    """Returns whether the state belongs to the whole program rather than to one host."""
    return state.get(KIND) == RANDOM_ACCESS


def _own_name() -> str:
    return _OWN.format(host=jax.process_index(), hosts=jax.process_count())
