"""`Epochs`: a run of several epochs, in each of which the order is another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from grain_shard.iteration.host_batches import Position
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.trees import Batch


class Epochs(ShardedIterator):
    """Hands out the batches of one epoch after the other; `ShardedDataset.epochs` makes it.

    It is one iterator over all of them, which hands out its batches in groups. So the first batches
    of an epoch are made while the last of the one before are in use. There is one state, which
    Orbax takes like the state of any iterator of this package: by
    `grain_shard.checkpoint.CheckpointSave`, or its v1 API.

    Whoever asks for the next epoch gets it from its beginning: the rest of the one before, if the
    loop has left it early, is skipped and not read any more. After `set_state`, the next epoch is
    the rest of the one in which the state stands.

    Example:
        >>> import grain, jax
        >>> import grain_shard
        >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        >>> records = grain.MapDataset.range(7).seed(1).shuffle().map(lambda i: {"x": i})
        >>> with records.batch(4).shard_to(mesh).epochs(2) as epochs:
        ...     for batches in epochs:
        ...         for batch in batches:
        ...             print(batches.epoch, batch["x"], batch["valid_mask"].sum())
        0 [6 5 2 3] 4
        0 [0 4 1 0] 3
        1 [2 6 4 3] 4
        1 [5 0 1 0] 3

    Args:
        host: This host's batches, of all epochs.
        num_epochs: How many epochs there are.
        how: As for `ShardedIterator`.
    """

    def __init__(self, host: RandomAccess, *, num_epochs: int, **how: Any):
        # The current epoch, and the number of times that one was begun or sought. The current
        # `EpochBatches` is not kept: in a reference cycle, only the garbage collector would end the
        # threads of an abandoned run.
        self._under_way: int | None = None
        self._begun, self._num_epochs = 0, num_epochs
        super().__init__(host, **how)

    def __len__(self) -> int:
        """The number of epochs; each of them has its number of batches."""
        return self._num_epochs

    def __repr__(self) -> str:
        return f"<Epochs: {self._num_epochs} of {super().__repr__()}>"

    def __next__(self) -> EpochBatches:
        host = cast(RandomAccess, self._host)
        epoch, left = host.pass_of(self.position)
        if epoch == self._under_way:
            self.go_to(host.next_pass(self.position))
            epoch, left = host.pass_of(self.position)
        self._leave()
        if not left:
            super().__next__()  # ends, too, and waits for the work under way
        self._under_way = epoch
        return EpochBatches(self, self._begun, epoch, left)

    def go_to(self, position: Position) -> None:
        super().go_to(position)
        self._leave()

    def _leave(self) -> None:
        """The batches of the epoch under way are not handed out any more."""
        self._under_way, self._begun = None, self._begun + 1

    def next_batch(self, begun: int) -> Batch:
        """The next batch, unless another epoch was begun or sought meanwhile."""
        if begun != self._begun:
            raise StopIteration
        return super().__next__()


class EpochBatches(Iterator[Batch]):
    """The batches of one epoch, from where it was begun.

    Attributes:
        epoch: Which epoch, from 0 on; the right one after a restore, too, which `enumerate` is not.
    """

    def __init__(self, epochs: Epochs, begun: int, epoch: int, num_batches: int):
        self._epochs, self._begun = epochs, begun
        self.epoch: int = epoch
        self._num_batches = self._left = num_batches

    def __len__(self) -> int:
        """The number of batches that it hands out, including those before now."""
        return self._num_batches

    def __repr__(self) -> str:
        return (
            f"<EpochBatches: epoch {self.epoch}, {self._left} of {self._num_batches} batches left>"
        )

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Batch:
        if not self._left:
            raise StopIteration
        batch = self._epochs.next_batch(self._begun)
        self._left -= 1
        return batch
