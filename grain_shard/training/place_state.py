"""Places parameters and optimizer states on a mesh: replicated, fully sharded, or leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import GetAttrKey, KeyPath

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.put import put_leaf
from grain_shard.sharding.specs import default_spec, named_sharding

if TYPE_CHECKING:
    from flax import nnx

_NAMES_SHOWN = 20


def place_model_state_on_shards(
    state: Any, mesh: Mesh, param_sharding: str | Mapping[str, PartitionSpec] | None = None
) -> Any:
    """Places the state of a model on a mesh, with the state of its optimizer if given.

    Args:
        state: A tree of arrays and scalars: linen parameters, a `TrainState`, an optax state, an
            `nnx.State`, or any tuple or dict of these. Every process must pass the same state.
        mesh: The mesh on which the state is placed.
        param_sharding: The sharding of each leaf.

            - None or ``"replicate"``: every device holds the whole leaf.
            - ``"fsdp"``: the leaf is sharded along its largest dim that the size of the mesh axis
              divides, or replicated if there is no such dim. The mesh axis is "fsdp" if the mesh
              has it, else "data" or the only axis.
            - A dict from paths to `PartitionSpec`. A path is the keys of a leaf joined by "/"
              (``"params/Dense_0/kernel"``), or only some of the last keys: ``"Dense_0/kernel"``
              also matches the optimizer's moments of that kernel. If several paths match a leaf,
              the longest counts. If none matches, the leaf is replicated. A spec longer than a
              leaf's rank is cut.

    Returns:
        The same tree with global `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

    Raises:
        ShardingError: `param_sharding` is an unknown word. Or a path matches no leaf; the message
            lists the paths. Or a mesh axis does not exist, or its size does not divide the dim that
            it shards. Or a leaf has a dtype or integers that no device can hold.

    Example:
        >>> mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
        >>> state = {"up": {"kernel": np.zeros((3, 4))}, "down": {"kernel": np.zeros((4, 3))}}
        >>> specs = {
        ...     "up/kernel": PartitionSpec(None, "model"),
        ...     "down/kernel": PartitionSpec("model"),
        ... }
        >>> state = place_model_state_on_shards(state, mesh, specs)
        >>> state["up"]["kernel"].addressable_shards[0].data.shape
        (3, 2)
    """
    if param_sharding == "fsdp":
        # The first entry of the default spec is the axis that shards the rows of a batch.
        axis = "fsdp" if "fsdp" in mesh.axis_names else default_spec(mesh)[0]
        return _placed(state, lambda _, leaf: NamedSharding(mesh, _fsdp_spec(leaf, mesh, axis)))
    if param_sharding in (None, "replicate"):
        param_sharding = {}  # a leaf that no path matches is replicated
    if not isinstance(param_sharding, Mapping):
        raise ShardingError(
            f"param_sharding={param_sharding!r} is not a known choice.",
            mesh_axes=mesh.shape.items(),
            remedy="pass None, 'replicate', 'fsdp', or a dict from paths to PartitionSpecs.",
        )
    specs = dict(param_sharding)
    names = _names(state)
    for path in specs:
        if not any(_ends_with(name, path) for name in names):
            raise _matches_nothing(f"the path {path!r}", names, mesh)

    def by_path(name: str, leaf: Any) -> Sharding:
        matching = [path for path in specs if _ends_with(name, path)]
        return named_sharding(mesh, specs[max(matching, key=len)] if matching else None)

    return _placed(state, by_path)


def place_nnx_state_on_shards(
    state: nnx.State,
    mesh: Mesh,
    filter_sharding: nnx.StateSharding | Mapping[Any, PartitionSpec | Sharding],
) -> nnx.State:
    """Places an `nnx.State` on a mesh, with a sharding for each nnx filter.

    Args:
        state: The state, e.g. ``nnx.state(model)`` or ``nnx.state((model, optimizer))``. Write the
            result back with `nnx.update`.
        mesh: The mesh on which the state is placed.
        filter_sharding: A mapping from nnx filters to a `PartitionSpec` on the mesh, or to a
            `Sharding`. The first filter that matches a variable counts. A spec longer than the
            variable's rank is cut.

    Returns:
        The state, in which the value of each variable is a global `jax.Array`.

    Raises:
        ShardingError: No filter matches a variable. Or a filter matches no variable, and is neither
            ``...`` nor a variable type. Or a mesh axis does not exist, or its size does not divide
            the dim that it shards.

    Example:
        >>> mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
        >>> from flax import nnx
        >>> model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        >>> specs = {nnx.Param: PartitionSpec("fsdp"), ...: PartitionSpec()}
        >>> nnx.update(model, place_nnx_state_on_shards(nnx.state(model), mesh, specs))
        >>> model.kernel.addressable_shards[0].data.shape
        (2, 6)
    """
    from flax import nnx

    if isinstance(filter_sharding, nnx.StateSharding):
        rules = list(zip(filter_sharding.filters, filter_sharding.shardings, strict=True))
    else:
        rules = list(filter_sharding.items())
    # A group of variables for each rule, and the variables that no filter matches.
    *groups, rest = nnx.split_state(state, *(filter_ for filter_, _ in rules), ...)
    for path, variable in nnx.to_flat_state(rest):  # the first variable without a filter
        raise ShardingError(
            f"no filter matches this {type(variable).__name__}.",
            path="/".join(map(str, path)),
            leaf=describe_leaf(variable),
            mesh_axes=mesh.shape.items(),
            remedy="add a filter for this variable, or `...: PartitionSpec()` for all others.",
        )
    placed = []
    for (filter_, rule), group in zip(rules, groups, strict=True):
        # A filter that is a type, `...` or True may match nothing, for example `nnx.BatchStat` in a
        # model without batch norm. Any other filter that matches nothing is a mistake.
        if not group and filter_ not in (..., True) and not isinstance(filter_, type):
            raise _matches_nothing(f"the filter {filter_!r}", _names(state), mesh)
        sharding = rule if isinstance(rule, Sharding) else named_sharding(mesh, rule)
        # All leaves of the group get the sharding of this turn, which the default argument keeps.
        placed.append(_placed(group, lambda *_, sharding=sharding: sharding))
    return nnx.merge_state(*placed)


def _fsdp_spec(leaf: Any, mesh: Mesh, axis: str) -> PartitionSpec:
    """Returns the spec that shards the largest dim that the axis divides; empty if none is."""
    shape = np.shape(leaf)
    dims = [dim for dim, size in enumerate(shape) if size and size % mesh.shape[axis] == 0]
    largest = max(dims, key=lambda dim: shape[dim], default=None)
    return PartitionSpec() if largest is None else PartitionSpec(*[None] * largest, axis)


def _ends_with(name: str, path: str) -> bool:
    return f"/{name}".endswith(f"/{path}")


def _name(path: KeyPath) -> str:
    # An nnx variable is a node with one child, "value". Users do not write this key in paths.
    keys = path[:-1] if path and path[-1] == GetAttrKey("value") else path
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _names(state: Any) -> list[str]:
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _placed(state: Any, sharding_of: Callable[[str, Any], Sharding]) -> Any:
    """Places each leaf of a state by the sharding that `sharding_of(name, leaf)` returns.

    Raises:
        ShardingError: A leaf cannot be placed.
    """

    def place(path: KeyPath, leaf: Any) -> jax.Array | np.ndarray:
        name = _name(path)
        sharding = sharding_of(name, leaf)
        try:
            return put_leaf(name, leaf, sharding)
        except ShardingError as error:
            # The error's own remedy is for batches. A state needs another one.
            error.remedy = (
                "turn the leaf into an array of a JAX dtype, or take the leaf out of the state."
                if error.spec is None
                else "shard another dim of this leaf, or replicate it with PartitionSpec()."
            )
            raise error from None

    return jax.tree_util.tree_map_with_path(place, state)


def _matches_nothing(what: str, names: list[str], mesh: Mesh) -> ShardingError:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ShardingError(
        f"{what} matches no leaf of the state.",
        mesh_axes=mesh.shape.items(),
        remedy=f"match one of {shown}{more}.",
    )
