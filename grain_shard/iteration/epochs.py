"""`Epochs`: a run of several epochs, in each of which the order is another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from grain_shard.iteration.host_batches import Position
from grain_shard.iteration.iterator import Run, ShardedIterator
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
        # The run and epoch last handed out. Its `EpochBatches` are not kept: in a reference cycle,
        # only the garbage collector would end the threads of an abandoned run.
        self._last: tuple[Run, int] | None = None
        self._num_epochs, self._has_ended = num_epochs, False
        super().__init__(host, **how)

    def __len__(self) -> int:
        """The number of epochs; each of them has its number of batches."""
        return self._num_epochs

    def __repr__(self) -> str:
        return f"<Epochs: {self._num_epochs} of {super().__repr__()}>"

    def __iter__(self) -> Epochs:
        """Goes on with the next epoch; after a loop over all of them, from the first one again."""
        position, left = self._after_last()
        if self._has_ended or (not left and position != self.position):
            self.reset()
        return self

    def __next__(self) -> EpochBatches:
        position, left = self._after_last()
        if position != self.position:
            self.go_to(position)
        epoch, last = self._batches.pass_of(position)[0], self._last
        if not left:
            try:
                super().__next__()  # ends, too, and waits for the work under way
            except StopIteration:
                self._last, self._has_ended = (self._at.run, epoch), True
                raise
        batches = EpochBatches(self, self._at.run, epoch, left)
        try:
            self._last = self._at.run, epoch
            return batches
        except BaseException:  # an interrupt: the epoch was not handed out
            self._last = last
            raise

    def go_to(self, position: Position | None) -> None:
        super().go_to(position)
        self._has_ended = False

    @property
    def _batches(self) -> RandomAccess:
        return cast(RandomAccess, self._host)

    def _after_last(self) -> tuple[Position, int]:
        """Returns the position at which the next epoch begins, and the number of its batches."""
        host, position = self._batches, self.position
        if self._last == (self._at.run, host.pass_of(position)[0]):
            position = host.next_pass(position)
        return position, host.pass_of(position)[1]

    def rewind(self, epoch: int) -> EpochBatches:
        """Goes to the first batch of an epoch, and hands it out once more."""
        self.go_to(self._batches.start_of_pass(epoch))
        return next(self)

    def is_past(self, epoch: int) -> bool:
        """Returns whether another epoch was asked for since, and no other place was gone to."""
        return self._last is not None and self._last[0] is self._at.run and self._last[1] != epoch

    def left(self, run: Run, stop: int) -> int:
        """Returns the number of batches of a run before a step; 0 if the run is over."""
        return max(0, stop - self.position.step) if run is self._at.run else 0

    next_batch = ShardedIterator.__next__


class EpochBatches(Iterator[Batch]):
    """The batches of one epoch, from where it was begun.

    Attributes:
        epoch: Which epoch, from 0 on; the right one after a restore, too, which `enumerate` is not.
    """

    def __init__(self, epochs: Epochs, run: Run, epoch: int, num_batches: int):
        self._epochs = epochs
        self.epoch: int = epoch
        self._run, self._num_batches = run, num_batches
        self._stop, self._is_new = epochs.position.step + num_batches, True

    def __len__(self) -> int:
        """The number of batches that it hands out, including those before now."""
        return self._num_batches

    def __repr__(self) -> str:
        left = self._epochs.left(self._run, self._stop)
        return f"<EpochBatches: epoch {self.epoch}, {left} of {self._num_batches} batches left>"

    def __iter__(self) -> EpochBatches:
        """Goes back to the epoch if the next one was asked for before a batch of this one."""
        if self._is_new and self._epochs.is_past(self.epoch):
            self.reset()
        return self

    def reset(self) -> None:
        """Goes back to the first batch of this epoch; the next epoch is then the one after it."""
        self.__dict__.update(vars(self._epochs.rewind(self.epoch)))

    def __next__(self) -> Batch:
        if not self._epochs.left(self._run, self._stop):
            raise StopIteration
        self._is_new = False
        return self._epochs.next_batch()
