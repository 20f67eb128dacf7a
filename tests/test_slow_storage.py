"""Batches from storage that makes wait, a server of byte ranges and a FUSE mount, are the same."""

from contextlib import closing

import grain
import numpy as np
import pytest

import grain_shard
from benchmarks.data import RECORD_SHAPE, decode_record, record_files
from benchmarks.measure import Skip
from benchmarks.range_server import RangeSource, serving
from benchmarks.slow_mount import mounted
from tests.conftest import data_mesh, to_numpy

RECORDS, GLOBAL_BATCH_SIZE = 100, 16
LATENCY_MS = 5  # for reads to overlap


def pipeline(source):
    return grain.MapDataset.source(source).seed(3).shuffle().map(decode_record)


def check(slow, fast):
    """Whether all batches of a slow source are those of a fast one, which Grain alone makes."""
    batches = [to_numpy(b) for b in pipeline(slow).batch(GLOBAL_BATCH_SIZE).shard_to(data_mesh(4))]
    expected = list(pipeline(fast).batch(GLOBAL_BATCH_SIZE))
    assert len(batches) == len(expected) == 7
    for batch, wanted in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["image"][batch["valid_mask"]], wanted["image"])


def test_records_by_http_range_requests(tmp_path):
    size = int(np.prod(RECORD_SHAPE))
    content = np.random.default_rng(0).bytes(RECORDS * size)
    (tmp_path / "records").write_bytes(content)
    with (
        serving(tmp_path / "records", LATENCY_MS) as port,
        closing(RangeSource(port, RECORDS, size)) as slow,
    ):
        check(slow, [content[i * size : (i + 1) * size] for i in range(RECORDS)])
        with pytest.raises(OSError, match="bytes 307200 to 310272 gave 206, 0 bytes"):
            slow[RECORDS]


def test_array_records_on_a_slow_mount(tmp_path):
    folder, mount_point = tmp_path / "stored", tmp_path / "mount"
    folder.mkdir()
    paths = record_files(folder, RECORDS, files=20)
    try:
        with mounted(folder, mount_point, LATENCY_MS):
            slow = grain_shard.ArrayRecordSource(str(mount_point / "*.array_record"))
            check(slow, grain.sources.ArrayRecordDataSource(sorted(paths)))
            del slow  # a file that is open keeps the mount
    except Skip as skip:
        pytest.skip(str(skip))
