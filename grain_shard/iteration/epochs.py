"""`Epochs`: a run of several epochs, in each of which the order is another one."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.stats.figures import Stats
from grain_shard.trees import Batch


class Epochs(Iterator["EpochBatches"]):
    """Hands out the batches of one epoch after the other; `ShardedDataset.epochs` makes it.

    One iterator goes over all of them, so the first batches of an epoch are made while the last of
    the one before are in use. There is one state, which Orbax takes as it does that of any iterator
    of this package: by `grain_shard.checkpoint.CheckpointSave`, or its v1 API.

    Whoever asks for the next epoch gets it from its beginning: what was left of the one before, if
    the loop has left it early, is skipped and not read any more. After `set_state`, the next epoch
    is what is left of the one in which the state stands.

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
        iterator: Over these.
        num_epochs: How many epochs there are.
    """

    def __init__(self, host: RandomAccess, iterator: ShardedIterator, num_epochs: int):
        self._host, self._iterator, self._num_epochs = host, iterator, num_epochs
        # The epoch under way, and how often another was begun or sought. Not its `EpochBatches`:
        # with a reference each way, only the garbage collector would end the threads of a run that
        # nobody refers to any more.
        self._under_way: int | None = None
        self._begun = 0

    def __len__(self) -> int:
        """The number of epochs; each of them has its number of batches."""
        return self._num_epochs

    def __repr__(self) -> str:
        return f"<Epochs: {self._num_epochs} of {self._iterator!r}>"

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> EpochBatches:
        epoch, left = self._host.pass_of(self._iterator.position)
        if epoch == self._under_way:
            self._iterator.go_to(self._host.next_pass(self._iterator.position))
            epoch, left = self._host.pass_of(self._iterator.position)
        self._leave()
        if not left:
            next(self._iterator)  # ends, too, and waits for what is under way
        self._under_way = epoch
        return EpochBatches(self, self._begun, epoch, left)

    def _leave(self) -> None:
        """The batches of the epoch under way are not handed out any more."""
        self._under_way, self._begun = None, self._begun + 1

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch of any epoch, as plain JSON."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position, of these epochs or of an iterator over the dataset.

        Raises:
            StateError: The state was saved by another pipeline; the message names what changed.
        """
        self._iterator.set_state(state)
        self._leave()

    def seek(self, step: int | None = None, *, record: int | None = None) -> None:
        """Goes to a step, or to a record, counted over all epochs; see `ShardedIterator.seek`."""
        self._iterator.seek(step, record=record)
        self._leave()

    def write_state(self, directory: Any) -> None:
        """Writes the state into files of a folder, once every host has called it."""
        self._iterator.write_state(directory)

    def read_state(self, directory: Any) -> None:
        """Goes on from the state that the hosts have written; see `ShardedIterator.read_state`."""
        self._iterator.read_state(directory)
        self._leave()

    async def save(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: writes the state while the loop goes on."""
        return await self._iterator.save(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: restores what `save` wrote."""
        done = await self._iterator.load(directory)
        self._leave()
        return done

    def stats(self) -> Stats:
        """What it has done in all epochs so far; see `ShardedIterator.stats`."""
        return self._iterator.stats()

    def close(self) -> None:
        """Stops the background threads and waits for them; a second call does nothing."""
        self._iterator.close()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        self._iterator.__exit__(exc_type, exc, tb)

    def next_batch(self, begun: int) -> Batch:
        """The next batch, unless another epoch was begun or sought meanwhile."""
        if begun != self._begun:
            raise StopIteration
        return next(self._iterator)


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
        """How many batches it hands out, those that it already has included."""
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
