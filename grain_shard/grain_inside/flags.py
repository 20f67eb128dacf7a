"""`FlagValues`: the absl flags of another process; and Grain's own flags, which it must read."""

from __future__ import annotations

from typing import Any

from absl import flags

# Grain sets this flag in its worker processes, so that errors keep their tracebacks.
_SET_BY_GRAIN = "grain_py_traceback_filtering"


_in_force: FlagValues | None = None  # the values that this process has now


class FlagValues:
    """The values of absl's flags, for another process.

    Args:
        is_parsed: Whether the flags are parsed. Without that absl raises an error if a function
            reads a flag.
        values: The value of each flag, and how often the command line has the flag.
    """

    def __init__(self, is_parsed: bool, values: dict[str, tuple[Any, int]]):
        self._is_parsed, self._values = is_parsed, values
        self._applied = set[str]()

    @classmethod
    def here(cls) -> FlagValues:
        """Returns the values in this process."""
        found = {name: flags.FLAGS[name] for name in flags.FLAGS if name != _SET_BY_GRAIN}
        values = {name: (flag.value, flag.present) for name, flag in found.items()}
        return cls(flags.FLAGS.is_parsed(), values)

    def apply(self) -> None:
        """Sets the flags of this process that are defined and were not set by an earlier call.

        After a call for the flags of another world, all of them are set again.
        """
        global _in_force
        if _in_force is not self:
            _in_force, self._applied = self, set()
        if self._is_parsed:
            flags.FLAGS.mark_as_parsed()
        for name, (value, present) in self._values.items():
            if name in flags.FLAGS and name not in self._applied:
                self._applied.add(name)
                flags.FLAGS[name].value, flags.FLAGS[name].present = value, present


def let_grain_read_its_flags() -> None:
    """Lets Grain start workers in a program that never parsed absl's flags (grain#1355).

    Only ``absl.app.run`` parses the flags. A plain script, a notebook or pytest never calls it, and
    Grain would then fail with ``UnparsedFlagAccessError``. So Grain's own flags count as given on
    the command line. All other flags stay as they are: to read them is an error before absl has
    parsed them.
    """
    for name in flags.FLAGS:
        if name.startswith("grain_"):
            flags.FLAGS[name].present = flags.FLAGS[name].present or 1
