"""The figures of `stats()` for Prometheus, by way of a registry of `prometheus_client`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from grain_shard.spans import WAIT
from grain_shard.stats.figures import FIGURES, Stats


class HasStats(Protocol):
    """A `ShardedIterator`, or the epochs of one."""

    def stats(self) -> Stats:
        """Returns the figures so far."""
        ...


def export(batches: HasStats, dataset: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Lets Prometheus scrape an iterator for as long as the iterator lives.

    Each figure is asked for when it is scraped, and is named as in `Stats.as_dict`. The loop's time
    and its waiting are counted as well, so that Prometheus can divide their rates.

    Args:
        batches: The iterator. It is not kept alive.
        dataset: The value of the label ``dataset``. A later iterator of the same name takes the
            place of this one; its sums begin at 0, which Prometheus takes for a restart.
        registry: The registry that is served.

    Example:
        >>> import grain, jax, prometheus_client
        >>> from grain_shard import shard_to
        >>> from grain_shard.tools import prometheus
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(24).map(lambda i: {"x": i}).batch(8).pipe(shard_to, mesh)
        >>> with iter(ds) as batches:
        ...     prometheus.export(batches, "train")
        ...     for batch in batches:
        ...         pass
        ...     labels = {"dataset": "train"}
        ...     prometheus_client.REGISTRY.get_sample_value("grain_shard_batches_total", labels)
        3
    """
    _collector(registry).exported[dataset] = batches


@functools.cache
def _collector(registry: CollectorRegistry) -> _Collector:
    collector = _Collector()
    registry.register(collector)
    return collector


class _Collector:
    """A collector as `prometheus_client` wants it.

    Attributes:
        exported: The iterators, by dataset.
    """

    def __init__(self):
        self.exported: weakref.WeakValueDictionary[str, HasStats] = weakref.WeakValueDictionary()

    def describe(self) -> list[Metric]:
        """Returns nothing; the registry would otherwise call `collect` to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Returns the figures of all iterators, a family of metrics for each."""
        families: dict[str, Any] = {}
        for dataset, batches in list(self.exported.items()):
            stats = batches.stats()
            figures = {name.partition("/")[2]: value for name, value in stats.as_dict().items()}
            sums = {name: figures[name] for name, one in FIGURES.items() if one.is_sum}
            sums["loop_seconds"] = stats.total.seconds
            sums["wait_seconds"] = stats.total[WAIT]
            for name, value in (figures | sums).items():
                kind = CounterMetricFamily if name in sums else GaugeMetricFamily
                if name not in families:
                    meaning = f"{name} of ShardedIterator.stats()."
                    families[name] = kind(f"grain_shard_{name}", meaning, labels=["dataset"])
                families[name].add_metric([dataset], value)
        return families.values()
