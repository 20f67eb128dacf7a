"""`Resharder`: moves the rows of a batch from the devices of the reading hosts to other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, Sharding

from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits
from grain_shard.trees import Batch, flatten, leaves_of


class Resharder:
    """Moves each batch from the shardings of the read to the shardings of the training step.

    A move is a jitted identity function. There is one move for each batch; on several slices there
    may be two, see `ShardingTree.moves`.

    A move is a collective: every host must run it in the same order among its other collectives.
    So it runs in the thread of the training loop, and not in the background.

    Args:
        shardings: The shardings that the training step needs.
    """

    def __init__(self, shardings: ShardingTree):
        self._shardings = shardings
        self._mesh = cast(Mesh, shardings.named()[0].mesh)
        self._moves: list[Any] = []
        self._last: jax.Array | None = None
        # The last batch, the number of its finished moves, and its arrays after these moves. An
        # interrupt may end a call between two moves. The next call must not repeat a finished move,
        # because the other hosts do not repeat it.
        self._under_way: tuple[Batch, int, Sequence[jax.Array]] | None = None

    @jax.transfer_guard("allow")
    def __call__(self, batch: Batch) -> Batch:
        """Returns the same global batch in the training step's shardings. Text is unchanged.

        Raises:
            ShardingError: The size of a mesh axis does not divide the dim that it shards.
        """
        leaves, structure = leaves_of(batch)
        if not self._moves:
            shardings = self._shardings.match(batch)
            for path, leaf, sharding in zip(flatten(batch)[0], leaves, shardings, strict=True):
                check_fits(path, leaf.dtype, sharding, leaf.shape)
            self._moves = [move_to(step.match(batch)) for step in self._shardings.moves()]
        if self._under_way is None or self._under_way[0] is not batch:
            self._under_way = batch, 0, [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        # The mesh of the loop may have other devices, and JAX would then refuse the move.
        with jax.set_mesh(self._mesh):
            for n in range(self._under_way[1], len(self._moves)):
                self._under_way = batch, n + 1, self._moves[n](*self._under_way[2])
        moved = self._under_way[2]
        self._last = min(moved, key=lambda array: array.nbytes)
        arrays = iter(moved)
        return structure.unflatten(
            [next(arrays) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        )

    def forget(self) -> None:
        """Frees the arrays of the last batch, which must not be passed to `__call__` again."""
        self._under_way = None

    def wait(self) -> None:
        """Waits until this host's part of the last move is done.

        Without this, a process that exits during a move could wait for ever for hosts that have
        exited already.
        """
        last, self._last = self._last, None
        if last is not None and not last.is_deleted():  # the step may have donated it
            last.block_until_ready()


def move_to(shardings: Sequence[Sharding | None]) -> Any:
    """Returns a jitted function that takes arrays, and returns each one in its sharding.

    Args:
        shardings: The sharding of each leaf of a batch, in order. A None belongs to a text leaf. It
            is skipped, because the function takes no text.
    """
    return jax.jit(lambda *arrays: arrays, out_shardings=tuple(filter(None, shardings)))
