"""Writes and reads the JSON files of a checkpoint, in which somebody else may have put anything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from etils import epath

from grain_shard.errors import StateError
from grain_shard.state_json import from_storage

_MOST_NAMES = 8  # most names that a message lists
_MOST_BYTES = 2**23  # of a file, so that any file is read or refused within a second


def listed(texts: Sequence[str]) -> str:
    """Joins at most eight texts for a message; returns "nothing" if there are none."""
    shown = [text if text.isprintable() else repr(text) for text in texts[:_MOST_NAMES]]
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return ", ".join(shown) + more or "nothing"


def write_object(path: epath.Path, state: dict[str, Any]) -> None:
    """Writes a state into a file, as a JSON object.

    Raises:
        StateError: The state is larger than `read_object` allows.
    """
    text = json.dumps(state)  # ASCII, so that a character is a byte
    if len(text) > _MOST_BYTES:
        raise StateError(
            f"a state of {len(text):,} bytes is too large for {path}, which takes {_MOST_BYTES:,}."
            "\n  remedy: let get_state() of the pipeline's iterator return its position, such as a"
            " seed and a count, in place of records or of their order."
        )
    path.write_text(text)


def read_object(path: epath.Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        StateError: The file does not hold a JSON object of a state, or cannot be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a read of a pipe may never end
        raise damaged(path, "it is a folder, a pipe or a device")
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        return from_storage(json.loads(content.decode()))
    except (ValueError, RecursionError) as error:  # no text, no JSON, too deep, or no state
        raise damaged(path, str(error).partition("\n")[0]) from error
    except OSError as error:
        remedy = "check that this host can read the file."
        raise StateError(f"{path} cannot be read: {error}\n  remedy: {remedy}") from error


def damaged(path: epath.Path, how: str) -> StateError:
    """Returns the error for a file with wrong contents.

    Args:
        path: The file.
        how: The fault in the contents.
    """
    return StateError(f"{path} is damaged: {how}.\n  remedy: restore another step.")
