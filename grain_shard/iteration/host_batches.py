"""`HostBatches`: this host's batches, each with the position after it, for any kind of pipeline.

There are two kinds of pipelines, each a subclass.

- `RandomAccess` reads batch k of a `MapDataset`. Its position is k, and the record with which
  batch k begins.
- `HostStreams` (in `streams/`) takes the next batch of an `IterDataset`, or makes the next batch of
  the feeds of this host. Its position has the number of batches, and the state of each stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grain_shard.errors import ShardingError
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.padding import Padding
from grain_shard.stats.counts import ReadThreads
from grain_shard.threads.pool import Pool
from grain_shard.trees import Batch

Position = Any
# The prefix of the names of the threads that make batches.
THREAD = "grain-shard-host"


class Opened(NamedTuple):
    """This host's batches from one position on, made in the background.

    The functions do not refer to `batches`, so to keep one keeps no threads alive.

    Attributes:
        position: The position before the first batch.
        batches: The pairs (host batch, position after it).
        total: Number of all batches, including those before the position; None if unknown. It
            differs from `HostBatches.num_batches` after a restore with another batch size.
        first_digest: Returns the digest of the first whole batch, if every host reads the same
            whole batches. Otherwise, and until this batch is read, returns "".
        reads: Returns the number of threads that read side by side, and its reason.
        faults: Returns the counts of failed reads.
    """

    position: Position
    batches: Pool[tuple[Batch, Position]]
    total: int | None = None
    first_digest: Callable[[], str] = str
    reads: Callable[[], ReadThreads] = ReadThreads
    faults: Callable[[], FaultCounts] = FaultCounts


class HostBatches(ABC):
    """This host's batches of a pipeline, which can be opened at any position.

    Attributes:
        kind: The kind of the pipeline, which states contain and hosts compare.
        ends_by_vote: True if the pipeline has no length, so that the hosts must vote on its end.
        rows: The rows that the pipeline yields on each of several hosts. "global": the same whole
            batches, of which the host keeps its rows. "local": only the host's own rows. "feeds":
            the rows of the host's feeds.
        compared: The fields that must be the same on all hosts.
        first_record: The digest of the source's first record, to compare with other hosts and with
            states.
        padding: The values of rows of padding, and the key of their mask.
        own_feeds: The feeds of this host; empty unless the pipeline is made of feeds.
        keeps_streams: True if the user's streams run in this process. Then all threads must have
            left the streams before the iterator opens them at another position.
        reads_other_rows: True if this host reads whole batches to keep some of their rows.
        host_batch_sizes: Rows of this host in a full batch, one number for each size that a full
            global batch may have. Empty if all full batches have the same size.
    """

    kind: str
    ends_by_vote: bool = False
    rows: str = GLOBAL
    compared: Mapping[str, Any] = {}
    first_record: FirstRecord = FirstRecord()
    padding: Padding = Padding(1)
    own_feeds: OwnFeeds = OwnFeeds()
    keeps_streams: bool = False
    reads_other_rows: bool = False
    host_batch_sizes: tuple[int, ...] = ()

    def num_batches(self) -> int | None:
        """Returns the number of batches from beginning to end; None if unknown before the end."""
        return None

    @abstractmethod
    def open(self, position: Position | None) -> Opened:
        """Returns the batches from a position on. Threads start to make them at the first ``next``.

        Args:
            position: The position before the first batch; None for the beginning.

        Raises:
            StateError: The pipeline cannot start at this position.
        """

    @abstractmethod
    def first(self) -> Batch:
        """Returns a host batch with the shapes and dtypes of this pipeline.

        The calling thread reads records for it.

        Raises:
            ShardingError: The pipeline has no batch.
        """

    def require_new_pass(self) -> None:  # noqa: B027
        """Refuses another pass over the source.

        Raises:
            ShardingError: The source allows only one pass, and that pass has begun.
        """

    @abstractmethod
    def next_batch(self, position: Position) -> Mapping[str, Any]:
        """Returns fields that hosts compare: the number of the next batch.

        If the position counts records, a second field has the first record of that batch.
        """

    def position_at(self, *, step: int | None, record: int | None) -> Position:
        """Returns the position of a `seek`, which gives either a step or a record.

        Args:
            step: Number of batches before the position, from the beginning of the pipeline.
            record: Number of records before the position, including records of earlier epochs.

        Raises:
            ShardingError: There is no such step or record, or the pipeline is a stream or feeds.
        """
        raise ShardingError(
            "seek needs random access. Streams and feeds cannot jump to a step or a record.",
            remedy="call set_state(saved) to go on from a saved state. To use seek, keep the"
            " pipeline a grain.MapDataset as far as .batch.",
        )

    @abstractmethod
    def repeated(self, times: int) -> Any:
        """Returns the batches of several passes in one sequence, as one `HostBatches`.

        Each pass has another order and other augmentations.

        Args:
            times: Number of passes.

        Raises:
            ShardingError: The end of a pass is unknown before it is reached.
        """

    def past_end(self, position: Position, batches: int) -> Position:
        """Returns the position after batches of padding, which follow this host's last rows.

        Args:
            position: The position after the last batch with rows of this host.
            batches: Number of batches of padding since then.
        """
        return position

    def why_unsaved(self) -> str:
        """Returns why no state can be saved, with the remedy; "" if no reason is known so far."""
        return ""

    @abstractmethod
    def to_state(self, position: Position) -> dict[str, Any]:
        """Returns the position as plain JSON.

        Raises:
            StateError: The pipeline has an iterator of the user without a state.
        """

    @abstractmethod
    def from_state(self, state: dict[str, Any]) -> Position:
        """Returns the position of a state that `to_state` made.

        Raises:
            StateError: The state was saved by another pipeline.
        """
