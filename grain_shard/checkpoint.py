"""Checkpoints with Orbax: save the state of an iterator on N hosts, restore it on M hosts.

A random-access pipeline has one state, the same on every host. The first host writes it, and all
hosts read it. A stream has one state and one file per host. It must be restored on the same number
of hosts. Feeds have one state per feed, which one of the hosts that run the feed writes. Any number
of hosts can restore feeds. Each host reads the files with the feeds that it runs.

Orbax's v1 API uses the iterators directly, by their methods ``save`` and ``load``. These methods
write and read the same files.

Example:
    >>> import tempfile
    >>> import grain, jax
    >>> ds = grain.MapDataset.range(24).map(lambda i: {"x": i}).batch(8)
    >>> all_devices = jax.make_mesh((8,), ("data",))
    >>> half_of_them = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
    ...     with iter(ds.shard_to(all_devices)) as batches:
    ...         _ = next(batches)
    ...         items = ocp.args.Composite(
    ...             model=ocp.args.StandardSave({"w": 1.0}), data=CheckpointSave(batches)
    ...         )
    ...         _ = manager.save(1, args=items)
    ...     with iter(ds.shard_to(half_of_them)) as batches:
    ...         _ = manager.restore(1, args=ocp.args.Composite(data=CheckpointRestore(batches)))
    ...         print(next(batches)["x"])
    [ 8  9 10 11 12 13 14 15]
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import CoroutineType
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future

from grain_shard.errors import ShardingError
from grain_shard.iteration.iterator import ShardedIterator, state_writer


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler for the state of an iterator that `shard_to` made."""

    def save(self, directory: Any, args: CheckpointSave) -> None:
        """Writes the iterator's state after the last batch that was handed out."""
        args.iterator.write_state(directory)

    def async_save(
        self, directory: Any, args: CheckpointSave
    ) -> CoroutineType[Any, Any, list[future.Future] | None]:
        """Takes the same state now, and writes it in the background.

        In this call, `state_writer` compares the hosts. Orbax has just waited for all of them, and
        has not saved any item of the checkpoint yet. If one of Orbax's own threads compared them,
        an error would also appear in the log.
        """
        write = state_writer(args.iterator)

        async def begin() -> list[future.Future] | None:
            written = asyncio.to_thread(write, directory)
            return [future.CommitFutureAwaitingContractedSignals(written)]

        return begin()

    def restore(self, directory: Any, args: CheckpointRestore) -> ShardedIterator:
        """Sets the iterator to the saved state, and returns the iterator.

        Raises:
            StateError: The state was saved by another pipeline, or by a stream on another number
                of hosts; or its files are missing or damaged.
        """
        args.iterator.read_state(directory)
        return args.iterator


@dataclass
class _OfIterator(ocp.args.CheckpointArgs):
    iterator: ShardedIterator

    def __post_init__(self):
        if not isinstance(self.iterator, ShardedIterator):
            raise ShardingError(
                f"{type(self).__name__} got an object of type {type(self.iterator).__name__},"
                " not an iterator of a dataset that ends with .shard_to(mesh).",
                remedy="call batches = iter(ds), or epochs = ds.epochs(n), once before the loop,"
                f" and pass that object to {type(self).__name__}.",
            )


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclass
class CheckpointSave(_OfIterator):
    """An argument for Orbax's ``save``: saves the state of an iterator.

    Attributes:
        iterator: An iterator over a dataset that `shard_to` made, or over its epochs.
    """


@ocp.args.register_with_handler(CheckpointHandler, for_restore=True)
@dataclass
class CheckpointRestore(_OfIterator):
    """An argument for Orbax's ``restore``: restores the state of an iterator.

    Attributes:
        iterator: An iterator over the same pipeline, or over its epochs. It may be new or in use.
            With random access, the number of hosts and the mesh may differ from the saved ones. The
            batch size may differ, too, if the state counts records. With feeds, the number of hosts
            may differ. A stream can be restored only on the same number of hosts.
    """


class CheckpointItem:
    """A mixin that lets Kauldron save and restore an iterator of `shard_to` in its checkpoints.

    With random access or feeds, a checkpoint can be restored on another number of hosts. The class
    that uses the mixin must keep the iterator as its attribute `iter`. Kauldron's iterators do::

        from kauldron.data.iterators import PyGrainIterator

        class ShardedIterator(CheckpointItem, PyGrainIterator): ...

    Attributes:
        iter: An iterator over a dataset that `shard_to` made.
    """

    iter: ShardedIterator

    def __kd_ocp_handlers__(self) -> CheckpointHandler:
        return CheckpointHandler()

    def __kd_ocp_save_args__(self) -> CheckpointSave:
        return CheckpointSave(self.iter)

    def __kd_ocp_restore_args__(self) -> CheckpointRestore:
        return CheckpointRestore(self.iter)

    def __kd_ocp_restore_post__(self, value: ShardedIterator) -> Any:
        return self  # the handler has restored `self.iter` in place
