"""`RandomAccess`: the batches of a `MapDataset`, which can begin at any position."""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from grain_shard.errors import ShardingError, StateError, shortened
from grain_shard.host_arrays import owned
from grain_shard.hosts.state_files import KIND, PROCESSES, RANDOM_ACCESS
from grain_shard.iteration.executor_batches import ExecutorBatches, counted_batch
from grain_shard.iteration.host_batches import THREAD, HostBatches, Opened
from grain_shard.iteration.settings import Settings
from grain_shard.reading.batch_reads import BatchReads
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import START, Progress
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.reading.fingerprint import (
    HOW_TO_COUNT_RECORDS,
    check_fingerprint,
    fingerprint_at,
    packed,
    unpacked,
)
from grain_shard.reading.first_record import FirstRecord
from grain_shard.stats.counts import ReadThreads
from grain_shard.threads.mapped import mapped
from grain_shard.threads.pace import MOST_THREADS, ReadPace
from grain_shard.threads.pool import Pool
from grain_shard.threads.worker_processes import WorkerProcesses
from grain_shard.trees import Batch

# A dataset with more batches than this counts as endless. ``.repeat()`` without a number has
# `sys.maxsize` records, so ``.repeat().batch(B)`` has `sys.maxsize / B` batches.
ENDLESS = sys.maxsize >> 24


class RandomAccess(HostBatches):
    """The batches of a `MapDataset`.

    The `Cuts` of its batching know with which record each batch begins.

    Args:
        batching: This host's batches. No other object refers to their arrays.
        first_record: The digest of the source's first record.
        settings: The options of `shard_to`.
    """

    kind = RANDOM_ACCESS
    _STEP, _EPOCH, _RECORD = "step", "epoch", "record"  # the keys of a state, as in `Progress`

    def __init__(self, batching: Batching, first_record: FirstRecord, settings: Settings):
        self._batching, self._settings, self._passes = batching, settings, 1
        self.first_record = first_record
        self.padding, self.reads_other_rows = batching.rows_of_padding, batching.reads_other_rows
        self.fingerprint = batching.fingerprint()
        self.host_batch_sizes = batching.host_batch_sizes if batching.has_several_sizes else ()
        self.compared = {**self.fingerprint, "epochs": batching.num_epochs}
        if batching.counts_records:
            by_step = batching.cuts.sizes_by_step
            self.compared["global_batch_size"] = by_step if len(by_step) > 1 else by_step[0]

    def num_batches(self) -> int | None:
        return self._batching.num_batches()

    def repeated(self, times: int) -> RandomAccess:
        if self._batching.num_batches() > ENDLESS:
            raise ShardingError(
                f"the dataset repeats without an end, so ds.epochs({times}) would never reach a"
                " second epoch.",
                remedy="remove .repeat() from the pipeline.",
            )
        several = copy.copy(self)
        several._batching, several._passes = self._batching.repeated(times), self._passes * times
        several.compared = {**self.compared, "epochs": several._batching.num_epochs}
        return several

    @property
    def _epochs_of_a_pass(self) -> int:
        return self._batching.num_epochs // self._passes

    def pass_of(self, position: Progress) -> tuple[int, int]:
        """Returns the number of the next batch's pass, and how many batches of it are left.

        A pass goes over the dataset once, as ``iter(ds)`` does. `repeated` makes several passes,
        which count from 0. After the last batch, the result is (number of passes, 0).
        """
        epochs = self._epochs_of_a_pass
        cuts, number = self._batching.cuts.beginning_at(position), position.epoch // epochs
        while number < self._passes:
            left = cuts.steps_before((number + 1) * epochs) - position.step
            if left:
                return number, left
            number += 1  # no batch of this pass is left, because its last records are dropped
        return number, 0

    def next_pass(self, position: Progress) -> Progress:
        """Returns the position before the first batch of the pass after this position's pass."""
        number, left = self.pass_of(position)
        return Progress(position.step + left, (number + 1) * self._epochs_of_a_pass, 0)

    def start_of_pass(self, number: int) -> Progress:
        """Returns the position before the first batch of a pass."""
        cuts = self._batching.cuts
        return cuts.progress(cuts.steps_before(number * self._epochs_of_a_pass))

    def position_at(self, *, step: int | None, record: int | None) -> Progress:
        cuts, batches = self._batching.cuts, self._batching.num_batches()
        step, record = _whole_number("step", step), _whole_number("record", record)
        if step is not None:
            if not 0 <= step <= batches:
                raise ShardingError(
                    f"there is no step {step!r}: the dataset has {batches:,} batches.",
                    remedy=f"seek a step from 0 to {batches:,}. For more steps use ds.epochs(n), or"
                    " .batch(B).repeat(n).",
                )
            return cuts.progress(step)
        if not self._batching.counts_records:
            raise ShardingError(
                "seek(record=...) needs a pipeline whose position counts records. This pipeline's"
                " position counts batches.",
                remedy=f"call seek(step); or, to seek a record, {HOW_TO_COUNT_RECORDS}",
            )
        records = cuts.records * self._batching.num_epochs
        # The caller gives either a step or a record, so `record` is not None here.
        if record is None or not 0 <= record <= records:
            raise ShardingError(
                f"there is no record {record!r}: all epochs together have {records:,} records.",
                remedy=f"seek a record from 0 to {records:,}.",
            )
        epoch, record = divmod(record, cuts.records)
        return Progress(cuts.step_of(epoch, record), epoch, record)

    def open(self, position: Progress | None) -> Opened:
        start = self._batching.cuts.progress(0) if position is None else position
        batching, settings = self._batching.beginning_at(start), self._settings
        total, faults = batching.num_batches(), Faults(settings.fault_rules)
        indices = range(start.step, total)
        reads: Callable[[], ReadThreads] = ReadThreads  # "not measured" for workers, executors
        if settings.executor is not None:
            tasks = ExecutorBatches(settings.executor, batching, indices, faults)
            batches = self._from_executor(tasks, batching, start.step)
        elif settings.num_workers and indices:
            batches = self._from_workers(batching, indices, faults)
        else:
            batches, reads = self._from_threads(batching, indices, faults)
        return Opened(start, batches, total, reads=reads, faults=faults.counts)

    def _from_executor(
        self, tasks: ExecutorBatches, batching: Batching, first: int
    ) -> Pool[tuple[Batch, Progress]]:
        def made(index: int) -> tuple[Batch, Progress]:
            batch = tasks.made(index)
            if index == first:
                self.first_record.run()
            return batch, batching.cuts.progress(index + 1)

        size = self._settings.cpu_buffer_size
        return mapped(made, tasks, size=size, num_threads=size, name=THREAD)

    def _from_workers(
        self, batching: Batching, indices: range, faults: Faults
    ) -> Pool[tuple[Batch, Progress]]:
        rules, size, numbers = faults.rules, self._settings.cpu_buffer_size, iter(indices)
        of_worker = functools.partial(_batches_of_worker, batching, rules, indices.start)
        workers = WorkerProcesses(of_worker, self._settings.num_workers, buffer_size=size)

        def taken(item: tuple[Batch, FaultCounts]) -> tuple[Batch, Progress]:
            batch, counts = item
            self.first_record.run()
            faults.add(counts)
            return owned(batch), batching.cuts.progress(next(numbers) + 1)

        # A buffer of one: while the loop trains, a thread copies the next batch out of the shared
        # memory of the workers.
        return mapped(taken, workers, size=1, name=THREAD)

    def _from_threads(
        self, batching: Batching, indices: range, faults: Faults
    ) -> tuple[Pool[tuple[Batch, Progress]], Callable[[], ReadThreads]]:
        settings, size = self._settings, self._settings.cpu_buffer_size
        most = min(MOST_THREADS, size * max(1, batching.records_per_batch))
        pace = ReadPace(settings.num_threads, most=most, alone=batching.reads_many)
        reads = BatchReads(
            batching, indices, size, pace, faults=faults, first_record=self.first_record
        )

        def threads() -> ReadThreads:  # must not refer to `reads`; see `Opened`
            return ReadThreads(pace.threads, pace.count.why)

        return Pool(reads, size, pace=pace, name=THREAD), threads

    def first(self) -> Batch:
        return self._batching.read_batch(0, Faults(self._settings.fault_rules))

    def next_batch(self, position: Progress) -> Mapping[str, Any]:
        step, epoch, record = position
        if not self._batching.counts_records:
            return {"next batch": step}
        return {"next batch": step, "next record": f"{record} of epoch {epoch}"}

    def to_state(self, position: Progress) -> dict[str, Any]:
        fingerprint = fingerprint_at(self.fingerprint, position)
        return {KIND: self.kind, **self._counted(position), **packed(fingerprint)}

    def _require_counted_alike(self, state: Mapping[str, Any]) -> None:
        """Refuses a state that counts records if this pipeline counts batches, and vice versa.

        Raises:
            StateError: The state and this pipeline count in different units.
        """
        if (self._RECORD in state) == self._batching.counts_records:
            return
        by_batch, by_record = "the pipeline of the state", "the current pipeline"
        if not self._batching.counts_records:
            by_batch, by_record = by_record, by_batch
        raise StateError(
            f"the state does not fit: {by_batch} counts its position in batches, because of a"
            " batch_fn, or of a .map, slice or shuffle after .batch. But"
            f" {by_record} counts its position in records.\n"
            "  remedy: restore with the pipeline that saved the state."
        )

    def _counted(self, progress: Progress) -> dict[str, int]:
        """Returns the fields of a state for a position: step, epoch and record, or step alone."""
        step, epoch, record = progress
        if not self._batching.counts_records:
            return {self._STEP: step}
        return {self._STEP: step, self._EPOCH: epoch, self._RECORD: record}

    def from_state(self, state: dict[str, Any]) -> Progress:
        _refuse_state_of_grain(state)
        state = unpacked(state)
        progress = self._progress_in(state)
        current = fingerprint_at(self.fingerprint, progress)
        keys = tuple(self._counted(START))
        if state.get(KIND) == self.kind and self._STEP in state:
            # Another unit is the best explanation if nothing else differs, or if the state lacks a
            # field that a position of this pipeline has. Otherwise `check_fingerprint` explains
            # more. A field that the state lacks counts as equal here.
            fits = all(state.get(name, value) == value for name, value in current.items())
            if fits or not all(key in state for key in keys):
                self._require_counted_alike(state)
        check_fingerprint(
            state,
            {KIND: self.kind, **current},
            name="a random-access pipeline",
            keys=keys,
            if_data_changed=f"call batches.seek({shortened(state.get(self._STEP))}) in place of the"
            " restore. The run goes on at that step, but records of that epoch may come twice, or"
            " not at all.",
        )
        if progress is None:
            place = ", ".join(f"{key} {shortened(state[key])}" for key in keys)
            raise StateError(
                f"the state is at {place}, and this dataset of"
                f" {self._batching.num_batches():,} batches has no such position.\n  remedy:"
                " give the pipeline at least as many epochs as the pipeline that saved the state,"
                " by .repeat(n) or .epochs(n); and pass the state that get_state() returned,"
                " unchanged."
            )
        return progress

    def _progress_in(self, state: Mapping[str, Any]) -> Progress | None:
        """Returns the position of a state; None if this dataset has no such position."""
        cuts, epochs = self._batching.cuts, self._batching.num_epochs
        step, epoch, record = (state.get(key, 0) for key in (self._STEP, self._EPOCH, self._RECORD))
        if not all(type(count) is int and count >= 0 for count in (step, epoch, record)):
            return None
        if not self._batching.counts_records:
            return cuts.progress(step) if step <= self._batching.num_batches() else None
        is_inside = epoch < epochs and record <= cuts.records
        is_end = (epoch, record) == (epochs, 0)
        has_more_batches_than_records = step > epoch * cuts.records + record
        if not (is_inside or is_end) or has_more_batches_than_records:
            return None
        return Progress(step, epoch, record)


def _refuse_state_of_grain(state: Any) -> None:
    """Raises a `StateError` if Grain's own iterator saved the state; it names the `seek` to use.

    An `ElasticIterator` counts records. Grain's other iterators over random access count elements,
    with ``.mp_prefetch`` for each worker, and do not say how many records an element had.
    """
    match state:
        case {"global_next_index": int(count)}:  # an ElasticIterator
            remedy = f"call batches.seek(record={count})"
        case {"next_index": int()} | {"iterators_in_use_states": [{"next_index": int()}, *_]}:
            count = 0  # elements that all workers have handed out
            for worker in state.get("iterators_in_use_states", [state]):
                match worker:
                    case {"next_index": int(given)}:
                        count += given
            # Every process of the job has read as many elements, each from its own slice.
            processes = state.get(PROCESSES)  # added by `read_state`, from the names of the files
            records = count * (processes if type(processes) is int else jax.process_count())
            remedy = (
                f"if .batch(global batch size) stood before .to_iter_dataset(), call"
                f" batches.seek({count}). Else call batches.seek(record={records} * n), where n is"
                " the number of records in an element of one process"
            )
        case _:
            return
    raise StateError(
        f"one of Grain's own iterators saved this state, after {count} records or batches.\n"
        f"  remedy: {remedy}. That is right only if Grain read the same records in the same order."
    )


def _whole_number(name: str, value: Any) -> int | None:
    """Converts an integer of NumPy or JAX, such as a training state's step, to an int.

    None stays None.

    Raises:
        ShardingError: The value is not an integer. The text calls it `name`.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ShardingError(f"the {name} {value!r} is not an int.", remedy=f"pass int({name}).")


def _batches_of_worker(
    batching: Batching, rules: FaultRules, start: int, worker: int, num_workers: int
) -> Iterator[tuple[Batch, FaultCounts]]:
    """Makes every `num_workers`-th batch from batch `start + worker` on, in a worker process.

    Returns:
        An iterator over (batch, counts of failed reads), which reads a batch at each ``next``.
    """
    indices = range(start + worker, batching.num_batches(), num_workers)
    return map(functools.partial(counted_batch, batching, rules), indices)
