"""Interrupts a loop at random times (SIGINT, as Ctrl-C sends it), and the same iterator goes on.

    python -m benchmarks.soak.signals                       # 500 signals for each kind of pipeline
    python -m benchmarks.soak.signals --signals 50 feeds    # fewer, for one kind

Each batch must be the one that follows the iterator's state, so that none is lost or doubled. At
the end, no thread of the package may be left. The exit code is 1 if a kind failed.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np

import grain_shard

_NUM_RECORDS, _BATCH = 160, 8


def slowly(i: int) -> dict[str, Any]:
    """Makes a record. Every fifth one takes a while, so that the loop has to wait."""
    if i % 5 == 0:
        time.sleep(0.002)
    return {"id": np.int32(i)}


def _records() -> grain.MapDataset:
    return grain.MapDataset.range(_NUM_RECORDS).seed(1).shuffle().map(slowly)


def _feed(feed: grain.sharding.ShardOptions) -> grain.IterDataset:
    return _records()[feed.shard_index :: feed.shard_count].to_iter_dataset()


KINDS: dict[str, Callable[[Any], grain_shard.ShardedDataset]] = {
    "random access": lambda mesh: _records().batch(_BATCH).shard_to(mesh),
    "stream": lambda mesh: (
        _records().to_iter_dataset().filter(lambda r: True).batch(_BATCH).shard_to(mesh)
    ),
    "feeds": lambda mesh: grain_shard.feeds(_feed, num_feeds=4).batch(_BATCH).shard_to(mesh),
    "workers": lambda mesh: _records().batch(_BATCH).shard_to(mesh, num_workers=1),
}


class Interrupts:
    """Sends SIGINT to this process at random times, one after the other.

    Args:
        rng: Draws the pauses.
        most_s: The longest pause before a signal.

    Attributes:
        asked: Set while the loop may be interrupted. A signal clears it.
        sent: Number of signals.
    """

    def __init__(self, rng: random.Random, most_s: float):
        self.asked, self.sent = threading.Event(), 0
        self._rng, self._most_s, self._ends = rng, most_s, False
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.asked.wait() and not self._ends:
            time.sleep(self._rng.uniform(0, self._most_s))
            if self.asked.is_set():
                self.asked.clear()
                self.sent += 1
                os.kill(os.getpid(), signal.SIGINT)

    def end(self) -> None:
        self._ends = True
        self.asked.set()
        self._thread.join()


def interrupted(ds: grain_shard.ShardedDataset, signals: int, interrupts: Interrupts) -> str:
    """Loops over the batches until so many signals have come.

    Returns:
        The places where the signals came, by the innermost function of the package.

    Raises:
        AssertionError: A batch was lost or doubled, or a thread is left.
    """
    with iter(ds) as batches:
        states = [batches.get_state()]
        expected = []
        for batch in batches:
            expected.append(_ids(batch))
            states.append(batches.get_state())
    places: collections.Counter[str] = collections.Counter()
    others, iterator = _threads(), iter(ds)
    while places.total() < signals:
        step = states.index(iterator.get_state())
        try:
            interrupts.asked.set()
            while True:
                if step == len(expected):
                    assert next(iterator, None) is None, "a batch after the end"
                    iterator.reset()
                    step = 0
                ids = _ids(next(iterator))
                assert ids == expected[step], f"batch {step}: {ids}, not {expected[step]}"
                step += 1
        except KeyboardInterrupt as error:
            places[_place(error)] += 1
    # A signal in `reset` leaves the iterator at the end or at the beginning; any other one leaves
    # it before or after the batch that `next` was to return. The loop above compares the next batch
    # with the state, so here the rest of the batches is left to compare.
    step = states.index(iterator.get_state())
    assert [_ids(batch) for batch in iterator] == expected[step:], "the rest differs"
    iterator.close()
    until = time.monotonic() + 60
    while (left := _threads() - others) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, f"threads are left: {left}"
    return ", ".join(f"{count} in {place}" for place, count in places.most_common(8))


def _ids(batch: Any) -> list[int]:
    return np.asarray(batch["id"])[np.asarray(batch["valid_mask"])].tolist()


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("grain-shard")}


def _place(error: BaseException) -> str:
    place, traceback = "the loop", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "grain_shard" in code.co_filename and "benchmarks" not in code.co_filename:
            place = code.co_qualname
        traceback = traceback.tb_next
    return place


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.soak.signals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all kinds")
    parser.add_argument("--signals", type=int, default=500, help="for each kind (default: 500)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 2)
    # Worker processes are forks of one that has imported Grain: an interrupt ends them, too.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["grain", "jax", "grain_shard"])
    multiprocessing.get_context = {"spawn": forks}.__getitem__  # pyright: ignore
    mesh, failed = jax.make_mesh((2,), ("data",)), False
    for kind in args.kinds or KINDS:
        rng = random.Random(f"{args.seed} {kind}")
        interrupts = Interrupts(rng, most_s=0.5 if kind == "workers" else 0.02)
        began = time.monotonic()
        try:
            places = interrupted(KINDS[kind](mesh), args.signals, interrupts)
            print(f"{kind}: {interrupts.sent} signals, 0 lost, 0 doubled, 0 threads left", end="")
            print(f", {time.monotonic() - began:.0f} s (--seed {args.seed}): {places}", flush=True)
        except AssertionError as error:
            failed = True
            print(f"{kind}: FAILED after {interrupts.sent} signals (--seed {args.seed}): {error}")
        finally:
            interrupts.end()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
