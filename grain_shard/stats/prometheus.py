"""What Prometheus scrapes of the iterators of this process, through its client's default registry.

A figure is labelled by its dataset: 0 for the first one that was iterated over, 1 for the next, and
so on. All iterators over a dataset count for it, those that have ended, too, so that its sums never
shrink. A dataset that is gone leaves its number to the next new one, so that there are no more
numbers than datasets at a time. Nothing here refers to an iterator or a dataset.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from grain_shard.hosts.slowest import SlowestHost, SlowestOf
from grain_shard.spans import AGREE, MAP, STAGES
from grain_shard.stats.counts import Counts
from grain_shard.stats.meter import Meter

_DATASET, _STAGE = "dataset", "stage"
# Name, unit and meaning of what is counted. Prometheus adds "_total" to each.
_SUMS: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    ("loop_seconds", "Seconds of the training loop, steps and waiting.", lambda c: c.seconds),
    ("wait_seconds", "Seconds that the training loop waited for batches.", lambda c: c.wait_s),
    ("batches", "Batches that were handed out.", lambda c: c.batches),
    ("records", "Records of this host in these batches.", lambda c: c.records),
    ("bytes", "Bytes of this host in these batches.", lambda c: c.num_bytes),
    ("rereads", "Reads that came late and were asked for again.", lambda c: c.reads.rereads),
    ("retries", "Reads that failed and were tried again.", lambda c: c.reads.retries),
    ("bad_records", "Records that were masked.", lambda c: c.reads.bad_records),
)
_STAGES = (*STAGES, MAP, AGREE)


class _Dataset:
    """The sums of all iterators over one dataset, as long as it lives."""

    def __init__(self):
        self.owner: Callable[[], Any] = lambda: None
        self.iterators: dict[Meter, SlowestOf | None] = {}
        self._ended: list[Counts] = []

    def counts(self) -> list[Counts]:
        """Of every iterator; those that have ended are let go."""
        for meter in [meter for meter in self.iterators if meter.has_ended]:
            del self.iterators[meter]
            self._ended.append(meter.total())
        self._ended = [functools.reduce(_plus, self._ended)] if self._ended else []
        return [*self._ended, *(meter.total() for meter in self.iterators)]

    def slowest(self) -> SlowestHost | None:
        """Of the hosts of the latest iterator that knows."""
        found = [one.found for one in self.iterators.values() if one is not None]
        return next((host for host in reversed(found) if host is not None), None)


def _plus(a: Counts, b: Counts) -> Counts:
    """The sums of two iterators, whose threads are told apart no more."""
    stages_s: dict[tuple[int, str], float] = {}
    for (_, stage), seconds in (*a.stages_s.items(), *b.stages_s.items()):
        stages_s[0, stage] = stages_s.get((0, stage), 0.0) + seconds
    return Counts(
        seconds=a.seconds + b.seconds,
        wait_s=a.wait_s + b.wait_s,
        batches=a.batches + b.batches,
        records=a.records + b.records,
        num_bytes=a.num_bytes + b.num_bytes,
        placed=a.placed + b.placed,
        stages_s=stages_s,
        reads=a.reads.after(b.reads),
    )


class Exporter:
    """A collector for a registry of `prometheus_client`."""

    def __init__(self):
        self._lock = threading.Lock()
        self._datasets: list[_Dataset] = []  # the number of each is its place

    def add(self, owner: Any, meter: Meter, slowest: SlowestOf | None) -> None:
        """From now on an iterator is scraped; called again once its hosts have begun anew.

        Args:
            owner: Its dataset, which is not kept alive.
            meter: Counts what the iterator does.
            slowest: Learns which of its hosts is the slowest, if there are several.
        """
        with self._lock:
            of_owner = [one for one in self._datasets if one.owner() is owner]
            free = [one for one in self._datasets if one.owner() is None]
            if not (of_owner or free):
                self._datasets.append(_Dataset())
            dataset = next(iter(of_owner or free), self._datasets[-1])
            dataset.counts()  # lets go of those that have ended, if nobody scrapes
            dataset.owner = weakref.ref(owner)
            dataset.iterators[meter] = slowest

    def describe(self) -> list[Any]:
        """Nothing; the registry would otherwise call `collect` to learn the names."""
        return []

    def collect(self) -> Iterable[Any]:
        """What there is to be scraped."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            datasets = [
                (str(number), dataset.counts(), dataset.slowest())
                for number, dataset in enumerate(self._datasets)
            ]
        for name, meaning, of in _SUMS:
            family = CounterMetricFamily(f"grain_shard_{name}", meaning, labels=[_DATASET])
            for number, counts, _ in datasets:
                family.add_metric([number], sum(map(of, counts)))
            yield family
        stages = CounterMetricFamily(
            "grain_shard_stage_seconds",
            "Seconds of work in each stage, of all its threads together.",
            labels=[_DATASET, _STAGE],
        )
        threads = GaugeMetricFamily(
            "grain_shard_read_threads", "Threads that read side by side.", labels=[_DATASET]
        )
        slowest = GaugeMetricFamily(
            "grain_shard_slowest_host",
            "The host whose loop waits longest for its data.",
            labels=[_DATASET],
        )
        share = GaugeMetricFamily(
            "grain_shard_slowest_host_ratio",
            "By how much more of the time it waits than the others (the median).",
            labels=[_DATASET],
        )
        for number, counts, host in datasets:
            for stage in _STAGES:
                seen = [s for c in counts if (s := c.stage_s(stage)) is not None]
                if seen:
                    stages.add_metric([number, stage], sum(seen))
            side_by_side = [c.reads.threads for c in counts if c.reads.threads is not None]
            if side_by_side:
                threads.add_metric([number], sum(side_by_side))
            if host is not None:
                slowest.add_metric([number], host.host)
                share.add_metric([number], host.share)
        yield from (stages, threads, slowest, share)


def export(owner: Any, meter: Meter, slowest: SlowestOf | None) -> None:
    """Has an iterator scraped, as `Exporter.add`; does nothing without Prometheus' client."""
    if (exporter := _registered()) is not None:
        exporter.add(owner, meter, slowest)


@functools.cache
def _registered() -> Exporter | None:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    exporter = Exporter()
    REGISTRY.register(exporter)
    return exporter
