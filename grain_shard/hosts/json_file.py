"""A file of a checkpoint as plain JSON; one that is damaged is named."""

from __future__ import annotations

import json
from typing import Any

from etils import epath

from grain_shard.errors import StateError


def read_object(path: epath.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        StateError: It holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # of JSON, or of the encoding
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise damaged(path, f"a {type(found).__name__} in place of an object")
    return found


def damaged(path: epath.Path, how: str) -> StateError:
    """What to raise of a file that does not hold what it should."""
    return StateError(f"{path} is damaged: {how}.\n  remedy: restore another step.")
