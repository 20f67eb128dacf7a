"""`ShardedDataset`: a pipeline that ends in ``.shard_to(mesh)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError, describe_mesh, describe_spec, require_int
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.host_group import GroupSettings
from grain_shard.hosts.series import Series
from grain_shard.iteration.epochs import Epochs
from grain_shard.iteration.host_batches import HostBatches
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.settings import Settings
from grain_shard.sharding.assemble import Assembler
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sources.split import warn_of_reshuffled_slice
from grain_shard.state_json import warn_unsaved
from grain_shard.trees import Batch


class ShardedDataset(grain.IterDataset):
    """A dataset of global batches on the devices, which `shard_to` returns.

    Args:
        parent: This host's batches, as a Grain dataset, for Grain's walks up the pipeline.
        host: The same batches, as iterators open them at any position.
        settings: The options of `shard_to`.
        records_per_batch: Returns the number of records in a full global batch; None if unknown.
        to_devices: False leaves the batches on the host; see `host_rows`.

    Attributes:
        layout: The rows of a global batch that this host reads.

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
        to_devices: bool = True,
    ):
        super().__init__(parent)
        self.to_devices: bool = to_devices
        self.host: HostBatches = host
        self.settings: Settings = settings
        self.layout: BatchLayout = settings.shardings.layout()
        self._series = Series()
        self._is_warned = False  # True once a warning was logged that no state can be saved
        self._records_per_batch = records_per_batch

    @property
    def shardings(self) -> ShardingTree:
        """The shardings of the batches that are handed out."""
        return self.settings.shardings

    def __len__(self) -> int:
        """Returns the number of batches.

        Raises:
            TypeError: The pipeline is a stream or feeds, whose number of batches is not known.
        """
        batches = self.num_batches()
        if batches is None:
            raise TypeError("streams and feeds have no len(): their number of batches is not known")
        return batches

    def num_batches(self) -> int | None:
        """Returns the number of batches; None for a stream or feeds, where it is unknown."""
        return self.host.num_batches()

    def records_per_batch(self) -> int | None:
        """Returns the number of records in a full global batch, without padding.

        If batch sizes change, this is the size of the first full batch. If a `MapDataset` does not
        tell the size, one batch is read to find it.

        Returns:
            The number, of all hosts together; None for a stream whose size only a read would show.
        """
        return self._records_per_batch()

    def __bool__(self) -> bool:
        return True  # without this, bool(ds) would call len(), which raises for a stream

    def __iter__(self) -> ShardedIterator:
        iterator = ShardedIterator(self.host, **self._iterator_options(self.host))
        if (why := self.host.why_unsaved()) and not self._is_warned:
            self._is_warned = True
            warn_unsaved(why)
        return iterator

    def epochs(self, n: int) -> Epochs:
        """Returns the batches of several epochs, each in another order with other augmentations.

        The batches are the same as with ``.batch(B).repeat(n)``, grouped by epoch::

            with ds.epochs(30) as epochs:
                for batches in epochs:  # batches.epoch is the number of the epoch
                    for batch in batches:
                        ...

        Args:
            n: Number of epochs. ``iter(ds)`` goes over one epoch.

        Raises:
            ShardingError: `n` is not a positive integer, or the pipeline is a stream or feeds: the
                end of an epoch is unknown before it is reached.
        """
        require_int("n", n, 1)
        host = self.host.repeated(n)
        warn_of_reshuffled_slice(self.parents[0], num_epochs=n)
        return Epochs(host, num_epochs=n, **self._iterator_options(host))

    def host_rows(self) -> ShardedDataset:
        """Returns a dataset whose iterators hand out this host's rows as NumPy arrays.

        It is for a trainer that puts the rows on the devices itself, as Keras does. Everything else
        stays the same: padding and mask, states, retries, and the comparison of hosts.

        Returns:
            A dataset of trees of arrays ``[host_batch_size, ...]``, with the dtypes of the records.
            They have the rows of this host's devices, in ascending order. Each row is whole, even
            if a spec splits it across hosts: then `jax.make_array_from_process_local_data` needs
            its argument `global_shape`. Do not write to the arrays: the source may share their
            memory.

        Example:
            >>> import grain_shard, jax
            >>> mesh = jax.make_mesh((8,), ("data",))
            >>> ds = grain.MapDataset.range(5).map(lambda i: {"x": i}).batch(5).shard_to(mesh)
            >>> next(iter(ds.host_rows()))["x"]
            array([0, 1, 2, 3, 4, 0, 0, 0])
        """
        return ShardedDataset(
            self.parents[0], self.host, self.settings, self._records_per_batch, to_devices=False
        )

    def _iterator_options(self, host: HostBatches) -> dict[str, Any]:
        return {
            "put_batch": self._assembler(),
            "device_buffer_size": self.settings.device_buffer_size,
            "group_settings": self._group_settings(host),
            "dataset": self,
        }

    def abstract_batch(self) -> Batch:
        """Returns the shapes, dtypes and shardings of a global batch, without placing a batch.

        A training step can be compiled ahead of time with the result:
        ``jax.jit(step).lower(state, ds.abstract_batch())``. The calling thread reads this host's
        rows of the first batch. No other host is asked. With a `BatchSchedule` the result describes
        a batch of the first size.

        Returns:
            The tree of a batch with `jax.ShapeDtypeStruct`s as leaves. A leaf of strings stays as
            it is, with only this host's rows. For `host_rows` the tree describes a host batch, and
            has no shardings.

        Raises:
            ShardingError: The batch does not fit its shardings, or the stream has no batch.
        """
        return self._assembler().abstract(self.host.first(), self.shardings)

    def __repr__(self) -> str:
        batches = self.num_batches()
        count = "" if batches is None else f", {batches} {'batch' if batches == 1 else 'batches'}"
        size = self.host.compared.get("global_batch_size")
        rows = f", {size} rows a batch" if isinstance(size, int) else ""
        specs = ", ".join(dict.fromkeys(describe_spec(s.spec) for s in self.shardings.named()))
        mesh = describe_mesh(self.shardings.mesh_axes)
        where = "" if self.to_devices else ", on the host"
        return f"<ShardedDataset of {self.host.kind}{count}{rows}, {specs}, mesh ({mesh}){where}>"

    def batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: batches on the devices cannot be batched again."""
        self._refuse_regrouping(".batch", "call .batch(global_batch_size), once,")

    def filter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: hosts could not agree on the batches that a filter drops."""
        self._refuse_regrouping(".filter", "filter the records in grain_shard.feeds")

    def seed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: no transformation before ``.shard_to`` would see the seed."""
        self._refuse_regrouping(".seed", "call .seed(s).shuffle()")

    def shuffle(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: records are shuffled before they are batched."""
        self._refuse_regrouping(".shuffle", "call .seed(s).shuffle()")

    def repeat(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: `epochs` repeats the batches of random access."""
        self._refuse_regrouping(".repeat", "loop over ds.epochs(n), or call .repeat(n)")

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises a `ShardingError`: an iterator's ``seek`` goes to a batch of random access."""
        self._refuse_regrouping("[...]", "call seek(step) of an iterator, or slice the dataset")

    def mp_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: Grain's worker processes must not hold batches on devices."""
        self._refuse_workers()

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Raises a `ShardingError`: Grain slices a dataset only for its worker processes.

        Worker processes must not hold batches on devices.
        """
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
            f"{method} cannot follow .shard_to, which ends the pipeline of all hosts.",
            mesh_axes=self.shardings.mesh_axes,
            remedy=f"{instead} before .shard_to.",
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
            to_devices=self.to_devices,
        )

    def _group_settings(self, host: HostBatches) -> GroupSettings | None:
        if self.layout.num_hosts == 1:
            return None
        settings = self.settings
        # Hosts compare these fields before the first batch is handed out. The iterator adds the
        # fields that need a batch: its leaves, and a digest of the rows that this host read.
        fields = {
            **host.compared,
            "rows": host.rows,
            **host.padding.described(),
            **self.shardings.describe(),
        }
        return GroupSettings(
            kind=host.kind,
            hosts=list(settings.shardings.layouts()),
            series=self._series,
            timeout_s=settings.timeout_s,
            fields=fields,
            shards=self.layout.shards,
        )


def sharded(ds: Any) -> ShardedDataset | None:
    """Returns a dataset, or the dataset of an iterator, if `shard_to` made it; None otherwise.

    Args:
        ds: A dataset, an iterator, or any other object.
    """
    ds = ds.dataset if isinstance(ds, ShardedIterator) else ds
    return ds if isinstance(ds, ShardedDataset) else None
