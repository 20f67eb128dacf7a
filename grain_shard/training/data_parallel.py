"""Data-parallel training: the batch is sharded over the mesh, and all devices run one program.

The compiler adds the communication. With replicated parameters and sharded rows, the gradient of a
mean over the global batch needs an all-reduce, which XLA inserts. So a training step is written as
for one device, and gives the same loss on any number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_map_with_path

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.host_arrays import owned
from grain_shard.sharding.assemble import Assembler
from grain_shard.sharding.put import put_leaf, put_tree
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import default_spec
from grain_shard.training.meshes import create_1d_mesh
from grain_shard.trees import ROOT, is_text

if TYPE_CHECKING:  # importing flax and optax takes a second, and few functions here need them
    import optax
    from flax import nnx


def place_batch_on_shards(batch: Any, sharding: Any) -> Any:
    """Returns one global batch, made of the rows that each process has loaded.

    Each process passes its own rows. (`distribute_batch` takes the whole batch on each process.) On
    one process both functions do the same.

    Args:
        batch: The rows of this process's devices. Every process must pass the same number of rows
            per shard, and the same scalars.
        sharding: A sharding for all leaves, or a tree prefix of shardings.

    Returns:
        The same tree with global `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

    Raises:
        ShardingError: The rows do not split into the shards of this process, a leaf does not fit
            its sharding, or a leaf has a dtype or integers that no device can hold.

    Example:
        >>> rows = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
        >>> place_batch_on_shards({"x": np.zeros((16, 3))}, rows)["x"].shape
        (16, 3)
    """
    shardings = ShardingTree.of(sharding)
    # Without replicated shardings, because scalars say nothing about the rows of this process.
    spread = [one for one in shardings.shardings() if not one.is_fully_replicated]
    # If this process has all shards, its rows are the whole batch.
    if all(one.is_fully_addressable for one in spread):
        return put_tree(batch, shardings)
    return Assembler(shardings, ShardingTree.of(spread).layout())(owned(batch))


def spmd_train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    loss_fn: Callable[[Any, Any], jax.Array],
    batch: Any,
) -> jax.Array:
    """Runs one training step of an NNX model. Call it in a function under `nnx.jit`.

    First place the state of the model and the optimizer on the batch's mesh, with
    `place_nnx_state_on_shards`. Otherwise the second call compiles the step again.

    Args:
        model: The model, which is updated in place.
        optimizer: The optimizer of the model, which is updated in place.
        loss_fn: A function ``loss_fn(model, batch)`` that returns a scalar, the mean over the
            global batch. For padded batches that is ``sum(loss * valid_mask) / sum(valid_mask)``.
        batch: A global batch, placed by `.shard_to` or `distribute_batch`.

    Returns:
        The loss before the update.

    Example:
        >>> from flax import nnx
        >>> @nnx.jit
        ... def train_step(model, optimizer, batch):
        ...     return spmd_train_step(model, optimizer, loss_fn, batch)
    """
    from flax import nnx

    loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, gradients)
    return loss


def data_parallel_train_step(
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation | None,
    batch: Any,
    state: Any,
    rngs: Any = None,
) -> tuple[Any, dict[str, jax.Array]]:
    """Runs one training step for linen or plain parameters, compiled once for all devices.

    Leaves that are not on a mesh yet are placed first: the batch is sharded over the data axis, and
    state and rngs are replicated. The mesh is the mesh of the leaves already placed, else the mesh
    of `jax.set_mesh`, else a new mesh over all devices. On Explicit axes, too, the compiler chooses
    the shardings inside the step. The new state keeps the sharding of the old state.

    The compiled step is kept for each of the last 32 pairs (`loss_fn`, `optimizer`). So define both
    once: a lambda that is made for each call is compiled for each call.

    Args:
        loss_fn: A function ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rngs=rngs)`` if
            `rngs` is given. It returns a scalar, the mean over the global batch (see
            `spmd_train_step`).
        optimizer: An optax optimizer. For a `TrainState`, None or the state's own `tx`.
        batch: A tree of arrays that share dim 0, the rows of the global batch.
        state: A pair ``(params, opt_state)``, or a linen `TrainState`. Its buffers are not donated;
            for donation call this function inside your own `jax.jit`.
        rngs: Keys for the loss, e.g. ``{"dropout": key}``; pass a new key for each step.

    Returns:
        The new state, as a pair or a `TrainState` like the old one, and the metrics
        ``{"loss": scalar}``, where the loss is from before the update.

    Raises:
        TypeError: `state` and `optimizer` do not fit together.
        ShardingError: The size of the data axis does not divide the rows. Or the batch is not on a
            mesh yet, and the mesh has several axes, none of them called "data". Or a leaf is text,
            or has a dtype or integers that no device can hold.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"]) ** 2)
        >>> params, optimizer = {"w": jnp.ones(3)}, optax.sgd(0.1)
        >>> state = (params, optimizer.init(params))
        >>> for batch in [{"x": np.ones((8, 3))}] * 2:
        ...     state, metrics = data_parallel_train_step(loss_fn, optimizer, batch, state)
        ...     print(f"{metrics['loss']:.2f}")
        9.00
        1.44
    """
    from flax import nnx

    if isinstance(optimizer, nnx.Optimizer):
        raise TypeError("An nnx.Optimizer holds its own state: use spmd_train_step.")
    if hasattr(state, "apply_gradients"):
        if optimizer is not None and optimizer != state.tx:
            raise TypeError("A TrainState has its own optimizer: pass optimizer=None.")
        optimizer = None  # tells `_compiled_step` that the state is a TrainState
    elif optimizer is None or not (isinstance(state, tuple) and len(state) == 2):
        raise TypeError(
            f"got a {type(state).__name__} as state and {'no' if optimizer is None else 'an'}"
            " optimizer: pass a TrainState, or (params, opt_state) and an optax optimizer."
        )
    return _compiled_step(loss_fn, optimizer)(*_on_one_mesh(state, batch, rngs))


# The keys are the objects themselves, so the cache keeps them alive. (An id could be reused after
# its object is deleted.) `maxsize` lets the cache drop losses that are no longer used.
@functools.lru_cache(maxsize=32)
def _compiled_step(
    loss_fn: Callable[..., jax.Array], optimizer: optax.GradientTransformation | None
) -> Callable[[Any, Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """Returns the jitted function from (state, batch, rngs) to (new state, metrics).

    Args:
        loss_fn: As in `data_parallel_train_step`.
        optimizer: The optimizer of a pair (params, opt_state); None if the state is a `TrainState`.
    """
    import optax

    def step(state: Any, batch: Any, rngs: Any) -> tuple[Any, dict[str, jax.Array]]:
        keywords = {} if rngs is None else {"rngs": rngs}
        params = state.params if optimizer is None else state[0]
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch, **keywords)
        if optimizer is None:
            return state.apply_gradients(grads=gradients), {"loss": loss}
        updates, opt_state = optimizer.update(gradients, state[1], params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    @jax.jit
    def step_on_any_mesh(state: Any, batch: Any, rngs: Any) -> tuple[Any, dict[str, jax.Array]]:
        shardings = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, state)
        mesh = jax.tree.leaves(shardings)[0].mesh  # all leaves are on one mesh
        if AxisType.Explicit not in mesh.axis_types:
            return step(state, batch, rngs)
        # With Explicit axes an ordinary loss raises if a contracted dim is sharded (FSDP), and on
        # some versions of JAX if it indexes by labels. So the compiler shards the step's values.
        replicated = NamedSharding(mesh, PartitionSpec())
        compiler_sharded: Callable[..., Any] = jax.sharding.auto_axes(
            step, out_sharding=(shardings, {"loss": replicated})
        )
        return compiler_sharded(state, batch, rngs)

    return step_on_any_mesh


def _on_one_mesh(state: Any, batch: Any, rngs: Any) -> tuple[Any, Any, Any]:
    """Returns state, batch and rngs, after it has placed all leaves that are not on a mesh yet.

    Inside a `jax.jit` all three are returned unchanged.

    Raises:
        ShardingError: A leaf does not fit on the mesh, or is text, or has a dtype or integers
            that no device can hold.
    """
    leaves = jax.tree.leaves((state, batch, rngs))
    meshes = [leaf.sharding.mesh for leaf in leaves if _is_on_mesh(leaf)]
    # All leaves are placed already, or are traced and so have no devices.
    if len(meshes) == len(leaves) or any(isinstance(leaf, Tracer) for leaf in leaves):
        return state, batch, rngs
    mesh = meshes[0] if meshes else jax.sharding.get_mesh()
    if mesh.empty:
        mesh = create_1d_mesh()

    def place(keys: KeyPath, leaf: Any) -> Any:
        if _is_on_mesh(leaf):
            return leaf
        root = keys[0].key  # "state", "batch" (which is `ROOT`) or "rngs"
        path = root + keystr(keys[1:])
        spec = _spec_of_rows(mesh) if root == ROOT else PartitionSpec()
        array = put_leaf(path, leaf, NamedSharding(mesh, spec))
        if is_text(array):
            raise ShardingError(
                "the leaf is text, which a compiled step cannot take.",
                path=path,
                leaf=describe_leaf(array),
                mesh_axes=mesh.shape.items(),
                remedy="drop this leaf from the batch before the step, or turn it into numbers.",
            )
        return array

    placed = tree_map_with_path(place, {"state": state, ROOT: batch, "rngs": rngs})
    return placed["state"], placed[ROOT], placed["rngs"]


def _spec_of_rows(mesh: Mesh) -> PartitionSpec:
    """Returns the spec of a batch that is not placed yet.

    Raises:
        ShardingError: The mesh has several axes, none of them "data".
    """
    try:
        return default_spec(mesh)
    except ShardingError as error:
        error.remedy = (
            "place the batch first, by grain_shard.placement.distribute_batch(batch, sharding)."
        )
        raise


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def reduce_gradients_across_devices(
    gradients: Any, reduce_type: str = "mean", axis_name: str = "batch"
) -> Any:
    """Reduces gradients over a mapped axis, inside `jax.shard_map`, `jax.vmap` or `jax.pmap`.

    Plain `jax.jit` needs no such call: there, the gradient of a loss over the global batch is
    global already.

    Args:
        gradients: A tree of arrays.
        reduce_type: "mean" or "sum".
        axis_name: Name of the mapped axis.

    Returns:
        The reduced tree, with the same shapes. It is equal on all devices of the axis.

    Raises:
        ValueError: `reduce_type` is neither "mean" nor "sum".

    Example:
        >>> gradients = {"w": jnp.array([1.0, 3.0])}  # one value for each of two devices
        >>> jax.vmap(reduce_gradients_across_devices, axis_name="batch")(gradients)
        {'w': Array([2., 2.], dtype=float32)}
    """
    reduce = _of_type(reduce_type, {"mean": jax.lax.pmean, "sum": jax.lax.psum})
    return reduce(gradients, axis_name)


def reduce_gradient_tree(gradients: Any, reduce_type: str = "mean") -> Any:
    """Reduces gradients that are stacked along dim 0, one entry for each device.

    `jax.vmap` over the devices' batches returns such gradients.

    Args:
        gradients: A tree of arrays ``[num_devices, ...]``.
        reduce_type: "mean" or "sum".

    Returns:
        The same tree of arrays ``[...]``, the shapes of the parameters.

    Raises:
        ValueError: `reduce_type` is neither "mean" nor "sum".
        ShardingError: A leaf is a scalar, which has no dim 0.

    Example:
        >>> reduce_gradient_tree({"w": jnp.array([[1.0, 0.0], [3.0, 0.0]])})
        {'w': Array([2., 0.], dtype=float32)}
    """
    reduce = _of_type(reduce_type, {"mean": jnp.mean, "sum": jnp.sum})

    def reduce_leaf(path: KeyPath, leaf: Any) -> jax.Array:
        if not np.ndim(leaf):
            raise ShardingError(
                "the gradient is a scalar, without an axis of devices to reduce.",
                path="gradients" + keystr(path),
                leaf=describe_leaf(leaf),
                remedy="stack one gradient per device along dim 0.",
            )
        return reduce(leaf, axis=0)

    return tree_map_with_path(reduce_leaf, gradients)


def _of_type(reduce_type: str, reductions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if reduce_type.lower() not in reductions:
        raise ValueError(f"reduce_type={reduce_type!r} is not one of {list(reductions)}.")
    return reductions[reduce_type.lower()]
