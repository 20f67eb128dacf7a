"""`ShardBatch`: keeps this host's rows of the global batch, and reads no other rows if possible."""

from __future__ import annotations

from dataclasses import dataclass

from grain_shard.errors import ShardingError
from grain_shard.reading.host_rows import H
from grain_shard.sharding.layout import BatchLayout
from grain_shard.transforms.stage import RowsStage


@dataclass(frozen=True)
class ShardBatch(RowsStage):
    """Keeps the rows of each batch that this host's devices hold.

    Over a `MapDataset` it reads only the records of these rows, unless a ``batch_fn`` or a ``.map``
    after ``.batch`` needs the whole batch. Nothing else refers to the arrays of its batches.

    Example:
        >>> import grain
        >>> ds = grain.MapDataset.range(16).map(lambda i: {"x": i}).batch(8)
        >>> ds.pipe(ShardBatch(BatchLayout(divisor=4, shards=(1, 3))))[1]
        {'x': array([10, 11, 14, 15])}

    Attributes:
        layout: The rows that this host holds.
    """

    layout: BatchLayout

    def __post_init__(self) -> None:
        if not isinstance(self.layout, BatchLayout):
            raise ShardingError(
                f"layout is a {type(self.layout).__name__}, not a BatchLayout.",
                remedy="pass ShardingTree.of(mesh, spec).layout().",
            )

    def change(self, host_rows: H) -> H:
        """Returns the rows of this host: leaves are ``[host_batch_size, ...]``.

        Warns if this host must read rows that it does not hold. A user's stream must be the same on
        every host. With feeds, this host runs only those whose rows it holds.

        Raises:
            ShardingError: The shards do not divide the batch size.
        """
        return host_rows.of_host(self.layout)
