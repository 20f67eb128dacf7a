"""Logical axes of a model, and their mesh axes: datarax's `MeshRules`.

flax has the same idea with axes of your own naming, and for these it is the one to use::

    rules = [("batch", "data"), ("embed", None), ("mlp", "model")]
    flax.linen.logical_to_mesh_axes(("embed", "mlp"), rules)   # P(None, 'model')

Where two dims of an array ask for one mesh axis, flax gives it to the one whose rule comes first,
`MeshRules` to the dim that comes first. Either way the result is a `PartitionSpec`, which this
package takes from anywhere.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The mesh axis that shards each logical axis of a model; None replicates it.

    Called with the logical axes of an array it gives what flax's `with_partitioning` takes.

    Attributes:
        data: Rows of the batch.
        embed: The model's width: the inputs of a projection up, the outputs of one down.
        mlp: Hidden units.
        heads: Attention heads.

    Example:
        >>> MeshRules(data="data", mlp="model")("embed", "mlp")
        (None, 'model')
    """

    data: str | None = None
    embed: str | None = None
    mlp: str | None = None
    heads: str | None = None

    def __call__(self, *logical_axes: str | None) -> tuple[str | None, ...]:
        """The mesh axis of each logical axis; None stays None.

        No mesh axis can shard two dims of an array: the first dim that asks for it gets it.

        Raises:
            ValueError: There is no such logical axis.
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
    """Every device holds the whole model and a share of the batch.

    Example:
        >>> data_parallel_rules()("data", "embed"), data_parallel_rules()("embed", "mlp")
        (('data', None), (None, None))
    """
    return MeshRules(data=data_axis)


def fsdp_rules(data_axis: str = "data", model_axis: str | None = None) -> MeshRules:
    """Every device holds a share of the batch, and of the weights, which are gathered where used.

    The model axis shards the weights, by the first of their dims that has a name. Without one the
    data axis does, by the model's width.

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
    """The `PartitionSpec` that the rules give an array with these logical axes.

    Example:
        >>> partition_spec_for_names(fsdp_rules(), "embed", "mlp") == PartitionSpec("data", None)
        True
    """
    return PartitionSpec(*rules(*logical_axes))
