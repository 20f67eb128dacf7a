"""Compares batches with the expected ones, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.soak import meshes, model
from benchmarks.soak.shardings import Sharding
from grain_shard import PadToDivisible, ShardBatch, ShardingTree


class Difference(AssertionError):
    """A batch, or another result, differs from the expected one."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Difference(message)


def same_leaf(where: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Compares shape, dtype and every bit of a leaf; of text, the shape and the strings."""
    found = np.asarray(found)
    require(found.shape == expected.shape, f"{where}: {found.shape}, not {expected.shape}")
    if expected.dtype.kind == "U":
        equal = found.tolist() == expected.tolist()
    else:
        require(found.dtype == expected.dtype, f"{where}: {found.dtype}, not {expected.dtype}")
        equal = found.tobytes() == expected.tobytes()
    require(equal, f"{where} is\n{found}\n  and should be\n{expected}")


def named_leaves(batch: Any) -> dict[str, Any]:
    """Returns the leaves of a batch, by their paths."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    }


def same_trees(where: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Yields (path, found leaf, expected leaf) for each leaf of two trees with the same paths.

    Raises:
        Difference: The trees have different paths.
    """
    found, expected = named_leaves(found), named_leaves(expected)
    require(found.keys() == expected.keys(), f"{where}: {list(found)}, not {list(expected)}")
    for path, leaf in expected.items():
        yield f"{where}{path}", found[path], leaf


def same_host_batch(where: str, found: Any, expected: Any) -> None:
    for path, leaf, should in same_trees(where, found, expected):
        same_leaf(path, leaf, should)


def same_batch(where: str, found: Any, expected: Any, sharding: Sharding) -> None:
    """Compares every shard on every device of this host, and the sharding of each leaf."""
    for path, leaf, should in same_trees(where, found, expected):
        if should.dtype.kind == "U":
            same_leaf(path, leaf, should)
            continue
        require(leaf.shape == should.shape, f"{path}: {leaf.shape}, not {should.shape}")
        for shard in leaf.addressable_shards:
            same_leaf(f"{path}{shard.index}", shard.data, should[shard.index])
    for name in expected.keys() - {sharding.made.mask_key}:
        for leaf in jax.tree.leaves(found[name]):
            if isinstance(leaf, jax.Array):
                spec = P(*sharding.drawn.spec_of(name)[: leaf.ndim])
                should_be = NamedSharding(leaf.sharding.mesh, spec)
                is_so = leaf.sharding.is_equivalent_to(should_be, leaf.ndim)
                require(is_so, f"{where}[{name!r}] has {leaf.sharding}, not {spec}")


def same_batches(
    where: str,
    found: Iterable[Any],
    expected: model.Model,
    place: Any,
    sharding: Sharding,
    count: int | None = None,
) -> Any:
    """Compares batches with the batches that a model has after a place.

    Args:
        where: Start of the message if they differ.
        found: The batches.
        expected: The model.
        place: The place in the model before the first batch.
        sharding: Batch sizes, mesh and options.
        count: Number of batches that should follow; None for all that the model has.

    Returns:
        The place after the last batch.
    """
    found = iter(found)
    should = itertools.islice(model.batches(expected, place, sharding.sizes), count)
    for number, (rows, after) in enumerate(should):
        batch = next(found, None)
        require(batch is not None, f"{where} {number} is missing")
        of_model = model.batch_of(rows, expected.like, sharding.made)
        same_batch(f"{where} {number}", batch, of_model, sharding)
        place = after
    require(next(found, None) is None, f"{where}: one too many")
    return place


def same_rows_of_hosts(
    ds: Any,
    hosts: int,
    whole: Sequence[model.Rows],
    expected: model.Model,
    sharding: Sharding,
    remainder: Any,
    ends_known: bool,
) -> None:
    """Compares the rows that each of several hosts would have. The hosts are simulated.

    Args:
        ds: The dataset of whole batches, before `.shard_to`.
        hosts: Number of hosts.
        whole: The rows of every batch.
        expected: The model of the batches.
        sharding: Batch sizes, mesh and options.
        remainder: The option of `.shard_to`.
        ends_known: True if each host knows by itself which batch is the last. With feeds, real
            hosts agree on it, and simulated ones cannot. So a host may have no batch where it
            should have padding, or more batches if its own feeds end later.
    """
    mesh, made = sharding.drawn.of_hosts(hosts), sharding.made
    tree = ShardingTree.of(mesh, sharding.drawn.spec)
    pad = PadToDivisible(
        made.multiple, remainder=remainder, mask_key=made.mask_key, pad_value=made.pad_value
    )
    for host, layout in tree.layouts().items():
        of_host = iter(ds.pipe(pad).pipe(ShardBatch(layout)))
        for step, rows in enumerate(whole):
            should = model.host_batch_of(rows, expected.like, made)
            padded = len(jax.tree.leaves(should)[0])
            held = meshes.rows_of_host(mesh, sharding.drawn.specs(), host, padded)
            where, found = f"host {host} of {hosts}, batch {step}", next(of_host, None)
            if found is None:
                left = [rows[row] for row in held if row < len(rows)]
                require(not (ends_known or any(left)), f"{where} is missing")
            else:
                same_host_batch(where, found, jax.tree.map(lambda leaf, at=held: leaf[at], should))
        if ends_known:
            require(next(of_host, None) is None, f"host {host} of {hosts}: one batch too many")
