"""Adds ``.shard_to`` as a method to Grain's datasets, and removes it."""

from __future__ import annotations

import inspect
import types
import warnings
from typing import Any

import grain

_NAME = "shard_to"
_CLASSES = (grain.MapDataset, grain.IterDataset)


class _OnUse:
    """The method `shard_to`. Its module is imported at the first use, not with the package."""

    def __get__(self, ds: Any, cls: type) -> Any:
        from grain_shard.transforms.chain import shard_to

        return shard_to if ds is None else types.MethodType(shard_to, ds)


def install() -> None:
    """Makes `shard_to` a method of Grain's datasets. ``import grain_shard`` calls this.

    A ``shard_to`` of another package is kept, with a warning.

    Example:
        >>> install()  # a second time does nothing
        >>> grain.MapDataset.shard_to is grain.IterDataset.shard_to
        True
    """
    for cls in _CLASSES:
        existing = inspect.getattr_static(cls, _NAME, None)
        if existing is None:
            setattr(cls, _NAME, _OnUse())
        elif not isinstance(existing, _OnUse):
            warnings.warn(
                f"grain.{cls.__name__} already has a method {_NAME!r} of another package, which"
                " stays as it is. Use ds.pipe(grain_shard.shard_to, mesh) in place of ds.shard_to.",
                stacklevel=3,
            )


def uninstall() -> None:
    """Removes the method `shard_to` from Grain's datasets. A method of another package stays.

    Example:
        >>> uninstall()
        >>> hasattr(grain.MapDataset, "shard_to")
        False
        >>> install()
    """
    for cls in _CLASSES:
        if isinstance(inspect.getattr_static(cls, _NAME, None), _OnUse):
            delattr(cls, _NAME)
