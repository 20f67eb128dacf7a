"""Public names, listed once: in a stub, which type checkers read as well."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` for a module that has such a stub.

    Each name is imported when it is used: the package alone takes some milliseconds, and flax or
    Orbax take a second.

    Args:
        package: The package to which the imports of the stub are relative.
        file: The ``__file__`` of the module; the stub is beside it.
    """
    module_of = {
        alias.name: node.module
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = sorted(module_of)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        if module is None:  # the name is the name of a module
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return get, lambda: names, names
