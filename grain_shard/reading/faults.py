"""What becomes of reads that fail: they are tried again, and what stays bad ends the run or a row.

`FaultRules` are what the user says. `Faults` follows them while a pipeline runs, and counts.
"""

from __future__ import annotations

import numbers
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import grain
from absl import logging

from grain_shard.errors import BadRecordsError, ShardingError, describe_error, require_int
from grain_shard.grain_inside.recovery import Recovery, Unreadable
from grain_shard.reading.origin import Origin, record_name
from grain_shard.reading.transient import is_transient

OnBadRecord = Literal["error", "mask"]

# Before each try there is a pause, three times as long as the one before, up to the longest. Half
# of it is left to chance, so that the hosts of a job do not come back all at once.
_FIRST_PAUSE_S, _GROWTH, _LONGEST_PAUSE_S = 0.1, 3, 10.0
# A share of bad records is one of so many records at least: the first ones say little.
_SHARE_OF_AT_LEAST = 1000
# So many bad records are listed; the others are counted.
_MOST_LISTED = 1000
_LOG_EVERY_S = 30


@dataclass(frozen=True)
class Retries:
    """How often a source is asked again for what it has failed to give.

    Example:
        >>> Retries(10, on=KeyError)
        Retries(times=10, on=(<class 'KeyError'>,))

    Attributes:
        times: How many more times, with growing pauses: 0.1 s, 0.3 s, 0.9 s, up to 10 s.
        on: Classes of exceptions after which it is, besides those that say themselves that a second
            try may help: `OSError`, but for those of files that are not there or may not be read,
            `TimeoutError`, and what libraries of buckets raise when a server is busy. After the
            classes named here it is also if a ``.map`` has raised them.
    """

    times: int = 4
    on: type[Exception] | tuple[type[Exception], ...] = ()

    def __post_init__(self):
        require_int("retries", self.times, 0)
        classes = self.on if isinstance(self.on, tuple) else (self.on,)
        object.__setattr__(self, "on", classes)
        for one in classes:
            if not (isinstance(one, type) and issubclass(one, Exception)):
                raise ShardingError(
                    f"on={one!r} is no class of exceptions.",
                    remedy="pass one or a tuple of them: Retries(4, on=(KeyError,)).",
                )


@dataclass(frozen=True)
class FaultRules:
    """What is to become of reads that fail; see `shard_to`.

    Attributes:
        retries: How often the source is asked again; a number, or `Retries`.
        on_bad_record: "error", or "mask" for a row of padding in the place of a record that cannot
            be had.
        max_bad_records: How many of these there may be: a number, or a share of what was read.
        is_read_once: Whether each record is read on one host only. What one host can read and
            another cannot must not be masked: their rows would differ.
    """

    retries: int | Retries = Retries()
    on_bad_record: OnBadRecord = "error"
    max_bad_records: float = 0.01
    is_read_once: bool = True

    def __post_init__(self):
        if not isinstance(self.retries, Retries):
            object.__setattr__(self, "retries", Retries(self.retries))
        if self.on_bad_record not in get_args(OnBadRecord):
            raise ShardingError(
                f"on_bad_record={self.on_bad_record!r} is not one of error, mask.",
                remedy="choose one of them.",
            )
        most = self.max_bad_records
        if isinstance(most, numbers.Integral) and not isinstance(most, bool):
            most = int(most)  # it may be one of NumPy's
            object.__setattr__(self, "max_bad_records", most)
        is_number = isinstance(most, int | float) and not isinstance(most, bool)
        # Written so that it refuses what is not a number ("nan"), too.
        if not is_number or not most >= 0 or (isinstance(most, float) and not most <= 1):
            raise ShardingError(
                f"max_bad_records={most!r} is neither a number of records nor a share of them.",
                remedy="pass a whole number, as 100, or a share from 0.0 to 1.0, as 0.01.",
            )

    @property
    def masks(self) -> bool:
        """Whether a record that cannot be had is left out."""
        return self.on_bad_record == "mask"


# For a batch that is asked for without a pipeline.
FAIL_AT_ONCE = FaultRules(retries=0)


class BadRecord(NamedTuple):
    """A record that could not be had.

    Attributes:
        record: Its index in the dataset above ``.batch``, or in a feed above ``.to_iter_dataset``.
            Those of a second epoch follow those of the first.
        error: Why not.
        feed: The feed that it belongs to; None where there are no feeds.
        origin: Where it comes from: its index in the source, and the file if the source says so.
            None if the way from the source to the record is not known.
    """

    record: int
    error: str
    feed: int | None = None
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """The record, in words."""
        where = "the dataset above .batch" if self.feed is None else f"feed {self.feed}"
        return record_name(self.record, where, self.origin)


class FaultCounts(NamedTuple):
    """What was counted of this host, since its iterator was made or moved.

    Attributes:
        retries: How many times the source was asked again after an error.
        bad_records: How many records were left out.
        listed: The first of these.
        records: How many records were read, where bad ones may be left out; otherwise 0.
    """

    retries: int = 0
    bad_records: int = 0
    listed: Sequence[BadRecord] = ()
    records: int = 0


class Faults(Recovery):
    """Follows the rules while a pipeline runs, and counts. Used by all of its threads.

    Sent to another process, it counts there what that process is to report.

    Args:
        rules: What to do.
        is_worker: Whether another process is told the counts, and judges by them.
    """

    def __init__(self, rules: FaultRules, *, is_worker: bool = False):
        self._rules, self._is_worker = rules, is_worker
        self.leaves_out = rules.masks
        retries = rules.retries
        assert isinstance(retries, Retries)
        assert isinstance(retries.on, tuple)
        self._times, self._named = retries.times, retries.on
        self._retries = self._bad_records = self._records = 0
        # For how many records all tries were used up, and whether these are too many.
        self._in_vain, self._is_away = 0, False
        self._listed: list[BadRecord] = []
        self._is_stopped = False
        # Reentrant, since the garbage collector may run `stop` in a thread that holds it.
        self._changes = threading.Condition()

    def __reduce__(self):
        return _of_worker, (self._rules,)

    def counts(self) -> FaultCounts:
        """What was counted so far."""
        with self._changes:
            listed = tuple(self._listed)
            return FaultCounts(self._retries, self._bad_records, listed, self._records)

    def taken(self) -> FaultCounts:
        """What was counted since this was called last."""
        with self._changes:
            counts = self.counts()
            self._retries = self._bad_records = self._records = 0
            self._listed = []
            return counts

    def stop(self) -> None:
        """Ends every pause, by any thread. From now on nothing is tried again."""
        with self._changes:
            self._is_stopped = True
            self._changes.notify_all()

    def asks_at_once(self, error: Exception) -> bool:
        if self.may_heal(error):
            if not self._times:
                return self.leaves_out
            if self._is_away:
                self._check_in_vain(error)
            with self._changes:
                self._retries += 1
            return True
        return self.leaves_out

    def may_heal(self, error: Exception) -> bool:
        """Whether the source is asked again after this error of its own."""
        return self._is_named(error) or is_transient(error)

    def advice(self, error: Exception) -> str:
        """What has the source asked again, or more often, after an error that comes and goes."""
        name = type(error).__name__
        classes = [one.__name__ for one in self._named]
        if not self._is_named(error):
            classes.append(name)
        on = classes[0] if len(classes) == 1 else f"({', '.join(classes)})"
        if self.may_heal(error):
            return f"retries=Retries({2 * self._times or 4}, on={on}) has it tried more often"
        again = f"retries=Retries({self._times or 4}, on={on}) has it tried again"
        return f"{name} is not tried again by itself: {again}"

    def _is_named(self, error: Exception) -> bool:
        return isinstance(error, self._named)

    def of_source(self, error: Exception, again: Callable[[], Any]) -> Any:
        return self._recovered(error, again, self.may_heal)

    def of_function(self, error: Exception, again: Callable[[], Any]) -> Any:
        return self._recovered(error, again, self._is_named)

    def evaluate(self, ds: grain.MapDataset, index: int) -> Any:
        """An element of a dataset of which nobody knows what is a source and what a function."""
        try:
            return ds[index]
        except Exception as error:
            failure = error
        return self.of_source(failure, lambda: ds[index])

    def _recovered(
        self, error: Exception, again: Callable[[], Any], may_heal: Callable[[Exception], bool]
    ) -> Any:
        tried = 0
        try:
            while tried < self._times and may_heal(error) and self._pause(tried, error):
                tried += 1
                try:
                    return again()
                except Exception as another:
                    error = another
            if tried:
                error.add_note(f"grain_shard: it was tried {tried + 1} times")
            if not self._may_leave_out(error):
                raise error
            if tried or (self._is_away and may_heal(error)):
                self._check_in_vain(error)
            return Unreadable(error)
        finally:
            del error  # its traceback refers to this frame

    def _may_leave_out(self, error: Exception) -> bool:
        if not self.leaves_out or self._is_stopped or isinstance(error, MemoryError):
            return False
        if self._rules.is_read_once:
            return True
        # A file may be missing, or a bucket away, for one of the hosts that read the same rows.
        return not isinstance(error, OSError | ImportError) and not self.may_heal(error)

    def _check_in_vain(self, error: Exception) -> None:
        """Judges before the batch is made: where a source is away, each record takes all pauses.

        Raises:
            BadRecordsError: All tries were used up for too many records.
        """
        with self._changes:
            self._in_vain += 1
            in_vain = self._in_vain
            self._is_away = in_vain > self._most()
        if self._is_away:
            raise BadRecordsError(
                f"{in_vain:,} records could not be read by {self._times + 1} tries each, more than"
                f" max_bad_records={self._rules.max_bad_records!r} allows. The last:"
                f" {describe_error(error)}.\n"
                "  remedy: see whether the source can be reached from this host."
            ) from error

    def _most(self) -> float:
        """How many records may be bad, of those that were read so far."""
        most = self._rules.max_bad_records
        if isinstance(most, int):
            return most
        return most * max(self._records, _SHARE_OF_AT_LEAST)

    def _pause(self, tried: int, error: Exception) -> bool:
        """Waits before another try; False if there is to be none."""
        with self._changes:
            if self._is_stopped or self._is_away:
                return False
            self._retries += 1
            retries = self._retries
        logging.log_every_n_seconds(
            logging.WARNING,
            "a read has failed, and is tried again (try %d of %d): %s. It is retry %d of this"
            " pipeline; of others nothing is said for %d s.",
            _LOG_EVERY_S,
            tried + 2,
            self._times + 1,
            describe_error(error),
            retries,
            _LOG_EVERY_S,
        )
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * _GROWTH ** min(tried, 20))
        with self._changes:
            is_stopped = self._changes.wait_for(
                lambda: self._is_stopped, longest * random.uniform(0.5, 1.0)
            )
        return not is_stopped

    def count(self, records: int) -> None:
        """So many more records were read, bad ones included."""
        with self._changes:
            self._records += records

    def note(
        self,
        record: int,
        error: Exception,
        feed: int | None = None,
        origin: Origin | None = None,
    ) -> None:
        """A record is left out.

        Raises:
            BadRecordsError: There are too many.
        """
        self._note(BadRecord(record, describe_error(error), feed, origin), error)

    def add(self, counts: FaultCounts) -> None:
        """What a worker process has counted.

        Raises:
            BadRecordsError: There are too many bad records now.
        """
        with self._changes:
            self._records += counts.records
            self._retries += counts.retries
            # Those that the worker did not list; the others are noted.
            self._bad_records += counts.bad_records - len(counts.listed)
        for bad in counts.listed:
            self._note(bad, None)

    def _note(self, bad: BadRecord, error: Exception | None) -> None:
        with self._changes:
            self._bad_records += 1
            count, records = self._bad_records, self._records
            if len(self._listed) < _MOST_LISTED:
                self._listed.append(bad)
        if self._is_worker:
            return
        logging.log_every_n_seconds(
            logging.WARNING,
            "%s cannot be had, and is left out: %s. It is number %d of them; of others nothing is"
            " said for %d s.",
            _LOG_EVERY_S,
            bad.name,
            bad.error,
            count,
            _LOG_EVERY_S,
        )
        if count > self._most():
            some = self._listed[:10] if count <= 10 else [*self._listed[:9], bad]
            shown = "\n".join(f"    {one.name}: {one.error}" for one in some)
            raise BadRecordsError(
                f"{count:,} of {records:,} records that this host has read cannot be had, more than"
                f" max_bad_records={self._rules.max_bad_records!r} allows. Among them:\n{shown}\n"
                "  remedy: mend or leave out the files that they are in, or allow more of them."
            ) from error


def _of_worker(rules: FaultRules) -> Faults:
    return Faults(rules, is_worker=True)


class Skipped:
    """Counts what a feed skips, since it cannot be had.

    Args:
        faults: The counts of all feeds.
        feed: Which feed it is.
    """

    def __init__(self, faults: Faults, feed: int):
        self._faults, self._feed = faults, feed

    def skips(self, element: Any, records: grain.MapDataset, record: int) -> bool:
        """Whether this stands in the place of a record of a dataset, which is then counted.

        Raises:
            BadRecordsError: There are too many.
        """
        self._faults.count(1)
        if type(element) is not Unreadable:
            return False
        self._faults.note(record, element.error, self._feed, Origin.of(records, record))
        return True


def read_by_several(rules: FaultRules) -> FaultRules:
    """The rules for records that more than one host reads."""
    return replace(rules, is_read_once=False)
