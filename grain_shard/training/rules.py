"""`MeshRules`, as in datarax: the mesh axis for each of four logical axes of a model.

For logical axes of other names use flax, which has the same idea::

    rules = [("batch", "data"), ("embed", None), ("mlp", "model")]
    flax.linen.logical_to_mesh_axes(("embed", "mlp"), rules)   # P(None, 'model')

The two differ if the rules give one mesh axis to two dims of an array. Flax then shards the dim
whose rule comes first in the list, and `MeshRules` the dim that comes first in the array. The
result of either is a `PartitionSpec`, and this package takes any `PartitionSpec`.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The mesh axis that shards each logical axis of a model; None for no sharding.

    A call with the logical axes of an array returns the mesh axes that flax's `with_partitioning`
    takes as an argument.

    Attributes:
        data: Mesh axis for the rows of the batch.
        embed: Mesh axis for the model's width: the input dim of an up-projection, and the output
            dim of a down-projection.
        mlp: Mesh axis for hidden units.
        heads: Mesh axis for attention heads.

    Example:
        >>> MeshRules(data="data", mlp="model")("embed", "mlp")
        (None, 'model')
    """

    data: str | None = None
    embed: str | None = None
    mlp: str | None = None
    heads: str | None = None

    def __call__(self, *logical_axes: str | None) -> tuple[str | None, ...]:
        """Returns the mesh axis of each logical axis; None for a dim that is not sharded.

        A mesh axis cannot shard two dims of an array. If two dims have the same mesh axis, the
        first dim gets it, and the second dim gets None.

        Args:
            *logical_axes: "data", "embed", "mlp", "heads" or None, for each dim of the array.

        Raises:
            ValueError: There is no logical axis of this name.
        """
        mesh_axes = dataclasses.asdict(self)
        found: list[str | None] = []
        for axis in logical_axes:
            if axis is not None and axis not in mesh_axes:
                raise ValueError(f"{axis!r} is not a logical axis: use one of {list(mesh_axes)}.")
            mesh_axis = axis and mesh_axes[axis]
            found.append(None if mesh_axis in found else mesh_axis)
        return tuple(found)


def data_parallel_rules(data_axis: str = "data") -> MeshRules:
    """Returns the rules by which every device holds the whole model and a part of the batch.

    Example:
        >>> data_parallel_rules()("data", "embed"), data_parallel_rules()("embed", "mlp")
        (('data', None), (None, None))
    """
    return MeshRules(data=data_axis)


def fsdp_rules(data_axis: str = "data", model_axis: str | None = None) -> MeshRules:
    """Returns the rules by which every device holds a part of the batch and of the weights (FSDP).

    The compiler gathers the weights where they are used.

    Args:
        data_axis: Mesh axis that shards the rows of the batch.
        model_axis: Mesh axis that shards a weight along its first dim with the logical axis
            "embed", "mlp" or "heads". With None, `data_axis` shards weights along "embed".

    Example:
        >>> fsdp_rules()("data", "mlp"), fsdp_rules()("embed", "mlp")
        (('data', None), ('data', None))
        >>> fsdp_rules(model_axis="model")("data", "embed")
        ('data', 'model')
    """
    if model_axis is None:
        return MeshRules(data=data_axis, embed=data_axis)
    return MeshRules(data=data_axis, embed=model_axis, mlp=model_axis, heads=model_axis)


def partition_spec_for_names(rules: MeshRules, *logical_axes: str | None) -> PartitionSpec:
    """Returns the `PartitionSpec` that the rules give to an array with these logical axes.

    Example:
        >>> partition_spec_for_names(fsdp_rules(), "embed", "mlp") == PartitionSpec("data", None)
        True
    """
    return PartitionSpec(*rules(*logical_axes))
