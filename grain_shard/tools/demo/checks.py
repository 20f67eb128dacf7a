"""Counts and prints for the demo, to check the promises of the library."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from grain_shard.sources.array_record_source import ArrayRecordSource
from grain_shard.tools.showing.tables import broken, screen_width
from grain_shard.trees import Batch


class CountingSource:
    """A source that notes the records that this host reads, in whatever thread.

    Attributes:
        read: The indices of these records; a list takes more of them without a lock.
    """

    def __init__(self, source: ArrayRecordSource):
        self._source: ArrayRecordSource = source
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> bytes:
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> Sequence[bytes]:
        self.read += indices
        return self._source._getitems(indices)


def count_compilations() -> Counter[str]:
    """Counts, from now on, how often XLA compiles each function, e.g. ``jit(train_step)``."""
    counts: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **fields: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[str(fields["fun_name"])] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def digests(ds: Iterable[Batch]) -> list[str]:
    """Returns a digest for each batch: of the shards on this host's devices."""

    def digest(batch: Batch) -> str:
        shards = [shard for leaf in jax.tree.leaves(batch) for shard in leaf.addressable_shards]
        return hashlib.sha256(b"".join(np.asarray(s.data).tobytes() for s in shards)).hexdigest()

    return [digest(batch) for batch in ds]


def check(kept: bool, promise: str) -> bool:
    """Prints a kept promise on the first host, and a broken one on every host that sees it."""
    say(f"  ok: {promise}" if kept else f"  FAILED: {promise}", on_each_host=not kept)
    return kept


def say(text: str, on_each_host: bool = False) -> None:
    """Prints on the first host, or on each, in lines that fit the terminal."""
    if on_each_host or jax.process_index() == 0:
        print(broken(text, screen_width()), flush=True)
