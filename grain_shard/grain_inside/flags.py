"""absl's flags: sent to other processes, and made readable for Grain."""

from __future__ import annotations

from typing import Any

from absl import flags


def flag_values() -> dict[str, Any]:
    """Returns the values of absl's flags, for another process; {} if nobody has parsed them.

    Grain's flags are left out, because Grain itself sends them to its workers.
    """
    if not flags.FLAGS.is_parsed():
        return {}
    return {name: flags.FLAGS[name].value for name in flags.FLAGS if not _is_grains(name)}


def set_flags(values: dict[str, Any]) -> None:
    """Sets flags of this process to the `flag_values` of another one.

    Without values, the flags stay unparsed, and a function that reads a flag gets the same error of
    absl as in the other process.
    """
    for name in values.keys() & set(flags.FLAGS):
        flags.FLAGS[name].value = values[name]
    if values:
        flags.FLAGS.mark_as_parsed()


def let_grain_read_its_flags() -> None:
    """Lets Grain start workers in a program that never parsed absl's flags (grain#1355).

    Only ``absl.app.run`` parses the flags. A plain script, a notebook or pytest never calls it, and
    Grain would then fail with ``UnparsedFlagAccessError``. So Grain's own flags count as given on
    the command line. All other flags stay unparsed.
    """
    for name in filter(_is_grains, flags.FLAGS):
        flags.FLAGS[name].present = flags.FLAGS[name].present or 1


def _is_grains(name: str) -> bool:
    return name.startswith("grain_")
