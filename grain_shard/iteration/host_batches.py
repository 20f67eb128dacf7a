"""This host's batches as an iterator needs them, with the position after each.

There are three kinds of pipelines. `RandomAccess` reads batch k of a `MapDataset`: its position is
k and the record with which that batch begins, in whatever thread or process the batch is read.
`Stream` takes the next batch of an `IterDataset`: its position is the state of Grain's iterator
after that batch. `HostFeeds`, in a room of its own, takes batches of feeds, each of which has a
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grain_shard.background import Background, TaskStage
from grain_shard.errors import ShardingError
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.reading.contents import Contents
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.padding import Padding
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.stats.counts import ReadThreads
from grain_shard.tasks import Producer, naming_closed
from grain_shard.trees import Batch

Position = Any
# The name of the threads that make batches.
THREAD = "grain-shard-host"


class Opened(NamedTuple):
    """A position, and this host's batches from there, each with the position after it.

    Attributes:
        position: The position at which the batches begin.
        batches: (batch, position after it), made in the background.
        first_digest: Returns the digest of the first whole batch once it was read, if every host
            reads the same whole batches; "" otherwise. It does not refer to the batches.
        reads: Returns the threads that read side by side. It does not refer to the reads.
        faults: Returns the counts of reads that failed. It does not refer to the reads either.
    """

    position: Position
    batches: TaskStage[tuple[Batch, Position]]
    first_digest: Callable[[], str] = str
    reads: Callable[[], ReadThreads] = ReadThreads
    faults: Callable[[], FaultCounts] = FaultCounts


class _WithPositions(Producer[tuple[Batch, Position]]):
    """The batches of an iterator, each with the position after it; with the first, contents."""

    def __init__(self, iterator: BatchIterator, kind: str, contents: Contents):
        self._iterator, self._kind, self._contents = iterator, kind, contents

    def __next__(self) -> tuple[Batch, Position]:
        batch = next(self._iterator)
        self._contents.read()
        return batch, self._iterator.position()

    def stop(self) -> None:
        self._iterator.stop()

    def close(self) -> None:
        with naming_closed(f"this host's {self._kind}"):
            self._iterator.close()


def opened_in_order(
    iterator: BatchIterator,
    kind: str,
    buffer_size: int,
    faults: Callable[[], FaultCounts],
    first_digest: Callable[[], str] = str,
    contents: Contents = Contents(),  # noqa: B008 (it has nothing to read)
) -> Opened:
    """Opens batches that come in order only, from where their iterator stands.

    Args:
        iterator: The iterator, which is closed with the batches.
        kind: The kind of the pipeline.
        buffer_size: Batches that may wait or be in the making.
        faults: As in `Opened`.
        first_digest: As in `Opened`.
        contents: The contents to read beside the first batch.
    """
    position, source = iterator.position(), _WithPositions(iterator, kind, contents)
    batches = Background(lambda item: item, source, buffer_size=buffer_size, name=THREAD)
    return Opened(position, batches, first_digest=first_digest, faults=faults)


class HostBatches(ABC):
    """A sequence of this host's batches that can be opened at any position.

    Attributes:
        kind: The kind of the pipeline, in states and to other hosts.
        ends_by_vote: Whether the hosts have to agree batch by batch on where it ends, because it
            has no length.
        rows: The rows on each of several hosts: some rows of batches that are the same everywhere
            ("global"), rows of its own ("local"), or the rows of its feeds ("feeds").
        compared: The fields that must be the same on all hosts.
        contents: The contents of its source.
        padding: The content of rows of padding in its batches.
        own_feeds: The feeds of this host; none unless the pipeline is one of feeds.
        reads_other_rows: True if this host reads whole batches to keep some of their rows.
        host_batch_sizes: If full batches are of several sizes, all of them, in rows of this host.
    """

    kind: str
    ends_by_vote: bool = False
    rows: str = GLOBAL
    compared: Mapping[str, Any] = {}
    contents: Contents = Contents()
    padding: Padding = Padding(1)
    own_feeds: OwnFeeds = OwnFeeds()
    reads_other_rows: bool = False
    host_batch_sizes: tuple[int, ...] = ()

    def num_batches(self) -> int | None:
        """Returns the length of one pass; None if it is unknown before the end."""
        return None

    @abstractmethod
    def open(self, position: Position | None) -> Opened:
        """Starts at a position, or at the beginning.

        Args:
            position: Where to start; None for the beginning.

        Raises:
            StateError: The pipeline cannot start there.
        """

    @abstractmethod
    def first(self) -> Batch:
        """Reads a batch like the first one, for its shapes, in the calling thread.

        Raises:
            ShardingError: There is none.
        """

    def require_new_pass(self) -> None:  # noqa: B027
        """Refuses a pass from the beginning if the only possible pass has begun.

        Raises:
            ShardingError: The source is used up.
        """

    def next_batch(self, position: Position) -> Mapping[str, Any]:
        """Returns the number of the next batch, as far as batches are counted on every host."""
        return {}

    def position_at(self, *, step: int | None, record: int | None) -> Position:
        """Returns the position before a step, or before a record.

        Args:
            step: Batches that come before it, in a run from the beginning.
            record: Records that come before it. One of both is given.

        Raises:
            ShardingError: There is none, or it cannot be found.
        """
        raise ShardingError(
            "seek needs random access, and this pipeline is a stream, which can only be read from"
            " its beginning.",
            remedy="call set_state(saved) to go on from a saved state, or keep the pipeline a"
            " grain.MapDataset down to .batch.",
        )

    def repeated(self, times: int) -> Any:
        """Returns several passes in one, each with an order and augmentations of its own.

        Raises:
            ShardingError: Where an epoch ends cannot be known.
        """
        raise ShardingError(
            "ds.epochs(n) needs random access, and this pipeline is a stream, whose length is"
            " unknown in advance.",
            remedy="call iter(ds) once per epoch, and shuffle in the source with a seed that"
            " depends on the epoch. Or keep the pipeline a grain.MapDataset down to .batch.",
        )

    def past_end(self, position: Position, batches: int) -> Position:
        """Returns the position after some batches of padding, for which this host had no rows."""
        return position

    @abstractmethod
    def to_state(self, position: Position) -> dict[str, Any]:
        """Returns the position as plain JSON, if the user's iterators have such states."""

    @abstractmethod
    def from_state(self, state: dict[str, Any]) -> Position:
        """Returns the position that a state was made from.

        Raises:
            StateError: The state belongs to something else.
        """
