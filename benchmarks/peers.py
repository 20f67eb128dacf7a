"""Other loaders of the same records, with the settings that their documentation gives.

Each function takes ArrayRecord files and yields batches whose leaves are sharded over all devices.
The functions are generators: to close one ends its threads and files.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Decode = Callable[[bytes], dict[str, np.ndarray]]
SEED = 42


def data_mesh() -> Mesh:
    """Returns a mesh of all devices along one axis, "data"."""
    return jax.make_mesh((jax.device_count(),), ("data",))


def data_sharding() -> NamedSharding:
    """Returns the sharding of rows over all devices."""
    return NamedSharding(data_mesh(), P("data"))


def record_batches(paths: Sequence[str], decode: Decode, size: int) -> grain.MapDataset:
    """Returns the pipeline of Grain's guide down to ``.batch``: shuffled, decoded full batches."""
    return (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .seed(SEED)
        .shuffle()
        .map(decode)
        .batch(size, drop_remainder=True)
    )


def device_put(ds: grain.IterDataset) -> Iterator[Any]:
    """Yields the batches of a dataset, sharded over all devices.

    This is option C of Grain's guide "Plugging Grain into JAX training".
    """
    ds = grain.experimental.device_put(
        ds=ds, device=data_sharding(), cpu_buffer_size=4, device_buffer_size=2
    )
    with closing(iter(ds)) as batches:
        yield from batches


def guide(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Yields the batches of Grain's guide with its default ReadOptions: 16 threads, 500 batches."""
    return device_put(record_batches(paths, decode, size).to_iter_dataset())


def tuned(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Yields the batches of Grain's guide with the ReadOptions that were fastest on two cores."""
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return device_put(record_batches(paths, decode, size).to_iter_dataset(options))


def by_hand(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Yields batches by a loop written for this case only.

    It has no state to save, drops the last short batch, handles no errors, and runs on one host.
    """
    source: Any = grain.sources.ArrayRecordDataSource(paths)
    order = np.random.default_rng(SEED).permutation(len(source))
    batches, sharding = len(source) // size, data_sharding()

    def load(k: int) -> Any:
        records = source.__getitems__(order[k * size : (k + 1) * size].tolist())
        images = np.stack([decode(record)["image"] for record in records])
        return jax.device_put({"image": images}, sharding)

    with ThreadPoolExecutor(2) as threads:
        ahead = collections.deque(threads.submit(load, k) for k in range(min(4, batches)))
        for k in range(4, batches + 4):
            if not ahead:
                return
            batch = ahead.popleft().result()
            if k < batches:
                ahead.append(threads.submit(load, k))
            yield batch


def flax_prefetch(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Yields Grain's batches, placed by ``flax.jax_utils.prefetch_to_device(batches, 2)``.

    That function takes leaves of [devices, rows of a device, ...].
    """
    from flax import jax_utils

    devices = jax.device_count()

    def by_device(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {k: v.reshape(devices, size // devices, *v.shape[1:]) for k, v in batch.items()}

    ds = record_batches(paths, decode, size).to_iter_dataset().map(by_device)
    with closing(iter(ds)) as batches:
        yield from jax_utils.prefetch_to_device(batches, 2)


def datarax(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Yields batches of datarax 0.1.17: its ArrayRecord source, and its ``prefetch_to_device``."""
    from datarax import prefetch_to_device
    from datarax.sources.array_record_source import (
        ArrayRecordSourceConfig,
        ArrayRecordSourceModule,
    )

    config = ArrayRecordSourceConfig(seed=SEED, num_epochs=1, shuffle_files=True)
    with closing(ArrayRecordSourceModule(config, list(paths), decode=decode)) as source:
        batches = iter(lambda: source.get_batch(size), {})  # an empty batch ends the epoch
        with closing(prefetch_to_device(batches, size=2, device=data_sharding())) as placed:
            yield from placed
