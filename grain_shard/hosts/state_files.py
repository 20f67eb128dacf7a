"""Where a state lies in a checkpoint: one file for all hosts, or one for each.

A state that is the same on every host (it has a fingerprint) goes into ``state.json``, written by
the first host. One that is this host's own goes into ``state-<host>-of-<hosts>.json``.
"""

from __future__ import annotations

import json
from typing import Any

import jax
from etils import epath

from grain_shard.errors import StateError

_SHARED = "state.json"
_OWN = "state-{host}-of-{hosts}.json"


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
        StateError: There is none; the message lists what there is.
    """
    directory = epath.Path(directory)
    for name in (_SHARED, _own_name()):
        if (directory / name).exists():
            return json.loads((directory / name).read_text())
    found = sorted(path.name for path in directory.glob("*")) if directory.exists() else []
    raise StateError(
        f"no state for host {jax.process_index()} of {jax.process_count()} in {directory}.\n"
        f"  found:  {', '.join(found) or 'nothing'}\n"
        "  remedy: a stream has a state for each host; restore it on as many hosts as saved it."
    )


def is_shared(state: dict[str, Any]) -> bool:
    """Whether the state is that of the whole program rather than of one host."""
    return "batch" in state


def _own_name() -> str:
    return _OWN.format(host=jax.process_index(), hosts=jax.process_count())
