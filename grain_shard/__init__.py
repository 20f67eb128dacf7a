"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.

What does not belong to every pipeline is in modules of its own: `grain_shard.checkpoint` (Orbax),
`grain_shard.rehearse` (many hosts on one machine), `grain_shard.placement` (batches on devices
without a pipeline), `grain_shard.training` (meshes, model states, data-parallel steps) and
`grain_shard.measuring` (throughput).
"""

import ast
import importlib
from pathlib import Path
from typing import Any

from grain_shard.install import install as install
from grain_shard.install import uninstall as uninstall

__version__ = "0.1.0"

# The public names are listed once, in the stub, which type checkers read as well. Each is imported
# when it is used: the package alone takes some milliseconds, and flax or Orbax take a second.
_MODULE_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module is None:  # the name is that of a module
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__


install()
