"""`ShardingTree`: the sharding of every leaf of a batch, made from a mesh and specs.

The user gives one `PartitionSpec` for all leaves, or a tree prefix of `PartitionSpec`s. A spec fits
a leaf if the leaf has a dim for each entry. A spec for a single leaf must fit this leaf. A spec for
several leaves must fit at least one of them, and is trimmed to the rank of each leaf. Scalars are
always replicated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath

from grain_shard.digest import digest
from grain_shard.errors import ShardingError, describe_leaf, describe_mesh
from grain_shard.sharding.layout import BatchLayout, mesh_axes_of
from grain_shard.sharding.specs import (
    as_sharding,
    default_spec,
    fitted,
    mesh_in_use,
    named_sharding,
    num_shards,
    spec_rank,
)
from grain_shard.trees import Batch, is_empty, is_text, path_of


@dataclass(frozen=True)
class ShardingTree:
    """The shardings of a batch's leaves: a tree of shardings that is a prefix of the batch's tree.

    Example:
        >>> P = PartitionSpec
        >>> mesh = jax.make_mesh((4, 2), ("data", "seq"))
        >>> shardings = ShardingTree.of(mesh, {"image": P("data"), "tokens": P("data", "seq")})
        >>> shardings.prefix["tokens"].shard_shape((8, 1024))
        (2, 512)
        >>> layout = shardings.layout()  # one process has all devices, so it holds all shards
        >>> layout.divisor, layout.shards
        (4, (0, 1, 2, 3))

    Attributes:
        prefix: A `Sharding`, or a tree of shardings that is a prefix of the batch's tree.
    """

    prefix: Any

    def __repr__(self) -> str:
        specs = jax.tree.map(lambda leaf: getattr(leaf, "spec", leaf), self.prefix)
        return f"ShardingTree(mesh=({describe_mesh(self.mesh_axes)}), {specs})"

    @classmethod
    def of(cls, mesh_or_sharding: Any = None, spec: Any = None) -> ShardingTree:
        """Returns the shardings that the user's arguments to `shard_to` ask for.

        Args:
            mesh_or_sharding: A `Mesh`, a `Sharding`, a device, or a tree prefix of shardings. With
                None, or with specs in its place, the mesh of `jax.set_mesh` is used.
            spec: With a mesh, a `PartitionSpec` or a tree prefix of them. By default dim 0 is
                sharded over the mesh's axis "data", or over its only axis.

        Raises:
            ShardingError: The spec names an axis that the mesh does not have; no spec is given, and
                the mesh has several axes, none of them "data"; no mesh is given or set; both a
                sharding and a spec are given; or there is no sharding at all.
        """
        given = jax.tree.leaves(mesh_or_sharding)
        if isinstance(mesh_or_sharding, list) and isinstance(next(iter(given), None), jax.Device):
            raise ShardingError(
                "a list of devices has no mesh axis along which rows could be split.",
                remedy=f'pass jax.make_mesh(({len(given)},), ("data",), devices=devices).',
            )
        # A `DeviceMesh` of Keras has a `backend_mesh`, and its distributions have a `device_mesh`.
        if hasattr(getattr(mesh_or_sharding, "device_mesh", mesh_or_sharding), "backend_mesh"):
            raise ShardingError(
                f"{type(mesh_or_sharding).__name__} is a Keras object, not a JAX mesh.",
                remedy="pass keras.distribution.distribution().device_mesh.backend_mesh, the mesh"
                " that Keras uses.",
            )
        # Specs may be given in the place of the mesh: ``shard_to(P("data"))``.
        if spec is None and any(isinstance(leaf, PartitionSpec) for leaf in given):
            mesh_or_sharding, spec = None, mesh_or_sharding
        if mesh_or_sharding is None:
            mesh_or_sharding = mesh_in_use()
        if isinstance(mesh_or_sharding, Mesh):
            prefix = default_spec(mesh_or_sharding) if spec is None else spec
            to_sharding = partial(named_sharding, mesh_or_sharding)
        elif spec is None:
            prefix, to_sharding = mesh_or_sharding, as_sharding
        else:
            raise ShardingError(
                "a spec is given together with a sharding, which already has a spec.",
                spec=spec if isinstance(spec, PartitionSpec) else None,
                remedy="pass a Mesh with the spec, or the sharding without a spec.",
            )
        tree = cls(jax.tree.map(to_sharding, prefix, is_leaf=lambda leaf: leaf is None))
        if not tree.shardings():
            raise ShardingError(
                f"{prefix!r} holds no sharding for any leaf of a batch.",
                remedy="pass a Mesh alone, or a sharding or spec for each leaf.",
            )
        return tree

    def shardings(self) -> list[Sharding]:
        """Returns the distinct shardings of the tree, in the order of its leaves."""
        return list(dict.fromkeys(jax.tree.leaves(self.prefix)))

    def named(self) -> list[NamedSharding]:
        """Returns the distinct `NamedSharding`s of the tree; all other shardings have no mesh."""
        return [s for s in self.shardings() if isinstance(s, NamedSharding)]

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of every axis of the mesh; () if no sharding has a mesh."""
        return mesh_axes_of(self.shardings())

    def layout(self) -> BatchLayout:
        """Returns the `BatchLayout` of this host: the rows of every batch that it holds.

        Raises:
            ShardingError: This process has no device in the mesh.
        """
        host, layouts = jax.process_index(), self.layouts()
        if host not in layouts:
            raise ShardingError(
                f"host {host} has no device in the mesh. All its devices are of host"
                f" {', '.join(map(str, layouts))}.",
                mesh_axes=self.mesh_axes,
                remedy="make the mesh of all jax.devices(), whose number is jax.device_count(), or"
                " run the pipeline on hosts that have a device in it.",
            )
        return layouts[host]

    def layouts(self) -> dict[int, BatchLayout]:
        """Returns the `BatchLayout` of each host with a device in the mesh, by process index."""
        return BatchLayout.of_hosts(self.shardings())

    def devices(self) -> list[Any]:
        """Returns all devices in the shardings, sorted by host and id: equal on every host."""
        devices = set().union(*(sharding.device_set for sharding in self.shardings()))
        return sorted(devices, key=lambda device: (device.process_index, device.id))

    def describe(self) -> dict[str, Any]:
        """Returns plain JSON that hosts compare: mesh axes, device order, specs.

        The order of the devices is given as a digest.
        """
        named = self.named()
        return {
            "mesh": list(self.mesh_axes),
            "devices": digest([d.id for s in named for d in cast(Mesh, s.mesh).devices.flat]),
            "specs": [str(s.spec) for s in named],
        }

    def with_mask(self, key: str | None) -> ShardingTree:
        """Returns the tree with a sharding for the mask, which is sharded like the rows.

        Args:
            key: Key of the mask in the batch; None for no mask.

        Returns:
            This tree itself if there is no mask, if a single sharding covers all leaves, or if the
            tree has an entry at `key`.
        """
        if key is None or not isinstance(self.prefix, Mapping) or key in self.prefix:
            return self
        finest = max(self.named(), key=num_shards, default=self.shardings()[0])
        return replace(self, prefix={**self.prefix, key: fitted(finest, 1)})

    def match(self, batch: Batch) -> list[Sharding | None]:
        """Returns the sharding of each leaf of a batch, in the order of `jax.tree.leaves`.

        The list has None for text leaves, which stay on the host.

        Args:
            batch: A tree of arrays ``[rows, ...]``.

        Raises:
            ShardingError: `prefix` is not a prefix of the batch's tree, or a spec does not fit its
                leaf.
        """
        prefix = dict(jax.tree_util.tree_flatten_with_path(self.prefix, is_leaf=is_empty)[0])
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        # A None in the batch is not a leaf, but a spec for it is not a mistake.
        nodes = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_empty)[0]
        unused = [
            head for head in prefix if not any(keys[: len(head)] == head for keys, _ in nodes)
        ]
        # The key path in `prefix` of each leaf's sharding, which is a start of the leaf's key path.
        heads = [self._head(prefix, keys, leaf, unused) for keys, leaf in leaves]
        # A sharding must fit one of its leaves. It is trimmed to the rank of the others.
        fitting = {
            head
            for head, (_, leaf) in zip(heads, leaves, strict=True)
            if is_text(leaf) or spec_rank(prefix[head]) <= leaf.ndim
        }
        for head, (keys, leaf) in zip(heads, leaves, strict=True):
            if head not in fitting and leaf.ndim:
                rank, named = leaf.ndim, spec_rank(prefix[head])
                raise ShardingError(
                    f"the spec has entries for {named} dims, but the leaf has rank {rank}.",
                    path=path_of(keys),
                    leaf=describe_leaf(leaf),
                    spec=cast(NamedSharding, prefix[head]).spec,
                    mesh_axes=self.mesh_axes,
                    remedy=f"shorten the spec to length {rank}. The first entry is for the rows.",
                )
        if unused:
            raise ShardingError(
                "the tree of specs names a leaf that the batch does not have.",
                path=path_of(unused[0]),
                mesh_axes=self.mesh_axes,
                remedy="remove this leaf from the specs, or correct its name.",
            )
        return [
            None if is_text(leaf) else fitted(prefix[head], leaf.ndim)
            for head, (_, leaf) in zip(heads, leaves, strict=True)
        ]

    def _head(
        self,
        prefix: Mapping[KeyPath, Sharding],
        keys: KeyPath,
        leaf: Any,
        unused: Sequence[KeyPath],
    ) -> KeyPath:
        """Returns the key path of a leaf's sharding in `prefix`: a start of the leaf's key path.

        The error also names the `unused` entries of `prefix`, because one of them may be misspelt.

        Raises:
            ShardingError: No start of the leaf's key path is in `prefix`.
        """
        for depth in range(len(keys) + 1):
            if not is_empty(prefix.get(keys[:depth])):
                return keys[:depth]
        problem = "the leaf has no spec."
        by_name = {_name(head): path_of(head) for head in unused}  # to find similar names
        if any(head[: len(keys)] == keys for head in prefix):  # an entry below the leaf
            problem = "the specs have a tree for this leaf, but the leaf is a single array."
            remedy = "give this leaf a single PartitionSpec."
        elif similar := difflib.get_close_matches(_name(keys), by_name, n=1):
            remedy = f"in the specs, rename {by_name[similar[0]]} to {path_of(keys)}."
        else:
            remedy = "add this leaf to the specs."
            if unused:
                remedy += f" The batch does not have {', '.join(map(path_of, unused))}."
        raise ShardingError(
            problem,
            path=path_of(keys),
            leaf=describe_leaf(leaf),
            mesh_axes=self.mesh_axes,
            remedy=remedy,
        )


def _name(keys: KeyPath) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/").casefold()
