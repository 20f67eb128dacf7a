"""`Epochs`: an iterator over several epochs, each with an order of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

from grain_shard.iteration.host_batches import Position
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.trees import Batch


class Epochs(ShardedIterator):
    """Hands out one epoch after the other; `ShardedDataset.epochs` makes it.

    Each item is an `EpochBatches`, an iterator over the batches of one epoch. The batches of all
    epochs are made ahead as one sequence. So the first batches of an epoch are made while the
    training loop uses the last batches of the previous epoch. All epochs have one state together.
    Orbax saves this state by `grain_shard.checkpoint.CheckpointSave`, or by Orbax's v1 API.

    The next epoch starts at its first batch, even if the loop left the previous epoch early. The
    remaining batches of the previous epoch are then skipped. After `set_state` the next epoch has
    the remaining batches of the epoch to which the state belongs.

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
        num_epochs: Number of epochs.
        options: The other arguments of `ShardedIterator`.
    """

    def __init__(self, host: RandomAccess, *, num_epochs: int, **options: Any):
        # The last epoch that was handed out: `_moves` at that time, and the epoch's number. A
        # reference to its `EpochBatches` would be a cycle, so that only the garbage collector would
        # end the threads of an abandoned iterator.
        self._last: tuple[int, int] | None = None
        self._num_epochs = num_epochs
        super().__init__(host, **options)

    def __len__(self) -> int:
        """Returns the number of epochs. The length of each item is its number of batches."""
        return self._num_epochs

    def __repr__(self) -> str:
        return f"<Epochs: {self._num_epochs} of {super().__repr__()}>"

    def __iter__(self) -> Epochs:
        """Returns this iterator, which goes on with the next epoch.

        After a loop over all epochs, the iterator starts again with the first epoch.
        """
        _, left = self._after_last()
        # An iterator that was sent to the end, by `set_state` or `seek`, stays there.
        has_handed_out = self._last is not None and self._last[0] == self._moves
        if has_handed_out and not left:
            self.reset()
        return self

    def __next__(self) -> EpochBatches:
        position, left = self._after_last()
        if position != self._position:
            self._go_to(position, self._digest)
        epoch = self._batches.pass_of(position)[0]
        if not left:
            try:
                # No batch is left. This call tells the other hosts, and raises StopIteration.
                super().__next__()
            except StopIteration:
                self._last = self._moves, epoch
                raise
        self._last = self._moves, epoch
        return EpochBatches(self, self._moves, epoch, left)

    @property
    def _batches(self) -> RandomAccess:
        return cast(RandomAccess, self._host)

    def _after_last(self) -> tuple[Position, int]:
        """Returns the position at which the next epoch begins, and its number of batches.

        After a restore inside an epoch, the next epoch is the rest of that epoch.
        """
        host, position = self._batches, self._position
        if self._last == (self._moves, host.pass_of(position)[0]):
            position = host.next_pass(position)
        return position, host.pass_of(position)[1]

    def _rewind(self, epoch: int) -> EpochBatches:
        """Goes back to the first batch of an epoch, and returns the epoch's batches once more."""
        self._go_to(self._batches.start_of_pass(epoch), self._digest)
        return next(self)

    def _is_past(self, epoch: int) -> bool:
        """Returns True if another epoch was handed out after this one.

        `set_state`, `seek` and `reset` begin anew: after them the result is False.
        """
        moves, last = self._last or (None, epoch)
        return moves == self._moves and last != epoch

    def _left(self, moves: int, stop: int) -> int:
        """Returns the number of batches from the current position to the end of an epoch.

        Args:
            moves: `_moves` when the epoch was handed out. If the iterator was sent elsewhere since
                then, no batch of the epoch is left.
            stop: Number of batches before the end of the epoch, from the beginning of the pipeline.
        """
        return max(0, stop - self._position.step) if moves == self._moves else 0

    _next_batch = ShardedIterator.__next__


class EpochBatches(Iterator[Batch]):
    """An iterator over the batches of one epoch.

    Attributes:
        epoch: Number of the epoch, from 0. After a restore it is still the epoch's number, while
            `enumerate` would count from 0 again.
    """

    def __init__(self, epochs: Epochs, moves: int, epoch: int, num_batches: int):
        self._epochs = epochs
        self.epoch: int = epoch
        self._moves, self._num_batches = moves, num_batches
        self._stop, self._is_new = epochs._position.step + num_batches, True

    def __len__(self) -> int:
        """Returns the number of batches, including the batches that were handed out."""
        return self._num_batches

    def __repr__(self) -> str:
        left = self._epochs._left(self._moves, self._stop)
        return f"<EpochBatches: epoch {self.epoch}, {left} of {self._num_batches} batches left>"

    def __iter__(self) -> EpochBatches:
        """Returns this iterator.

        If the loop over epochs went on before this iterator was used, this goes back to its epoch.
        """
        if self._is_new and self._epochs._is_past(self.epoch):
            self.reset()
        return self

    def reset(self) -> None:
        """Goes back to the first batch of this epoch.

        A loop over the epochs then goes on with the epoch that follows this one.
        """
        self.__dict__.update(vars(self._epochs._rewind(self.epoch)))

    if not TYPE_CHECKING:  # so that type checkers refuse a missing attribute, too

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an AttributeError, with a hint if the iterator over epochs has the method."""
            text = f"'EpochBatches' object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Epochs, name):
                text += (
                    f", but all epochs together have it.\n  remedy: use epochs.{name} in the loop"
                    " `for batches in epochs: ...`."
                )
            raise AttributeError(text)

    def __getitem__(self, key: Any) -> NoReturn:
        """Raises a TypeError: an item of `epochs` is not a batch, but the batches of an epoch."""
        raise TypeError(
            f"an item of ds.epochs(n) is an iterator over the batches of an epoch, so [{key!r}] is"
            " not one of its leaves.\n"
            "  remedy: loop over it, too: for batches in epochs: for batch in batches: ..."
        )

    def __next__(self) -> Batch:
        if not self._epochs._left(self._moves, self._stop):
            raise StopIteration
        self._is_new = False
        return self._epochs._next_batch()
