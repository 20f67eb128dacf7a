"""How this host's batches are produced, and which state goes with each.

There are three kinds of pipelines, and this is what an iterator asks of each. `RandomAccess` reads
batch k of a `MapDataset`: its position is k and the record with which that batch begins, whoever
reads it, in whatever thread or process.
`Stream` asks an `IterDataset` for its next batch: its position is whatever Grain's iterator says
after that batch. `HostFeeds`, in a room of its own, is a stream whose state can be cut into feeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grain_shard.background import TaskStage
from grain_shard.errors import ShardingError
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.pad_rows import PadRows
from grain_shard.stats.counts import ReadThreads
from grain_shard.trees import Batch

Position = Any
# The name of the threads that make them.
THREAD = "grain-shard-host"


class Opened(NamedTuple):
    """A position, and this host's batches from there, each with the position after it.

    Attributes:
        position: Where the batches begin.
        batches: (batch, position after it), made in the background.
        first_digest: Of the first whole batch once that was read, where every host reads the same
            whole batches; "" elsewhere.
        reads: Returns the threads that read side by side. It does not refer to the reads.
        faults: Returns the counts of reads that failed. It does not refer to the reads either.
    """

    position: Position
    batches: TaskStage[tuple[Batch, Position]]
    first_digest: Callable[[], str] = str
    reads: Callable[[], ReadThreads] = ReadThreads
    faults: Callable[[], FaultCounts] = FaultCounts


class HostBatches(ABC):
    """A sequence of this host's batches that can be opened at any position.

    Attributes:
        kind: What to call it, in states and to other hosts.
        ends_by_vote: Whether the hosts have to agree batch by batch on where it ends, since nothing
            else tells.
        rows: What it yields on each of several hosts: some rows of batches that are the same
            everywhere ("global"), rows of its own ("local"), or those of its feeds ("feeds").
        fingerprint: What must be the same when a state is restored.
        compared: What must be the same on all hosts.
        padding: What the rows of padding in its batches hold.
        own_feeds: The feeds of this host, if it is of feeds.
        host_batch_sizes: If full batches are of several sizes, all of them, in rows of this host.
    """

    kind: str
    ends_by_vote: bool = False
    rows: str = GLOBAL
    fingerprint: Mapping[str, Any]
    compared: Mapping[str, Any]
    padding: PadRows = PadRows()
    own_feeds: OwnFeeds = OwnFeeds()
    host_batch_sizes: tuple[int, ...] = ()

    @abstractmethod
    def num_batches(self) -> int | None:
        """The length of one pass; None if only the end tells it."""

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
        """A batch like the first one, for its shapes; read here and now.

        Raises:
            ShardingError: There is none.
        """

    @abstractmethod
    def next_batch(self, position: Position) -> Mapping[str, Any]:
        """What tells which batch is the next one, as far as that is the same on every host."""

    def position_at(self, *, step: int | None, record: int | None) -> Position:
        """The position before a step, or before a record.

        Args:
            step: Batches that come before it, in a run from the beginning.
            record: Records that come before it. One of both is given.

        Raises:
            ShardingError: There is none, or nobody can say where it is.
        """
        raise ShardingError(
            "seek needs random access, and this is a stream: where a record of it is, only reading"
            " up to it tells.",
            remedy="go on from a state, by set_state(saved); or keep a MapDataset down to .batch.",
        )

    def repeated(self, times: int) -> Any:
        """As many passes in one, each with an order and augmentations of its own.

        Raises:
            ShardingError: Where an epoch ends cannot be known.
        """
        raise ShardingError(
            "epochs needs random access, and this is a stream: each iter(ds) is a pass, and nobody"
            " knows its end before it comes.",
            remedy="call iter(ds) for each epoch, and shuffle by the epoch's number in the source;"
            " or keep a MapDataset down to .batch.",
        )

    def past_end(self, position: Position) -> Position:
        """The position after a batch for which this host had no row any more."""
        return position

    @abstractmethod
    def to_state(self, position: Position) -> dict[str, Any]:
        """The position as plain JSON, if what the user wrote allows it."""

    @abstractmethod
    def from_state(self, state: dict[str, Any]) -> Position:
        """The position that a state was made from.

        Raises:
            StateError: The state belongs to something else.
        """
