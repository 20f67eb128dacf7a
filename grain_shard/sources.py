"""`ArrayRecordSource`: Grain's ArrayRecord source, with the batched reads that it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import grain


class ArrayRecordSource(grain.sources.ArrayRecordDataSource):
    """Records of ArrayRecord files by index, read many at a time.

    A batch of rows is then one call into the reader of each file. Grain asks a source for several
    records through ``_getitems`` (its protocol for batched reads); `ArrayRecordDataSource` can do
    as much, but under the name ``__getitems__`` only.

    Example:
        >>> import tempfile
        >>> from array_record.python.array_record_module import ArrayRecordWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = ArrayRecordWriter(f"{folder}/train-00000-of-00001", "group_size:1")
        ...     for record in b"a", b"b", b"c":
        ...         _ = writer.write(record)
        ...     writer.close()
        ...     source = ArrayRecordSource([f"{folder}/train-00000-of-00001"])
        ...     print(list(grain.MapDataset.source(source)))
        [b'a', b'b', b'c']

    Args:
        paths: One path, or several; see `array_record`'s `ArrayRecordDataSource`.
        reader_options: Passed to each reader.

    Raises:
        ValueError: No path is given, or not a path.
    """

    # These two say to type checkers that it is a grain.sources.RandomAccessDataSource.
    def __len__(self) -> int:
        return super().__len__()  # pyright: ignore[reportAttributeAccessIssue]

    def __getitem__(self, index: SupportsIndex) -> bytes:
        return super().__getitem__(index)

    def _getitems(self, indices: Sequence[int]) -> Sequence[bytes]:
        return super().__getitems__(indices)  # pyright: ignore[reportAttributeAccessIssue]
