"""Exports the figures of `stats()` to Prometheus, through a registry of `prometheus_client`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.spans import WAIT
from grain_shard.stats.figures import FIGURES


def export(batches: ShardedIterator, dataset: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Lets Prometheus scrape an iterator for as long as the iterator lives.

    The figures are computed at each scrape, and are named as in `Stats.as_dict`. Two further sums
    are exported: ``loop_seconds``, the seconds of the run, and ``wait_seconds``, the seconds in
    which the loop waited. The rate of ``wait_seconds`` divided by the rate of ``loop_seconds`` is
    the share of time in which the loop waits.

    Args:
        batches: The iterator, such as ``iter(ds)`` or ``ds.epochs(n)``. The registry does not keep
            it alive.
        dataset: Value of the label ``dataset``. A later iterator with the same value replaces this
            one. Its sums begin at 0, and Prometheus treats that as a restart.
        registry: The registry that Prometheus scrapes.

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
    """A collector for `prometheus_client`: the figures of all exported iterators.

    Attributes:
        exported: The iterators, by their label ``dataset``. They are not kept alive.
    """

    def __init__(self):
        self.exported = weakref.WeakValueDictionary[str, ShardedIterator]()

    def describe(self) -> list[Metric]:
        """Returns an empty list, in place of the names of all metrics.

        The registry asks for the names when the collector is registered. Without this method it
        would call `collect` for them.
        """
        return []

    def collect(self) -> Iterable[Metric]:
        """Returns a family of metrics for each figure, with a value for each iterator."""
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
