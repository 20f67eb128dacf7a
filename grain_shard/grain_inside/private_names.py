"""`PRIVATE_NAMES`: the private names of Grain that this folder uses, and the cost without each.

Without one of these names, Grain's public functions give the same batches, but they are slower, or
the hosts compare less. The first stage in a process logs the names that this version of Grain does
not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
from absl import logging


class PrivateName(NamedTuple):
    """The use of a private attribute of Grain.

    Attributes:
        examples: Functions that make an object with the attribute, by public functions of Grain.
        slower: The part that becomes slower without the attribute, in words; "" if none does.
        unseen: The part that is not compared without the attribute, in words; "" if all is.
    """

    examples: tuple[Callable[[], Any], ...]
    slower: str = ""
    unseen: str = ""

    def objects(self) -> Iterator[Any]:
        """Yields the examples, except for any that this version of Grain cannot make."""
        for make in self.examples:
            try:
                example = make()
            except (AttributeError, TypeError, ValueError):
                continue
            yield example


_RECORDS: Any = grain.MapDataset.range(2)
_STREAM: Any = _RECORDS.to_iter_dataset()
_more = grain.experimental

_WHOLE = "each host makes whole batches and not only its own rows"
_ONE_BY_ONE = "records are found and read one by one"
_BATCHES, _SEEDS = "batch sizes (the first batch has the size)", "seeds"
_WEIGHTS = "weights of mixtures"
_REPEATS, _PACKING, _ORDER = "kinds of repeat", "bins of packing", "indices given to slice"
_STACKED = "the leaf of records of a stream that do not stack"


def _batches() -> Any:
    return _RECORDS.batch(1)


def _stream_batches() -> Any:
    return _STREAM.batch(1)


def _repeated() -> Any:
    return _RECORDS.repeat(1)


def _chosen() -> Any:
    return _RECORDS.slice([0])


def _shuffled() -> Any:
    return _RECORDS.shuffle(seed=0)


def _by_window() -> Any:
    return _more.WindowShuffleMapDataset(_RECORDS, window_size=2, seed=0)


def _stream_by_window() -> Any:
    return _more.WindowShuffleIterDataset(_STREAM, window_size=2, seed=0)


def _augmented() -> Any:
    return _RECORDS.random_map(lambda record, rng: record, seed=0)


def _mixed() -> Any:
    return grain.MapDataset.mix([_RECORDS, _RECORDS])


def _packed() -> Any:
    return _more.FirstFitPackIterDataset(_STREAM, length_struct={"x": 2}, num_packing_bins=2)


def _in_workers() -> Any:
    (stream,) = _STREAM.mp_prefetch(grain.MultiprocessingOptions(1)).parents[0]._datasets
    return stream


PRIVATE_NAMES = {
    "_batch_size": PrivateName((_batches, _stream_batches), _WHOLE, _BATCHES),
    "_drop_remainder": PrivateName((_batches,), _WHOLE),
    "_batch_fn": PrivateName((_batches, _stream_batches), _WHOLE, _STACKED),
    "_reseed_each_epoch": PrivateName((_repeated,), _WHOLE, _REPEATS),
    "_shuffled_index": PrivateName((_shuffled, _by_window), _ONE_BY_ONE),
    "_sliced_index": PrivateName((lambda: _RECORDS[:1],), _ONE_BY_ONE),
    "_reindexed_index": PrivateName((_chosen,), _ONE_BY_ONE),
    "_map_element": PrivateName((lambda: _RECORDS.map(str),), _ONE_BY_ONE),
    "_random_map_element": PrivateName((_augmented,), _ONE_BY_ONE),
    "_map_with_index_fn": PrivateName(
        (lambda: _RECORDS.map_with_index(lambda i, record: record),), _ONE_BY_ONE
    ),
    "_selection_map": PrivateName((_mixed,), _ONE_BY_ONE, _WEIGHTS),
    "_source": PrivateName(
        (lambda: grain.MapDataset.source([0]),), _ONE_BY_ONE, "order of a Hugging Face dataset"
    ),
    "_getitems": PrivateName((_shuffled,), _ONE_BY_ONE),
    "_read_options": PrivateName((lambda: _STREAM,), "read_options of a stream are not used"),
    "_allow_nones": PrivateName((lambda: _STREAM,), "streams read 500 records ahead"),
    "_seed_rng_seed": PrivateName((lambda: _RECORDS.seed(0), lambda: _STREAM.seed(0)), "", _SEEDS),
    "_seed": PrivateName(
        (_shuffled, _by_window, _stream_by_window, lambda: _augmented()._rng_pool),
        _ONE_BY_ONE,
        _SEEDS,
    ),
    "_rng_pool": PrivateName((_augmented,), "", _SEEDS),
    "_proportions": PrivateName(
        (lambda: _mixed()._selection_map, lambda: grain.IterDataset.mix([_STREAM])), "", _WEIGHTS
    ),
    "_num_epochs": PrivateName((_repeated, lambda: _more.RepeatIterDataset(_STREAM)), "", _REPEATS),
    "_window_size": PrivateName((_by_window, _stream_by_window), "", "windows of shuffles"),
    "_indices": PrivateName((_chosen,), "", _ORDER),
    "_num_packing_bins": PrivateName((_packed,), "", _PACKING),
    "_length_struct": PrivateName((_packed,), "", _PACKING),
    "_shuffle_bins": PrivateName((_packed,), "", _PACKING),
    "_max_sequences_per_bin": PrivateName((_packed,), "", _PACKING),
    "_config": PrivateName(
        (lambda: _more.ConcatThenSplitIterDataset(_STREAM, length_struct={"x": 2}),), "", _PACKING
    ),
    "_datasets": PrivateName(
        (lambda: _more.InterleaveIterDataset([_STREAM], cycle_length=1),), "", "interleaved streams"
    ),
    "_worker_init_fn": PrivateName((_in_workers,), "interleaved streams read 500 records ahead"),
}


@functools.cache
def log_missing_names() -> None:
    """Logs, at the first call in a process, which private names this version of Grain lacks."""
    # Pairs (class and name, its `PrivateName`). A name may be missing from only some classes.
    missing = [
        (f"{type(example).__name__}.{name}", use)
        for name, use in PRIVATE_NAMES.items()
        for example in use.objects()
        if not hasattr(example, name)
    ]
    if not missing:
        return
    slower = "; ".join(dict.fromkeys(use.slower for _, use in missing if use.slower))
    unseen = "; ".join(dict.fromkeys(use.unseen for _, use in missing if use.unseen))
    logging.warning(
        "grain_shard: Grain %s has no %s. Batches are the same.%s%s"
        " remedy: use a version of Grain that docs/versions.md lists.",
        grain.__version__,
        ", ".join(name for name, _ in missing),
        f" Slower: {slower}." if slower else "",
        f" No longer compared: {unseen}." if unseen else "",
    )
