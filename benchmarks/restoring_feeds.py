"""P19: the files that a host reads to restore its feeds, and the time, by the number of hosts.

This process simulates the hosts, one after the other. All hosts save, and 16 of them restore, each
as one of the same number of hosts.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

import grain_shard
from benchmarks import peers
from benchmarks.measure import Goal, Group, Round, Run, alone
from grain_shard.hosts.feed_files import NUM_FEEDS
from grain_shard.hosts.state_files import read_state, write_state
from grain_shard.iteration.settings import Settings
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.state_json import sealed
from grain_shard.streams.host_streams import HostStreams

HOSTS, FEEDS_OF_HOST = (16, 256, 1536), 4
RESTORED = 16  # number of hosts whose restore is measured


def make_feed(feed: grain.sharding.ShardOptions) -> grain.IterDataset:
    numbers = grain.MapDataset.range(10**7)[feed.shard_index :: feed.shard_count]
    return numbers.map(lambda i: {"x": np.int32(i)}).to_iter_dataset()


def host_of(ds: Any, layouts: dict[int, BatchLayout], host: int) -> HostStreams:
    rows = ds.host_rows.of_host(layouts[host])
    settings = Settings(ShardingTree.of(peers.data_mesh()))
    return HostStreams(rows, settings, saved_feeds=rows.to_save(layouts, host))


def state_of(host: HostStreams) -> dict[str, Any]:
    """Returns a state of the host's feeds as it would be in the middle of a run."""
    entry = sealed({"state": {"next_index": 10**6, "buffer": list(range(20))}})
    feeds = {str(feed): entry for feed in host.own_feeds.run}
    return {"kind": host.kind, "step": 10**5, **host.fingerprint, "feeds": feeds}


class CountedReads:
    """Counts the files of a folder that this process opens for reading, in `count`."""

    def __init__(self, folder: Path):
        self._folder, self.count = str(folder), 0
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            is_read = args[2] & os.O_ACCMODE == os.O_RDONLY
            self.count += is_read and os.fspath(args[0]).startswith(self._folder)


def restored(num_hosts: int, folder: Path) -> dict[str, float]:
    """Saves and restores the feeds of simulated hosts, and returns two figures by name.

    The figures are the most files that a host reads, and the median of the milliseconds of a host.
    """
    num_feeds = FEEDS_OF_HOST * num_hosts
    ds = grain_shard.feeds(make_feed, num_feeds=num_feeds).batch(num_feeds)
    layouts = {host: BatchLayout(num_hosts, (host,)) for host in range(num_hosts)}
    for host in layouts:
        feeds = host_of(ds, layouts, host)
        write_state(folder, state_of(feeds), feeds.own_feeds)
    reads, files, times = CountedReads(folder), [], []
    for host in range(0, num_hosts, num_hosts // RESTORED):
        feeds, before, start = host_of(ds, layouts, host), reads.count, time.perf_counter()
        position = feeds.from_state(read_state(folder, feeds.own_feeds))
        times.append((time.perf_counter() - start) * 1e3)
        files.append(reads.count - before)
        assert feeds.to_state(position)[NUM_FEEDS] == num_feeds
    return {f"files: {num_hosts}": max(files), f"ms: {num_hosts}": statistics.median(times)}


def measure(run: Run) -> Iterator[Round]:
    for _ in range(run.rounds(quick=1, full=3)):
        figures: dict[str, float] = {}
        for num_hosts in HOSTS:
            with tempfile.TemporaryDirectory(dir=run.folder) as folder:
                figures |= restored(num_hosts, Path(folder))
        yield figures


GROUPS = [
    Group(
        "restoring_feeds",
        "Restoring feeds on as many hosts as before",
        measure,
        [
            comparison
            for hosts in HOSTS
            for comparison in (
                alone(
                    "P19",
                    f"{hosts:,} hosts: files that a host reads",
                    "files",
                    f"files: {hosts}",
                    Goal("at most", 2),
                ),
                alone(
                    "P19",
                    f"{hosts:,} hosts: a host's state",
                    "ms",
                    f"ms: {hosts}",
                    Goal("at most", 50),
                ),
            )
        ],
    )
]
