"""Counts reads and compilations of the demo, and prints if the library's promises were kept."""

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
    """A source that notes the indices of the records that this host reads, in any thread.

    Attributes:
        read: The indices. Several threads extend this list without a lock, which is safe.
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
    """Starts to count XLA's compilations, and returns the counter.

    The counter is updated while the program runs. Its keys are names like ``jit(train_step)``.
    """
    counts: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **fields: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[str(fields["fun_name"])] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def digests(ds: Iterable[Batch]) -> list[str]:
    """Returns a digest of each batch, made from the shards on this host's devices."""

    def digest(batch: Batch) -> str:
        shards = [shard for leaf in jax.tree.leaves(batch) for shard in leaf.addressable_shards]
        return hashlib.sha256(b"".join(np.asarray(s.data).tobytes() for s in shards)).hexdigest()

    return [digest(batch) for batch in ds]


def check(kept: bool, promise: str) -> bool:
    """Prints if a promise was kept, and returns `kept`.

    A kept promise is printed on the first host only, and a broken one on each host that calls this.
    """
    say(f"  ok: {promise}" if kept else f"  FAILED: {promise}", on_each_host=not kept)
    return kept


def say(text: str, on_each_host: bool = False) -> None:
    """Prints a text in lines that fit the terminal, on the first host or on each host."""
    if on_each_host or jax.process_index() == 0:
        print(broken(text, screen_width()), flush=True)
