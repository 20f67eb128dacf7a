"""The optional parts of this package, and the error if the module of a part is missing."""

from __future__ import annotations

from importlib.util import find_spec

from grain_shard.errors import GrainShardError

_MODULES = {"plot": "matplotlib", "plan": "libtpu"}


def require(extra: str, use: str, instead: str = "") -> None:
    """Raises an error if the module of an optional part is not installed.

    Args:
        extra: The optional part, such as "plot".
        use: What needs the part, as the subject of the message: "a timeline".
        instead: Another remedy, for the end of the message; "" for none.

    Raises:
        GrainShardError: The module of this part is not installed.
    """
    if find_spec(_MODULES[extra]) is None:
        raise GrainShardError(
            f"{use} needs {_MODULES[extra]}, which is not installed.\n"
            f'  remedy: pip install "grain-shard[{extra}]"{instead}'
        )
