"""Where a state lies in a checkpoint: one file for all hosts, or one for each.

A state that is the same on every host, that of a random-access pipeline, goes into ``state.json``,
written by the first host. One that is this host's own goes into ``state-<host>-of-<hosts>.json``.
Those of feeds are read by any number of hosts, as one state with the feeds of all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from grain_shard.errors import StateError

# The key of a state that says what kind of pipeline it is of, and the kinds.
KIND = "kind"
RANDOM_ACCESS, STREAM, FEEDS = "random access", "stream", "feeds"
FEED_ENTRIES = "feeds"  # the key of a state of feeds under which each feed has its entry

_SHARED = "state.json"
_OWN = "state-{host}-of-{hosts}.json"
_ANY_HOST = "state-*-of-*.json"


def write_state(directory: Any, state: dict[str, Any]) -> None:
    """Writes the state of this host's iterator; every host calls it.

    Args:
        directory: A folder that exists.
        state: What ``get_state`` gave.
    """
    directory = epath.Path(directory)
    if is_shared(state):
        if jax.process_index() == 0:
            (directory / _SHARED).write_text(json.dumps(state))
    else:
        (directory / _own_name()).write_text(json.dumps(state))


def read_state(directory: Any) -> dict[str, Any]:
    """Reads the state for this host's iterator.

    Raises:
        StateError: There is none, and the message lists what there is; or a file is damaged.
    """
    directory = epath.Path(directory)
    for name in (_SHARED, _own_name()):
        if (directory / name).exists():
            state = _parsed(directory / name)
            if state.get(KIND) != FEEDS:
                return state
    of_hosts = [_parsed(path) for path in sorted(directory.glob(_ANY_HOST))]
    if of_hosts and all(state.get(KIND) == FEEDS for state in of_hosts):
        return _joined(of_hosts)
    found = sorted(path.name for path in directory.glob("*")) if directory.exists() else []
    raise StateError(
        f"no state for host {jax.process_index()} of {jax.process_count()} in {directory}.\n"
        f"  found:  {', '.join(found) or 'nothing'}\n"
        "  remedy: a stream has a state for each host; restore it on as many hosts as saved it."
    )


def _parsed(path: epath.Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except ValueError as error:  # of JSON, or of the encoding
        raise StateError(_damaged(path, str(error))) from error
    if not isinstance(state, dict):
        raise StateError(_damaged(path, f"a {type(state).__name__} in place of an object"))
    return state


def _damaged(path: epath.Path, how: str) -> str:
    return f"{path} is damaged: {how}.\n  remedy: restore another step."


def is_shared(state: dict[str, Any]) -> bool:
    """Whether the state is that of the whole program rather than of one host."""
    return state.get(KIND) == RANDOM_ACCESS


def _joined(of_hosts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state with the feeds of all hosts.

    Raises:
        StateError: The hosts saved at different steps, or ran different pipelines.
    """
    first = of_hosts[0]
    for state in of_hosts[1:]:
        differing = [n for n in first if n != FEED_ENTRIES and state.get(n) != first[n]]
        if differing:
            raise StateError(
                f"the hosts' states differ in {', '.join(differing)}: they are not of one"
                " checkpoint.\n  remedy: restore another step."
            )
    entries = {feed: entry for s in of_hosts for feed, entry in s.get(FEED_ENTRIES, {}).items()}
    return {**first, FEED_ENTRIES: entries}


def _own_name() -> str:
    return _OWN.format(host=jax.process_index(), hosts=jax.process_count())
