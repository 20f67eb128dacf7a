"""`Resharder`: moves the rows of a batch from the devices of the reading hosts to other devices."""

from __future__ import annotations

from typing import Any, cast

import jax
from jax.sharding import Mesh

from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits
from grain_shard.trees import Batch, flatten, leaves_of


class Resharder:
    """Moves each batch from the shardings of the read to the shardings of the training step.

    A move is a jitted identity function. It is a collective: every host must run it in the same
    order among its other collectives. So it runs in the thread of the training loop, and not in the
    background.

    Args:
        shardings: The shardings that the training step needs.
    """

    def __init__(self, shardings: ShardingTree):
        self._shardings = shardings
        self._mesh = cast(Mesh, shardings.named()[0].mesh)
        self._move: Any = None
        self._last: jax.Array | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the same global batch in the training step's shardings. Text is unchanged.

        Raises:
            ShardingError: The size of a mesh axis does not divide the dim that it shards.
        """
        leaves, structure = leaves_of(batch)
        if self._move is None:
            shardings = self._shardings.match(batch)
            for path, leaf, sharding in zip(flatten(batch)[0], leaves, shardings, strict=True):
                check_fits(path, leaf.dtype, sharding, leaf.shape)
            of_arrays = tuple(filter(None, shardings))  # the sharding of a text leaf is None
            self._move = jax.jit(lambda *arrays: arrays, out_shardings=of_arrays)
        # The mesh of the loop may have other devices, and JAX would then refuse the move.
        with jax.set_mesh(self._mesh):
            moved = self._move(*(leaf for leaf in leaves if isinstance(leaf, jax.Array)))
        self._last = min(moved, key=lambda array: array.nbytes)
        arrays = iter(moved)
        return structure.unflatten(
            [next(arrays) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        )

    def wait(self) -> None:
        """Waits until this host's part of the last move is done.

        Without this, a process that exits during a move could wait for ever for hosts that have
        exited already.
        """
        last, self._last = self._last, None
        if last is not None and not last.is_deleted():  # the step may have donated it
            last.block_until_ready()
