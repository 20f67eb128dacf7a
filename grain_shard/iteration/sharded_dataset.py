"""`ShardedDataset`: a pipeline that ends in ``.shard_to(mesh)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grain

from grain_shard.collectives import require_order
from grain_shard.errors import ShardingError, describe_mesh, require_int
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.series import Series
from grain_shard.hosts.together import AcrossHosts
from grain_shard.iteration.epochs import Epochs
from grain_shard.iteration.host_batches import HostBatches
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.second_pass import Passes
from grain_shard.iteration.settings import Settings
from grain_shard.reading.contents import Contents
from grain_shard.sharding.assemble import Assembler
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.reshard import Resharder
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.trees import Batch


class ShardedDataset(grain.IterDataset):
    """Global batches on the devices.

    Attributes:
        host: As given.
        settings: As given.
        layout: The rows that this host reads.

    Args:
        parent: This host's batches, as a Grain dataset.
        host: The same, as an iterator asks for them.
        settings: The settings with which the pipeline is run.
        records_per_batch: See the method.
        same_order: Whether it is known to be shuffled, and to have the same order in each pass.

    Example:
        >>> import grain_shard, jax
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(20).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        >>> len(ds), ds.abstract_batch()["x"].shape
        (3, (8,))
    """

    def __init__(
        self,
        parent: grain.MapDataset | grain.IterDataset,
        host: HostBatches,
        settings: Settings,
        records_per_batch: Callable[[], int | None],
        same_order: bool = False,
    ):
        super().__init__(parent)
        self.host: HostBatches = host
        self.settings: Settings = settings
        self.layout: BatchLayout = settings.shardings.layout()
        self._passes = Passes(same_order)
        self._series = Series()
        self._records_per_batch = records_per_batch

    @property
    def shardings(self) -> ShardingTree:
        """The shardings of the batches that are handed out."""
        return self.settings.final_shardings or self.settings.shardings

    @property
    def row_dims(self) -> int:
        """The number of dims of a leaf that count rows. With microbatches it is two, else one."""
        return 1 if self.shardings.microbatches is None else 2

    @property
    def contents(self) -> Contents:
        """The contents of the source, which hosts and restored states compare."""
        return self.host.contents

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            TypeError: Only the end of the stream tells it.
        """
        batches = self.num_batches()
        if batches is None:
            raise TypeError("a stream has no len(): its number of batches is unknown in advance")
        return batches

    def num_batches(self) -> int | None:
        """The number of batches; None if only the end of the stream tells it."""
        return self.host.num_batches()

    def records_per_batch(self) -> int | None:
        """The rows of a full batch without padding; if sizes change, of the first full batch.

        If nothing else tells the number, a batch of a `MapDataset` is read for it.

        Returns:
            The number for all hosts together; None for a stream if only its batches tell the
            number.
        """
        return self._records_per_batch()

    def __bool__(self) -> bool:
        return True  # not by len(), which a stream does not have

    def __iter__(self) -> ShardedIterator:
        return ShardedIterator(self.host, passes=self._passes, **self._how(self.host))

    def epochs(self, n: int) -> Epochs:
        """The batches of several epochs, each in another order and with other augmentations.

        The batches are the same as with ``.batch(B).repeat(n)``, grouped by epoch::

            with ds.epochs(30) as epochs:
                for epoch, batches in enumerate(epochs):
                    for batch in batches:
                        ...

        Args:
            n: How many epochs. One is what ``iter(ds)`` goes over.

        Raises:
            ShardingError: `n` is no positive integer, or the pipeline is a stream or feeds, whose
                end is unknown before it is reached.
        """
        require_int("n", n, 1)
        host = self.host.repeated(n)
        return Epochs(host, num_epochs=n, **self._how(host))

    def _how(self, host: HostBatches) -> dict[str, Any]:
        """Returns the arguments of an iterator over some batches of this host."""
        final = self.settings.final_shardings
        if final:  # the move to `final` is a collective
            require_order(final.devices())
        return {
            "placer": self._assembler(),
            "device_buffer_size": self.settings.device_buffer_size,
            "reshard": final and Resharder(final),
            "across": self._across_hosts(host),
            "dataset": self,
        }

    def abstract_batch(self) -> Batch:
        """Describes every batch, without one: `jax.ShapeDtypeStruct`s with their shardings.

        The calling thread reads this host's rows of the first batch. No other host is asked. The
        result serves to compile a step ahead of time: ``jax.jit(step).lower(state,
        ds.abstract_batch())``.

        With a `BatchSchedule` the result describes a batch of the first size.

        Returns:
            The tree of a batch; text has only this host's rows.

        Raises:
            ShardingError: The batch does not fit its shardings, or the stream has none.
        """
        return self._assembler().abstract(self.host.first(), self.shardings)

    def __repr__(self) -> str:
        batches = self.num_batches()
        count = "" if batches is None else f", {batches} {'batch' if batches == 1 else 'batches'}"
        mesh = describe_mesh(self.shardings.mesh_axes)
        return f"<ShardedDataset of {self.host.kind}, mesh ({mesh}){count}>"

    __str__ = __repr__

    def batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to batch the global batches."""
        self._refuse_regrouping(".batch", "call .batch(B) with a larger B")

    def filter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to leave out some of the global batches, which hosts could not agree on."""
        self._refuse_regrouping(".filter", "filter the records in grain_shard.feeds")

    def mp_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses Grain's workers, which must run before the batches are put on devices."""
        self._refuse_workers()

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Refuses a slice, which Grain takes to divide a dataset among its workers."""
        self._refuse_workers()

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            "the dataset that .shard_to returns cannot be copied or sent to another process,"
            " because it refers to devices.",
            mesh_axes=self.shardings.mesh_axes,
            remedy="copy the dataset before .shard_to. For workers, pass num_workers to .shard_to.",
        )

    def _refuse_regrouping(self, method: str, instead: str) -> NoReturn:
        raise ShardingError(
            f"{method} cannot follow .shard_to, whose batches are on the devices of all hosts.",
            mesh_axes=self.shardings.mesh_axes,
            remedy=f"{instead} before .shard_to. (A .map over batches may follow .shard_to.)",
        )

    def _refuse_workers(self) -> NoReturn:
        raise ShardingError(
            ".mp_prefetch cannot follow .shard_to: a worker process must not hold a device.",
            mesh_axes=self.shardings.mesh_axes,
            remedy="pass num_workers to .shard_to instead of calling .mp_prefetch after .shard_to.",
        )

    def _assembler(self) -> Assembler:
        compares = self.host.rows != GLOBAL
        is_padding = self.host.padding.are_all_of if compares else None
        return Assembler(
            self.settings.shardings,
            self.layout,
            is_padding=is_padding,
            host_batch_sizes=self.host.host_batch_sizes,
        )

    def _across_hosts(self, host: HostBatches) -> AcrossHosts | None:
        if self.layout.num_hosts == 1:
            return None
        settings = self.settings
        # All that hosts compare before the first batch is handed out, but for what only the batch
        # tells: its leaves, and the rows that this host read. The iterator adds those.
        fields = {
            **host.compared,
            "rows": host.rows,
            "remainder": settings.remainder,
            "read": "once" if settings.final_shardings else "needed",
            "pad_value": repr(self.host.padding.pad_value),
            **self.shardings.describe(),
        }
        return AcrossHosts(
            hosts=list(settings.shardings.layouts()),
            series=self._series,
            timeout_s=settings.timeout_s,
            fields=fields,
            shards=self.layout.shards,
            remainder=settings.remainder,
        )


def sharded(ds: Any) -> ShardedDataset | None:
    """Returns the dataset, or an iterator's dataset, if `shard_to` made it."""
    ds = ds.dataset if isinstance(ds, ShardedIterator) else ds
    return ds if isinstance(ds, ShardedDataset) else None
