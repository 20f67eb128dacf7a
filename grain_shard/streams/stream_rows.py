"""`StreamRows`: how the turns of streams become this host's batches, by a `Joiner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grain_shard.reading.faults import FaultRules
from grain_shard.reading.host_rows import HostRows
from grain_shard.sharding.layout import BatchLayout, round_up
from grain_shard.streams.streams import Streams, Turn
from grain_shard.trees import Batch

R = TypeVar("R", bound="StreamRows")


# A `Joiner` returns this object in place of a batch that is left out. A batch may be None itself.
LEFT_OUT: Any = object()


class Joiner(ABC):
    """Makes the batches of one iterator of turns, one after the other.

    Attributes:
        learned: Facts that the batches so far have shown, by the names in `Streams.learned`. The
            dict is replaced, and never changed.
        first_digest: Digest of the first batch, if every host gets the same whole batches and keeps
            some of their rows; "" otherwise.
    """

    learned: Mapping[str, int] = {}
    first_digest: str = ""

    @abstractmethod
    def has_ended(self, turns: Sequence[Turn]) -> bool:
        """Returns True if streams have ended, so that these turns make no batch.

        Raises:
            ShardingError: A stream has too few rows, and a batch may not be short.
        """

    @abstractmethod
    def join(self, turns: Sequence[Turn]) -> Batch:
        """Returns this host's rows of the batch of these turns; `LEFT_OUT` if it is left out.

        Raises:
            ShardingError: The rows do not make a batch.
        """


@dataclass(frozen=True, kw_only=True)
class StreamRows(HostRows):
    """The padding of batches of streams, and this host's rows of them.

    Attributes:
        streams: The streams.
    """

    streams: Streams

    @property
    @abstractmethod
    def unpadded_size(self) -> int | None:
        """Rows of a full global batch, without padding; None if unknown before a batch is read."""

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        size = self.unpadded_size
        return () if size is None else (self.padded_size(size),)

    @property
    @abstractmethod
    def rows_in_turn(self) -> int:
        """Number of rows that each stream gives in a turn."""

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the streams that this host runs."""
        return (0,)

    def padded_size(self, rows: int) -> int:
        """Returns the number of rows of a full batch of `rows` rows, with padding."""
        return rows if self.padding is None else round_up(rows, self.padding.divisor)

    def with_own_arrays(self: R) -> R:
        """Returns the rows in arrays to which no other object refers."""
        return self

    @abstractmethod
    def begin(self, learned: Mapping[str, int]) -> Joiner:
        """Returns a `Joiner` for the batches from one position on.

        Args:
            learned: `Joiner.learned` at that position; empty at the beginning.

        Raises:
            StateError: The earlier batches had another number of rows.
        """

    @abstractmethod
    def first(self, rules: FaultRules) -> Batch:
        """Reads a host batch, to learn the shapes and dtypes of this pipeline.

        Raises:
            ShardingError: There is no row, or the loop would not get the row that was read.
        """

    def check_hosts(self, layouts: Mapping[int, BatchLayout]) -> None:
        """Checks that the hosts of a mesh can divide the streams among them.

        Args:
            layouts: The rows of each host, by the host's number.

        Raises:
            ShardingError: There are too few streams, or all rows of a host would be padding.
        """

    def to_save(self, layouts: Mapping[int, BatchLayout], host: int) -> Sequence[int]:
        """Returns the feeds that a host writes into a checkpoint, by the rows of each host."""
        return ()

    def fault_rules(self, layouts: Mapping[int, BatchLayout], rules: FaultRules) -> FaultRules:
        """Returns the user's rules for failed reads, or a copy if several hosts read the same rows.

        Raises:
            ShardingError: The rules cannot be applied to these streams.
        """
        return rules
