"""Other ways to bring the same records to the devices, with the settings of their documents.

Each takes ArrayRecord files and yields batches whose leaves are sharded over all devices. They are
generators, so that closing them closes what they stand on.
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
    """All devices along one axis, "data"."""
    return jax.make_mesh((jax.device_count(),), ("data",))


def data_sharding() -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(data_mesh(), P("data"))


def record_batches(paths: Sequence[str], decode: Decode, size: int) -> grain.MapDataset:
    """The top of the pipeline as Grain's guide writes it."""
    return (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .seed(SEED)
        .shuffle()
        .map(decode)
        .batch(size, drop_remainder=True)
    )


def device_put(ds: grain.IterDataset) -> Iterator[Any]:
    """Option C of Grain's guide "Plugging Grain into JAX training", over several devices."""
    ds = grain.experimental.device_put(
        ds=ds, device=data_sharding(), cpu_buffer_size=4, device_buffer_size=2
    )
    with closing(iter(ds)) as batches:
        yield from batches


def guide(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Grain's guide as written: the default read options are 16 threads and 500 batches."""
    return device_put(record_batches(paths, decode, size).to_iter_dataset())


def tuned(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """Grain's guide with the read options that were best on this kind of machine."""
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return device_put(record_batches(paths, decode, size).to_iter_dataset(options))


def by_hand(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """What one would write for just this: no state, no tail, no hosts, no errors."""
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
    """Grain's pipeline, placed by ``flax.jax_utils.prefetch_to_device(batches, 2)``.

    It wants the rows of each device apart: [devices, rows of a device, ...].
    """
    from flax import jax_utils

    devices = jax.device_count()

    def by_device(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {k: v.reshape(devices, size // devices, *v.shape[1:]) for k, v in batch.items()}

    ds = record_batches(paths, decode, size).to_iter_dataset().map(by_device)
    with closing(iter(ds)) as batches:
        yield from jax_utils.prefetch_to_device(batches, 2)


def datarax(paths: Sequence[str], decode: Decode, size: int) -> Iterator[Any]:
    """datarax's source of ArrayRecords, shuffled, and its ``prefetch_to_device`` (0.1.17)."""
    from datarax import prefetch_to_device
    from datarax.sources.array_record_source import (
        ArrayRecordSourceConfig,
        ArrayRecordSourceModule,
    )

    config = ArrayRecordSourceConfig(seed=SEED, num_epochs=1, shuffle_files=True)
    with closing(ArrayRecordSourceModule(config, list(paths), decode=decode)) as source:
        batches = iter(lambda: source.get_batch(size), {})  # an empty one ends the epoch
        with closing(prefetch_to_device(batches, size=2, device=data_sharding())) as placed:
            yield from placed
