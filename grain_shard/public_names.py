"""Reads the public names of a module from its stub, which type checkers read, too."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` for a module that has a stub.

    Each name is imported when it is first used. So importing the package takes some milliseconds.
    Importing flax or Orbax with it would take a second.

    Args:
        package: The package to which the imports of the stub are relative.
        file: The ``__file__`` of the module. The stub (``.pyi``) is beside this file.
    """
    stub = Path(file).with_suffix(".pyi").read_text()
    module_of = {
        name: module
        for module, name in re.findall(r"^from \.(\S*) import (\w+) as \2$", stub, re.MULTILINE)
    }
    names = sorted(module_of)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # With ``from . import name`` in the stub, the name is a module itself.
        module = importlib.import_module(f"{package}.{module_of[name] or name}")
        return getattr(module, name) if module_of[name] else module

    return get, lambda: names, names
