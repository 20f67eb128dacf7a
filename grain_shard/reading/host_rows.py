"""`HostRows`: the padding of batches, and the rows of them that a host keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from grain_shard.reading.padding import Padding
from grain_shard.sharding.layout import BatchLayout

H = TypeVar("H", bound="HostRows")
# A function that raises an error, or warns, if it does not accept the size of a full batch. Its
# second argument is `HostRows.num_streams`.
CheckSize = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class HostRows(ABC):
    """The padding of batches, and the rows of them that this host keeps.

    There is a subclass for each kind of pipeline. The stages of the chain make changed copies.

    Attributes:
        padding: The padding of each batch; None for unpadded batches.
        layout: The rows of a batch that this host keeps; None to keep all rows.
    """

    padding: Padding | None = None
    layout: BatchLayout | None = None

    @property
    @abstractmethod
    def global_batch_sizes(self) -> tuple[int, ...]:
        """The sizes of full global batches with padding, each listed once.

        The tuple is empty if a batch must be read to learn its size.
        """

    @property
    def num_streams(self) -> int:
        """Number of streams that each give the same number of rows to a batch."""
        return 1

    def checked(self: H, check: CheckSize) -> H:
        """Checks the size of a full batch, and returns this object.

        A size that is not known yet is checked at the first batch.

        Raises:
            ShardingError: The pipeline has no batch, or the check raised it.
        """
        for size in self.global_batch_sizes:
            check(size, self.num_streams)
        return self

    def padded(self: H, padding: Padding) -> H:
        """Returns a copy with padding.

        Raises:
            ShardingError: The last batch is known to be short, and `padding` refuses short batches
                or leaves no batch.
        """
        return replace(self, padding=padding)

    def of_host(self: H, layout: BatchLayout) -> H:
        """Returns a copy for one host.

        Args:
            layout: The rows that the host keeps.

        Raises:
            ShardingError: The shards are known not to divide the batch size.
        """
        return replace(self, layout=layout)
