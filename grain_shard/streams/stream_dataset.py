"""`StreamDataset`: batches of streams, as a dataset of Grain."""

from __future__ import annotations

from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError
from grain_shard.streams.stream_batches import StreamIterator
from grain_shard.streams.stream_rows import StreamRows
from grain_shard.streams.streams import OneStream
from grain_shard.streams.whole_rows import WholeRows


class StreamDataset(grain.IterDataset):
    """Batches of a user's stream, or of feeds. Stages of the chain change which rows it has.

    Args:
        host_rows: The streams, and how their turns become batches.
        made_by: The stage that made this dataset, or the name of the batches, for ``str``.
        parent: The dataset to which the stage was applied, so that Grain can walk up the pipeline.
            None for batches of feeds, whose streams are made later.
    """

    def __init__(
        self, host_rows: StreamRows, *, made_by: Any, parent: grain.IterDataset | None = None
    ):
        super().__init__(() if parent is None else (parent,))
        self.host_rows: StreamRows = host_rows
        self._made_by = made_by

    @classmethod
    def of(cls, ds: grain.IterDataset) -> StreamDataset:
        """Returns the batches of a user's stream.

        Raises:
            ShardingError: Grain would lose epochs of the dataset after a restore.
        """
        return cls(WholeRows(streams=OneStream(ds)), made_by=ds, parent=ds)

    def after(self, host_rows: StreamRows, made_by: Any = None) -> StreamDataset:
        """Returns the dataset after a stage: the same batches with other padding or other rows.

        Args:
            host_rows: The padding, and the rows that this host keeps.
            made_by: The stage; None keeps the name of this dataset.
        """
        parent = self if self.parents else None
        return StreamDataset(host_rows, made_by=made_by or self._made_by, parent=parent)

    def whole(self) -> StreamDataset:
        """Returns a dataset of whole batches, of which rows can be chosen.

        If rows of a user's stream were chosen already, the chosen rows count as a whole batch.
        """
        chosen = self.host_rows.layout is not None and isinstance(self.host_rows, WholeRows)
        return StreamDataset.of(self) if chosen else self

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises a `ShardingError`: a stream is read from its beginning, or from a state."""
        raise ShardingError(
            "a stream has no batch at an index, and no slices.",
            remedy="keep the pipeline a grain.MapDataset as far as .batch. A stream goes on from"
            " the state of its iterator.",
        )

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self.host_rows)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by)
