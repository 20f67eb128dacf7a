"""`OpenedFile`: tells the file that this process has opened from another one of the same path."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from grain_shard.errors import ShardingError


@dataclass(frozen=True)
class OpenedFile:
    """A file that is open in the main process, with facts that tell it from any other file.

    Attributes:
        path: Absolute path.
        size: Bytes.
        modified_ns: Time of the last change, in nanoseconds.
        machine: The machine's name. On another machine, inode and time of a copy differ.
        leaf: The path of its array in a tree, for messages; None for a file of records.
        inode: Number of the file on its disk; None for a file of records, because a mounted bucket
            may number a file anew.
    """

    path: str
    size: int
    modified_ns: int
    machine: str
    leaf: str | None
    inode: int | None

    @classmethod
    def of(cls, path: str, facts: os.stat_result, leaf: str | None = None) -> OpenedFile:
        inode = None if leaf is None else facts.st_ino
        return cls(path, facts.st_size, facts.st_mtime_ns, platform.node(), leaf, inode)

    def check(self) -> None:
        """Checks that the path still leads to this file.

        Raises:
            ShardingError: The file is gone, or another file has its path.
        """
        try:
            now = OpenedFile.of(self.path, os.stat(self.path), self.leaf)
        except OSError as error:
            raise self._refusal(str(error)) from error
        self.check_same(now)

    def check_same(self, now: OpenedFile) -> None:
        """Checks that the file at the path now is this file.

        Raises:
            ShardingError: It is another file.
        """
        names = ["size", "inode", "modified_ns"] if now.machine == self.machine else ["size"]
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in names]
        if changed := [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]:
            raise self._refusal(", ".join(changed))

    def _refusal(self, why: str) -> ShardingError:
        return ShardingError(
            f"{self.path} is not the file that the main process has opened: {why}. A worker process"
            " or executor would read other records.",
            path=self.leaf,
            remedy="do not change or replace a file that is in use. Open the file anew, make a"
            f" new {'ArrayRecordSource' if self.leaf is None else 'ArraySource'}, and start again.",
        )
