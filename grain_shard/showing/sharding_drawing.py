"""A batch as treescope's tree, with a drawing under each leaf of which device holds what."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from grain_shard.sharding.specs import spec_rank
from grain_shard.showing.leaf_text import LeafText
from grain_shard.showing.rich_output import describe_bytes

_MAX_DEVICES = 64  # of more, the colors cannot be told apart, and the legend fills the screen


def draw_tree(batch: Any) -> str:
    """The batch as HTML; nothing of its values is looked at."""
    import treescope

    def draw(value: Any, path: str | None) -> Any:
        if isinstance(value, _Leaf) and value.can_be_drawn:
            figure: Any = treescope.render_array_sharding(value)
            return treescope.IPythonVisualization(figure)
        return None

    leaves = jax.tree.map(_Leaf, batch, is_leaf=lambda leaf: leaf is None)
    with (
        treescope.active_autovisualizer.set_scoped(draw),
        treescope.using_expansion_strategy(max_height=None),
    ):
        return treescope.render_to_html(leaves, compressed=False)


class _Leaf:
    """Stands in for a leaf: to treescope an array of which only the sharding can be seen."""

    def __init__(self, leaf: Any):
        self.leaf, self.described = leaf, LeafText.of(leaf)
        sharding = getattr(leaf, "sharding", None)
        self.can_be_drawn = (
            isinstance(sharding, NamedSharding)
            and len(leaf.shape) > 0
            and all(leaf.shape)
            and sharding.num_devices <= _MAX_DEVICES
        )

    def __repr__(self) -> str:
        text, rows, num_bytes = self.described
        if num_bytes is None:
            return f"<{text}>"
        held = describe_bytes(num_bytes) if rows is None else f"{rows:,} rows, {num_bytes:,} bytes"
        return f"<{text}: {held} a device>"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import rendering_parts

        return rendering_parts.text(repr(self))

    def __treescope_ndarray_adapter__(self) -> Any:
        return _adapter()


def _adapter() -> Any:
    """What treescope asks of a `_Leaf`. The dims after the last sharded one are not drawn."""
    from treescope import ndarray_adapters, rendering_parts

    class Adapter(ndarray_adapters.NDArrayAdapter):
        def get_axis_info_for_array_data(self, array: _Leaf) -> Any:
            shape = array.leaf.shape[: _dims_drawn(array)]
            return tuple(
                ndarray_adapters.PositionalAxisInfo(dim, size) for dim, size in enumerate(shape)
            )

        def get_sharding_info_for_array_data(self, array: _Leaf) -> Any:
            shape, sharding, dims = array.leaf.shape, array.leaf.sharding, _dims_drawn(array)
            held = sharding.devices_indices_map(shape).items()
            (platform,) = {device.platform for device in sharding.device_set}
            return ndarray_adapters.ShardingInfo(
                shard_shape=sharding.shard_shape(shape)[:dims],
                device_index_to_shard_slices={device.id: index[:dims] for device, index in held},
                device_type=platform.upper(),
                fully_replicated=sharding.is_fully_replicated,
            )

        def get_array_summary(self, array: _Leaf, fast: bool) -> Any:
            return rendering_parts.text(repr(array))

        def get_numpy_dtype(self, array: _Leaf) -> Any:
            return array.leaf.dtype

        def get_array_data_with_truncation(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("a drawing shows no values")

        def should_autovisualize(self, array: _Leaf) -> bool:
            return False

    return Adapter()


def _dims_drawn(array: _Leaf) -> int:
    return max(1, spec_rank(array.leaf.sharding))
