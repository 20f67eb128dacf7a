"""Functions that place arrays on devices; the public names are in `grain_shard.placement`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from grain_shard.errors import ShardingError, require_int
from grain_shard.hosts.compare import GLOBAL, LOCAL
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.settings import Settings
from grain_shard.reading.from_iterable import from_iterable, said_rows
from grain_shard.sharding.put import put_tree, require_local
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.streams.host_streams import HostStreams
from grain_shard.streams.streams import OneStream
from grain_shard.streams.whole_rows import WholeRows
from grain_shard.training import hardware
from grain_shard.trees import Batch

# Grain does not read ahead: the background threads of this package do.
_IN_TURN = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def place_on_device(data: Any, device: Any = None) -> Any:
    """Places all leaves of a tree on one device of this process.

    Args:
        data: A tree of arrays and scalars.
        device: The device; None for the first device of this process.

    Returns:
        The same tree with `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

    Raises:
        ShardingError: The device belongs to another process, a leaf is a `jax.Array` over several
            processes, or a leaf has a dtype or integers that no device can hold.

    Example:
        >>> x = place_on_device({"x": np.zeros(3)}, jax.local_devices()[1])["x"]
        >>> x.devices() == {jax.local_devices()[1]}
        True
    """
    return put_tree(data, ShardingTree.of(jax.local_devices()[0] if device is None else device))


def distribute_batch(data: Any, sharding: Any) -> Any:
    """Places each leaf of a global batch by its sharding, as a global array of the leaf's shape.

    Args:
        data: The whole global batch, a tree of arrays and scalars. On several processes, each
            process must pass the same batch.
        sharding: A sharding for all leaves, or a tree prefix of shardings. A sharding for several
            leaves is cut to the rank of each: under ``P("data", "seq")`` a leaf of rank 1 is
            sharded by its rows, and a scalar is replicated.

    Returns:
        The same tree with `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

    Raises:
        ShardingError: The size of a mesh axis does not divide the dim that it shards. Or a leaf has
            no sharding. Or a leaf has a dtype or integers that no device can hold. Or this
            process has no device in a sharding.

    Example:
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
        >>> batch = distribute_batch({"x": np.zeros((16, 3)), "step": 0}, rows)
        >>> batch["x"].addressable_shards[0].data.shape, batch["step"].is_fully_replicated
        ((2, 3), True)
    """
    return put_tree(data, ShardingTree.of(sharding))


def prefetch_to_device(
    data_iterator: Iterable[Batch],
    size: int = 2,
    device: Any = None,
    cpu_buffer_size: int | None = None,
) -> ShardedIterator:
    """Returns an iterator over batches that background threads place ahead of time.

    The threads start with the first ``next``. They end with the loop, also after a ``break``, or
    with the block if the iterator is used as a context manager. If the source raises an error, the
    loop first gets all batches from before the error.

    The iterator's ``get_state()`` returns the state after the last batch that the loop got, and
    ``set_state()`` restores it. Both need a source with a state: a Grain dataset, a
    `grain.DataLoader`, or an iterator with these two methods. With any other source both raise a
    `StateError`.

    Args:
        data_iterator: Any iterable of batches, read by one thread. The iterable may reuse its
            buffers, because numpy arrays are copied. A generator is closed at the end. An iterator
            with a state is not closed, because its owner may go on with it. Elements that a filter
            of a `grain.MapDataset` dropped are skipped. If the devices belong to several processes,
            the iterable must be a `from_iterable` with ``rows="global"``: every process must yield
            the same whole batches.
        size: The maximum number of batches on the devices or on their way there.
        device: A device, a `Sharding`, or a tree prefix of shardings, as for `distribute_batch`;
            None for the first device of this process.
        cpu_buffer_size: The maximum number of batches on the host, ready or being made; None for
            ``2 * size``.

    Returns:
        The iterator. Batches may differ in shape and structure.

    Raises:
        ShardingError: A buffer size is not a positive integer; a sharding has no device of this
            process; or the devices belong to several processes and the source is not declared as
            ``rows="global"``. From ``next``: a batch does not fit its shardings.

    Example:
        >>> with prefetch_to_device({"x": np.full(2, i)} for i in range(2)) as batches:
        ...     for batch in batches:
        ...         print(batch["x"])
        [0 0]
        [1 1]
    """
    cpu_buffer_size = 2 * size if cpu_buffer_size is None else cpu_buffer_size
    require_int("size", size, 1)
    require_int("cpu_buffer_size", cpu_buffer_size, 1)
    target = ShardingTree.of(jax.local_devices()[0] if device is None else device)
    require_local(target)
    source: Any = data_iterator
    if not all(sharding.is_fully_addressable for sharding in target.shardings()):
        _require_global(source, target)
    if isinstance(source, grain.MapDataset):
        source = source.to_iter_dataset(_IN_TURN)
    elif not isinstance(source, grain.IterDataset):
        source = from_iterable(source, rows=GLOBAL)
    rows = WholeRows(streams=OneStream(source)).with_own_arrays()  # the source may reuse its own
    return ShardedIterator(
        HostStreams(rows, Settings(target, cpu_buffer_size=cpu_buffer_size)),
        _PutWholeBatch(target),
        device_buffer_size=size,
        group_settings=None,  # this process exchanges no messages with others
    )


def _require_global(source: Any, target: ShardingTree) -> None:
    """Checks that the user has declared that a source yields the same batches on every host.

    Raises:
        ShardingError: The source is not a `from_iterable` with ``rows="global"``.
    """
    is_dataset = isinstance(source, grain.MapDataset | grain.IterDataset)
    rows = said_rows(source) if is_dataset else None
    problem = "may yield different batches on each host."  # if the user has declared nothing
    if rows == LOCAL:
        problem = 'yields only a part of each batch, as rows="local" says.'
    if rows != GLOBAL:
        raise ShardingError(
            f"the devices belong to several hosts, but this {type(source).__name__} {problem}",
            mesh_axes=target.mesh_axes,
            remedy="if all hosts yield the same batches, pass grain_shard.from_iterable(source,"
            ' rows="global"). If each host yields its own rows, end the dataset with'
            " .shard_to(sharding) instead. To make a dataset of such an iterable, call"
            ' grain_shard.from_iterable(source, rows="local").',
        )


class _PutWholeBatch:
    """Puts whole global batches of any shape on the devices.

    `ShardedIterator` calls it in place of an `Assembler`, which takes the rows of one host, and
    only one shape.
    """

    def __init__(self, target: ShardingTree):
        self._target, self.mesh_axes, self.digest = target, target.mesh_axes, ""

    def __call__(self, batch: Batch) -> Batch:
        return put_tree(batch, self._target, in_background=True)

    def describe(self) -> dict[str, str]:
        return {}  # each batch may have another shape


class DevicePlacement:
    """The functions of this module with a default device, and a description of the devices.

    Data goes to the default device if no other device is given. Batch sizes are recommended for the
    chip of the default device.

    Example:
        >>> placement = DevicePlacement()
        >>> placed = placement.place_on_device({"x": np.zeros((4, 3)), "step": 0})
        >>> placed["x"].devices() == {placement.default_device}
        True

    Args:
        default_device: The device of this process that data goes to if no other is given. None
            takes the first device of this process, when it is first needed.

    Raises:
        ShardingError: The device belongs to another process.
    """

    def __init__(self, default_device: Any = None):
        if default_device is not None:
            require_local(ShardingTree.of(default_device))
        self._default_device = default_device

    def __repr__(self) -> str:
        return f"DevicePlacement(default_device={self._default_device})"

    @property
    def default_device(self) -> Any:
        """The device of this process that data goes to if no other device is given."""
        if self._default_device is None:
            self._default_device = jax.local_devices()[0]
        return self._default_device

    @property
    def hardware_type(self) -> hardware.HardwareType:
        """The kind of chip of the default device."""
        return hardware.detect_hardware(self.default_device)

    @property
    def num_devices(self) -> int:
        """The number of devices of all processes together."""
        return jax.device_count()

    def place_on_device(self, data: Any, device: Any = None) -> Any:
        """Calls `grain_shard.placement.place_on_device`; None takes the default device."""
        return place_on_device(data, self.default_device if device is None else device)

    distribute_batch = staticmethod(distribute_batch)

    def prefetch_to_device(
        self,
        data_iterator: Iterable[Batch],
        device: Any = None,
        buffer_size: int = 2,
        cpu_buffer_size: int | None = None,
    ) -> ShardedIterator:
        """Calls `grain_shard.placement.prefetch_to_device`, with `buffer_size` as its `size`.

        If `device` is None, the batches go to the default device.
        """
        require_int("buffer_size", buffer_size, 1)
        target = self.default_device if device is None else device
        return prefetch_to_device(data_iterator, buffer_size, target, cpu_buffer_size)

    def replicate_across_devices(self, data: Any, devices: Sequence[Any] | None = None) -> Any:
        """Replicates every leaf over the devices, as one global array that each device holds whole.

        Args:
            data: A tree of arrays, such as parameters with their optimizer state.
            devices: Devices in the order of the batch's mesh, such as ``list(mesh.devices.flat)``,
                because JAX computes with two arrays only if their devices have the same order. None
                takes the mesh of `jax.set_mesh`, else all devices of all processes in the order of
                `jax.make_mesh`. If the batch is on a mesh of Explicit axes, set that mesh, or call
                ``distribute_batch(data, NamedSharding(mesh, PartitionSpec()))`` instead.

        Returns:
            The same tree with `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

        Raises:
            ShardingError: None of the devices belongs to this process, or a leaf has a dtype or
                integers that no device can hold.
        """
        mesh = jax.sharding.get_mesh()
        if devices is not None:
            mesh = Mesh(np.array(devices), ("data",))
        elif mesh.empty:
            mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
        return put_tree(data, ShardingTree.of(mesh, PartitionSpec()))

    def shard_batch_dim(
        self, data: Any, mesh: Mesh, batch_axis: int = 0, mesh_axis: str = "data"
    ) -> Any:
        """Places every leaf of a tree, with the dim of its rows sharded over a mesh axis.

        Args:
            data: A tree of arrays and scalars. A leaf without this dim is replicated.
            mesh: The mesh.
            batch_axis: Index of the dim that holds the rows.
            mesh_axis: Name of the mesh axis.

        Returns:
            The same tree with `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

        Raises:
            ShardingError: The mesh has no such axis, the axis does not divide the rows, or no leaf
                has the dim.
        """
        require_int("batch_axis", batch_axis, 0)
        spec = PartitionSpec(*[None] * batch_axis, mesh_axis)
        return put_tree(data, ShardingTree.of(mesh, spec))

    def get_batch_size_recommendation(
        self, hardware_type: hardware.HardwareType | None = None
    ) -> hardware.BatchSizeRecommendation:
        """Returns the recommended batch sizes of a chip; None takes the default device's chip."""
        return hardware.get_batch_size_recommendation(hardware_type or self.hardware_type)

    def validate_batch_size(
        self, batch_size: int, warn_suboptimal: bool = True
    ) -> tuple[bool, str]:
        """Compares the batch size of one chip with the sizes recommended for the default device.

        Returns a pair (valid, message), see `grain_shard.training.hardware.validate_batch_size`.
        """
        return hardware.validate_batch_size(batch_size, self.hardware_type, warn_suboptimal)

    def get_device_info(self) -> dict[str, Any]:
        """Describes the devices, as plain JSON.

        Returns:
            A dict. For the devices of all processes it has ``num_devices``, ``platforms``,
            ``device_kinds`` and ``devices`` (a dict with ``id``, ``platform`` and ``device_kind``
            for each). For this process it has ``hardware_type`` (of the default device),
            ``process_index``, ``process_count``, ``local_devices`` (ids) and ``memory``: by id, a
            dict with ``bytes_in_use`` and ``bytes_limit``, or None if the backend gives no figures.
        """
        devices, local_devices = jax.devices(), jax.local_devices()
        return {
            "num_devices": len(devices),
            "hardware_type": self.hardware_type.value,
            "platforms": sorted({device.platform for device in devices}),
            "device_kinds": sorted({device.device_kind for device in devices}),
            "devices": [
                {"id": d.id, "platform": d.platform, "device_kind": d.device_kind} for d in devices
            ],
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
            "local_devices": [device.id for device in local_devices],
            "memory": {device.id: _memory(device) for device in local_devices},
        }


def _memory(device: Any) -> dict[str, int | None] | None:
    stats = device.memory_stats()
    return stats and {name: stats.get(name) for name in ("bytes_in_use", "bytes_limit")}
