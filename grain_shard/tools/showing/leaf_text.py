"""A leaf of a batch in a few words: ``f32[256@data,224,224,3]``, and what of it a device holds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding


class LeafText(NamedTuple):
    """One leaf in words; the numbers are None if it is on no device.

    Attributes:
        text: Dtype, global shape, and the mesh axes that shard each dim, as JAX writes them.
        rows_per_device: How many of its rows one device holds.
        bytes_per_device: How many of its bytes one device holds.
    """

    text: str
    rows_per_device: int | None = None
    bytes_per_device: int | None = None

    @classmethod
    def of(cls, leaf: Any, row_dims: int = 1) -> LeafText:
        """The text of a `jax.Array`, a `jax.ShapeDtypeStruct` or a numpy array.

        Args:
            leaf: The array.
            row_dims: How many of its dims, from the first on, count rows.
        """
        if not hasattr(leaf, "dtype"):
            return cls(f"{type(leaf).__name__} on the host")
        sharding = getattr(leaf, "sharding", None)
        spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        text = f"{_dtype(leaf.dtype)}[{_dims(leaf.shape, spec)}]"
        if sharding is None:
            return cls(f"{text} on the host")
        shard = sharding.shard_shape(leaf.shape)
        rows = math.prod(shard[:row_dims]) if shard else None
        return cls(text, rows, math.prod(shard) * leaf.dtype.itemsize)


def _dtype(dtype: np.dtype) -> str:
    """The name that JAX prints: f32, bf16, i8, u8, bool; and str."""
    name = "str" if dtype.kind in "US" else dtype.name
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    return name


def _dims(shape: tuple[int, ...], spec: tuple[Any, ...]) -> str:
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return ",".join(f"{size}{_at(entry)}" for size, entry in zip(shape, entries, strict=False))


def _at(entry: Any) -> str:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    if not axes:
        return ""
    return f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})"
