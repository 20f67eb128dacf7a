"""Counts and prints for the demo, to check the promises of the library."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from grain_shard.trees import Batch


class CountingSource:
    """A source that counts the records that this host reads, in whatever thread."""

    def __init__(self, source: Any):
        self._source, self._lock = source, threading.Lock()
        self.reads: int = 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> bytes:
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> Sequence[bytes]:
        with self._lock:
            self.reads += len(indices)
        return self._source._getitems(indices)


def count_compilations() -> Counter[str]:
    """Counts, from now on, how often XLA compiles each function, e.g. ``jit(train_step)``."""
    counts: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **fields: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[fields["fun_name"]] += 1

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
    if kept:
        say(f"  ok: {promise}")
    else:
        print(f"  FAILED: {promise}", flush=True)
    return kept


def say(text: str) -> None:
    """Prints on the first host."""
    if jax.process_index() == 0:
        print(text, flush=True)
