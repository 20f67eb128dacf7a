"""Bit for bit: batches against what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.soak import model
from benchmarks.soak.meshes import DrawnMesh


class Difference(AssertionError):
    """Something is not what it should be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Difference(message)


def same_leaf(where: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Compares shape, dtype and every bit; text by what it says."""
    found = np.asarray(found)
    require(found.shape == expected.shape, f"{where}: {found.shape}, not {expected.shape}")
    if expected.dtype.kind == "U":
        equal = found.tolist() == expected.tolist()
    else:
        require(found.dtype == expected.dtype, f"{where}: {found.dtype}, not {expected.dtype}")
        equal = found.tobytes() == expected.tobytes()
    require(equal, f"{where} is\n{found}\n  and should be\n{expected}")


def named_leaves(batch: Any) -> dict[str, Any]:
    """The leaves, by their paths."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    }


def same_trees(where: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, np.ndarray]]:
    """The leaves of both, by path, if they have the same paths."""
    found, expected = named_leaves(found), named_leaves(expected)
    require(found.keys() == expected.keys(), f"{where}: {list(found)}, not {list(expected)}")
    for path, leaf in expected.items():
        yield f"{where}{path}", found[path], leaf


def same_host_batch(where: str, found: Any, expected: Any) -> None:
    for path, leaf, should in same_trees(where, found, expected):
        same_leaf(path, leaf, should)


def same_batch(where: str, found: Any, expected: Any, drawn: DrawnMesh, made: model.Made) -> None:
    """Compares every shard on every device of this host, and how the leaves are sharded."""
    front = () if made.microbatches is None else (None,)
    for path, leaf, should in same_trees(where, found, expected):
        if should.dtype.kind == "U":
            same_leaf(path, leaf, should)
            continue
        require(leaf.shape == should.shape, f"{path}: {leaf.shape}, not {should.shape}")
        for shard in leaf.addressable_shards:
            same_leaf(f"{path}{shard.index}", shard.data, should[shard.index])
    for name in expected.keys() - {made.mask_key}:
        for leaf in jax.tree.leaves(found[name]):
            if isinstance(leaf, jax.Array):
                spec = P(*(*front, *drawn.spec_of(name))[: leaf.ndim])
                is_so = leaf.sharding.is_equivalent_to(
                    NamedSharding(leaf.sharding.mesh, spec), leaf.ndim
                )
                require(is_so, f"{where}[{name!r}] has {leaf.sharding}, not {spec}")
