"""Host memory that a device takes over as it is, so that a batch is copied once less."""

import grain
import jax
import ml_dtypes
import numpy as np
import pytest

from grain_shard import (
    BatchLayout,
    DevicePut,
    PadToDivisible,
    ShardBatch,
    ShardingTree,
    prefetch_to_device,
)
from grain_shard.host_arrays import ALIGNMENT_BYTES, copied, empty
from tests.conftest import Made, data_mesh, eventually


def address(array):
    return array.__array_interface__["data"][0]


ARRAYS = {
    "strided": np.arange(24).reshape(4, 6)[:, ::2],
    "reversed": np.arange(5)[::-1],
    "scalar": np.array(3, np.float32),
    "small": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "large": np.arange(2**14, dtype=np.float64).reshape(2, -1),
    "without rows": np.zeros((0, 3)),
    "structured": np.ones(3, [("a", np.int32), ("b", np.float64)]),
    "bool": np.array([True, False]),
    "text": np.array(["cat", "horse"]),
    "bytes": np.array([b"cat", b"horse"]),
    "objects": np.array(["cat", None, 3], object),
    "big-endian": np.arange(3, dtype=">i4"),
    "read-only": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_a_copy_is_contiguous_shares_nothing_and_could_be_taken_over(array):
    copy = copied(array)
    np.testing.assert_array_equal(copy, array)
    assert type(copy) is np.ndarray
    assert copy.dtype == array.dtype
    assert copy.flags.c_contiguous
    assert copy.flags.writeable
    assert not np.shares_memory(copy, array)
    assert array.dtype.hasobject or address(copy) % ALIGNMENT_BYTES == 0


RECORDS = grain.MapDataset.range(60).map(lambda i: {"x": np.full((4, 8), i, np.float32)})
BATCHES = RECORDS.batch(16)
LAYOUT = BatchLayout(4, (0, 1, 2, 3))
HOST_BATCHES = {
    "rows below .batch": BATCHES.pipe(ShardBatch(LAYOUT)),
    "rows of whole batches": BATCHES.map(dict).pipe(ShardBatch(LAYOUT)),
    "rows of a stream": BATCHES.to_iter_dataset().map(dict).pipe(ShardBatch(LAYOUT)),
    "padded rows": BATCHES.pipe(PadToDivisible(4)).pipe(ShardBatch(LAYOUT)),
}


@pytest.mark.parametrize("host_batches", HOST_BATCHES.values(), ids=HOST_BATCHES)
def test_every_batch_of_a_host_could_be_taken_over(host_batches):
    for batch in host_batches:
        assert address(batch["x"]) % 64 == 0  # as XLA wants it


def test_the_cpu_backend_takes_it_over_instead_of_copying_it():
    batch = BATCHES.pipe(ShardBatch(LAYOUT))[0]["x"]
    sharding = jax.sharding.NamedSharding(data_mesh(4), jax.P("data"))
    placed = jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)
    shards = sorted(placed.addressable_shards, key=lambda shard: shard.index[0].start)
    addresses = [shard.data.unsafe_buffer_pointer() for shard in shards]
    assert addresses == [address(batch[start:]) for start in (0, 4, 8, 12)]


BUFFERS = {
    "x": empty((8, 256), np.dtype(np.float32)),  # which JAX would alias
    "scalar": np.zeros((), np.int32),
    "text": np.zeros(8, "<U4"),
}
MADE = []  # an entry for each time that the buffers were filled


def refill(k):
    for array in BUFFERS.values():
        array[...] = k
    MADE.append(k)
    return BUFFERS


def refilled():
    """A stream of batches in the same buffers, which are filled again for each."""
    return Made(refill, 12)


def put():
    # One thread, which asks for one batch after the other: those that several threads make at the
    # same time cannot be in the same memory.
    return DevicePut(ShardingTree.of(data_mesh(1)), num_threads=1)


REFILLED = {
    "stream": lambda: refilled().shard_to(data_mesh(1)),
    "rows=global": lambda: refilled().shard_to(data_mesh(1), rows="global"),
    "rows=local": lambda: refilled().shard_to(data_mesh(1), rows="local"),
    "DevicePut alone": lambda: refilled().pipe(put()),
    "DevicePut after padding": lambda: refilled().pipe(PadToDivisible(4)).pipe(put()),
    "DevicePut of random access": lambda: grain.MapDataset.range(12).map(refill).pipe(put()),
    "prefetch_to_device, stream": lambda: prefetch_to_device(refilled(), 3),
    "prefetch_to_device, iterator": lambda: prefetch_to_device(iter(refilled()), 3),
}


@pytest.mark.filterwarnings("ignore:.*a number for all 8 rows of the batch")
@pytest.mark.parametrize("build", REFILLED.values(), ids=REFILLED)
def test_a_source_may_fill_its_buffers_again(build):
    MADE.clear()
    with iter(build()) as batches:
        first = next(batches)
        eventually(lambda: len(MADE) > 3)  # while the batches before still wait
        seen = [first, *batches]
    assert [np.unique(batch["x"]).tolist() for batch in seen] == [[k] for k in range(12)]
    for k, batch in enumerate(seen):
        assert int(batch["scalar"]) == k
        assert batch["text"].tolist() == [str(k)] * 8
