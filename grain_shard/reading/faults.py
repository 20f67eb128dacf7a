"""Tries failed reads again. A record that stays unreadable ends the run or is masked.

`FaultRules` are the user's rules. `Faults` applies them while a pipeline runs, and counts faults.
"""

from __future__ import annotations

import functools
import math
import numbers
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import grain
from absl import logging

from grain_shard.errors import (
    BadRecordsError,
    GrainShardError,
    ShardingError,
    describe_error,
    require_choice,
    require_int,
)
from grain_shard.grain_inside.recovery import Recovery, Unreadable
from grain_shard.reading.origin import Origin, record_name
from grain_shard.reading.transient import is_transient

OnBadRecord = Literal["error", "mask"]

# Each further try follows a pause. A pause is three times as long as the last pause, up to the
# longest one. Up to half of each pause is left out at random, so that the hosts of a job do not all
# ask the source at the same time.
_FIRST_PAUSE_S, _GROWTH, _LONGEST_PAUSE_S = 0.1, 3, 10.0
# A share in `max_bad_records` is taken of the records read so far, but of at least this many: a few
# bad records at the beginning say little about the whole source.
_SHARE_OF_AT_LEAST = 1000
# Number of bad records that are listed with their names. Later bad records are only counted.
_MOST_LISTED = 1000
_LOG_EVERY_S = 30
# Seconds between two checks of a pause for whether it should end.
_SLICE_S = 0.05
# Chooses the lengths of pauses. The state of the module `random` belongs to the user.
_lengths = random.Random()


@dataclass(frozen=True)
class Retries:
    """The number of further tries after a failed read, and the errors that are tried again.

    Example:
        >>> Retries(10, on=KeyError)
        Retries(times=10, on=(<class 'KeyError'>,))

    Attributes:
        times: Number of further tries of a read. Before each try is a pause: at most 0.1 s, then
            0.3 s, 0.9 s and so on, up to 10 s.
        on: Classes of exceptions after which a read is tried again, in addition to transient
            errors. Transient errors are `OSError` (except for files that do not exist or may not be
            read), `TimeoutError`, and the errors of bucket libraries for a busy server. If a
            ``.map`` raises a class that is named here, its record is tried again, too.
    """

    times: int = 4
    on: type[Exception] | tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        require_int("retries", self.times, 0)
        classes = self.on if isinstance(self.on, tuple) else (self.on,)
        object.__setattr__(self, "on", classes)
        for one in classes:
            if not (isinstance(one, type) and issubclass(one, Exception)):
                raise ShardingError(
                    f"on={one!r} is not an exception class.",
                    remedy="pass an exception class, or a tuple of exception classes:"
                    " Retries(4, on=(KeyError, OSError)).",
                )


@dataclass(frozen=True)
class FaultRules:
    """The user's rules for failed reads, from the arguments of `shard_to`.

    Attributes:
        retries: Number of further tries of a failed read; a number, or `Retries`.
        on_bad_record: "error" ends the run at an unreadable record. "mask" puts a row of padding in
            its place. In a feed "mask" drops the record, as a filter does.
        max_bad_records: The maximum number of records that may be unreadable on a host before the
            run ends: a number, or a share of the records that the host has read (counted as at
            least 1,000).
        is_read_once: True if each record is read on one host only. If several hosts read a record,
            it is masked only after an error that every host gets. After any other error, some hosts
            might have the record and others not, so their rows would differ.
    """

    retries: int | Retries = Retries()
    on_bad_record: OnBadRecord = "error"
    max_bad_records: float = 0.01
    is_read_once: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.retries, Retries):
            object.__setattr__(self, "retries", Retries(self.retries))
        require_choice("on_bad_record", self.on_bad_record, get_args(OnBadRecord))
        most = self.max_bad_records
        largest = math.inf if isinstance(most, numbers.Integral) else 1.0
        is_number = isinstance(most, numbers.Real) and not isinstance(most, bool)
        if not is_number or not 0 <= most <= largest:  # NaN is refused, too
            raise ShardingError(
                f"max_bad_records={most!r} is neither a whole number of records nor a share of"
                " them.",
                remedy="pass a whole number such as 100, or a share from 0.0 to 1.0 such as 0.01.",
            )

    @property
    def times(self) -> int:
        """Number of further tries of a failed read."""
        return self.retries.times if isinstance(self.retries, Retries) else self.retries

    @property
    def masks(self) -> bool:
        """True if an unreadable record is left out, and does not end the run."""
        return self.on_bad_record == "mask"


# The rules for a dataset of batches that is read directly, as by ``ds[0]``, not by a training loop.
FAIL_AT_ONCE = FaultRules(retries=0)


class BadRecord(NamedTuple):
    """A record that could not be read.

    Attributes:
        record: Index of the record in the dataset that is batched or, in a feed, in the dataset
            before ``.to_iter_dataset``. Indices of the second epoch continue after the first.
        error: The error, as text.
        feed: Number of the record's feed; None in a pipeline without feeds.
        origin: The record's index in the source, and its file if the source gives one. None if the
            index in the source is unknown.
    """

    record: int
    error: str
    feed: int | None = None
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """The record's name in messages."""
        where = "the dataset before .batch" if self.feed is None else f"feed {self.feed}"
        return record_name(self.record, where, self.origin)


class FaultCounts(NamedTuple):
    """The counts of faults on one host.

    Attributes:
        retries: Number of further tries after an error.
        bad_records: Number of unreadable records that were left out. A row of padding replaces
            each one, except in feeds.
        listed: The first 1,000 of the bad records.
        records: Number of records that were read or left out. It is 0 unless bad records may be
            masked.
    """

    retries: int = 0
    bad_records: int = 0
    listed: tuple[BadRecord, ...] = ()
    records: int = 0

    def after(self, before: FaultCounts) -> FaultCounts:
        """Returns the sums of `before` and these counts. Records listed in `before` come first."""
        return FaultCounts(
            retries=before.retries + self.retries,
            bad_records=before.bad_records + self.bad_records,
            listed=(*before.listed, *self.listed)[:_MOST_LISTED],
            records=before.records + self.records,
        )


class Faults(Recovery):
    """Applies the user's rules for failed reads while a pipeline runs, and counts faults.

    All threads of a pipeline share one object. A worker process gets a copy, which counts only the
    faults of that process. The worker sends these counts to the main process.

    Args:
        rules: The user's rules.
        is_worker: True in a worker process. Too many bad records are then no error there, because
            the main process adds up the counts of all workers and raises the error.

    Attributes:
        rules: The user's rules.
    """

    def __init__(self, rules: FaultRules, *, is_worker: bool = False):
        self.rules: FaultRules = rules
        self._is_worker = is_worker
        self.masks: bool = rules.masks
        assert isinstance(rules.retries, Retries)
        self._retries: Retries = rules.retries
        self._counts = FaultCounts()
        self._exhausted = 0  # number of records that failed at every try
        self._is_stopped = False
        self._others: list[Faults] = []  # made by `with_own_counts`
        self._lock = threading.Lock()

    def with_own_counts(self) -> Faults:
        """Returns an object with the same rules and its own counts, to pass to `add` later."""
        self._others.append(Faults(self.rules, is_worker=True))
        return self._others[-1]

    def __reduce__(self) -> Any:
        return functools.partial(Faults, is_worker=True), (self.rules,)

    def counts(self) -> FaultCounts:
        """Returns the counts so far, including the retries of objects of `with_own_counts`."""
        # Without a lock: the main thread may call this, and an interrupt could leave a lock held.
        counts = self._counts
        retries = sum(other._counts.retries for other in self._others)
        return counts._replace(retries=counts.retries + retries)

    def take_counts(self) -> FaultCounts:
        """Returns the counts since the last call of `take_counts`, and sets the counts to 0."""
        with self._lock:
            counts, self._counts = self._counts, FaultCounts()
            return counts

    def count(self, more: FaultCounts) -> FaultCounts:
        """Adds `more` to the counts, and returns the sums."""
        with self._lock:
            self._counts = counts = more.after(self._counts)
            return counts

    def stop(self) -> None:
        """Ends every pause between tries, and prevents further tries.

        Any thread may call this at any point of its work.
        """
        self._is_stopped = True
        for other in self._others:
            other.stop()

    def may_heal(self, error: Exception) -> bool:
        """Returns whether this kind of error of the source may go away in a further try."""
        return self._is_named(error) or is_transient(error)

    def _is_named(self, error: BaseException) -> bool:
        return isinstance(error, self._retries.on)

    def may_repair(self, error: Exception) -> bool:
        if not self._retries.times or not self.may_heal(error):
            return self.masks
        self._require_source(error)
        self.count(FaultCounts(retries=1))
        return True

    def recovered(
        self, error: Exception, again: Callable[[], Any], *, in_function: bool = False
    ) -> Any:
        """Reads again after growing pauses, up to `retries` times, while the error may go away.

        If a function of the user failed, only the classes in ``Retries(on=...)`` are tried again.

        Args:
            error: The error of the first try.
            again: Makes a further try, and returns the element.
            in_function: True if a function of the user failed, not a read.

        Returns:
            The element, or an `Unreadable` with the error of the last try.
        """
        heals = self._is_named if in_function else self.may_heal
        tries = 0  # number of further tries
        try:
            while tries < self._retries.times and heals(error) and self._pause(tries, error):
                tries += 1
                try:
                    return again()
                except Exception as latest:
                    error = latest
            if tries:
                error.add_note(f"grain_shard: the read was tried {tries + 1} times")
                if self.may_leave_out(error):
                    with self._lock:
                        self._exhausted += 1
                    self._require_source(error)
            return Unreadable(error)
        finally:
            del error  # its traceback refers to this frame, which would stay in memory

    def _pause(self, tries: int, error: Exception) -> bool:
        """Counts and logs a further try, and waits before it. Returns False if `stop` was called.

        Args:
            tries: Number of further tries so far, without the first try.
            error: The error of the last try.

        Raises:
            BadRecordsError: More records failed at every try than may be bad.
        """
        if self._is_stopped:
            return False
        self._require_source(error)
        retries = self.count(FaultCounts(retries=1)).retries
        text = (
            f"a read failed, and is tried again (try {tries + 2} of {self._retries.times + 1}):"
            f" {describe_error(error)}. This is retry {retries} of this"
            f" pipeline. Further retries are not logged for {_LOG_EVERY_S} s."
        )
        logging.log_every_n_seconds(logging.WARNING, text, _LOG_EVERY_S)
        # The exponent is limited, because a float cannot hold the power of very many tries.
        longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * _GROWTH ** min(tries, 20))
        # `stop` must not need a lock, because the garbage collector may call it in any thread, even
        # in one that holds a lock. So the pause sleeps in short slices, and checks
        # for `stop` after each.
        until = time.monotonic() + longest_s * _lengths.uniform(0.5, 1.0)
        while not self._is_stopped and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLICE_S))
        return not self._is_stopped

    def may_leave_out(self, error: BaseException) -> bool:
        """Returns whether a record that failed with this error may be left out."""
        if not self.masks or self._is_stopped:
            return False
        # An error of this package, such as a file that was replaced, is about more than one record.
        if isinstance(error, MemoryError | GrainShardError) or not isinstance(error, Exception):
            return False
        if self.rules.is_read_once:
            return True
        # Several hosts read this record. An OSError, an ImportError or a transient error may come
        # from this host alone, for example if it lacks a file. Another host may read the record.
        return not isinstance(error, OSError | ImportError) and not self.may_heal(error)

    def _require_source(self, error: Exception) -> None:
        """Raises an error if so many records failed at every try that the source may be down.

        Otherwise each further record would wait through all pauses before it fails.

        Raises:
            BadRecordsError: More records failed at every try than may be bad.
        """
        if self._exhausted > self._most():
            raise BadRecordsError(
                f"{self._exhausted:,} records could not be read in {self._retries.times + 1} tries"
                f" each, more than max_bad_records={self.rules.max_bad_records!r} allows. The"
                f" last error: {describe_error(error)}.\n"
                "  remedy: check that this host can reach the source."
            ) from error

    def _most(self) -> float:
        """Returns how many records may be bad.

        A share is taken of the records read so far, or of 1,000 if fewer were read.
        """
        most = self.rules.max_bad_records
        if isinstance(most, numbers.Integral):
            return float(most)
        return most * max(self._counts.records, _SHARE_OF_AT_LEAST)

    def leave_out(
        self, bad: Unreadable, records: grain.MapDataset, record: int, feed: int | None = None
    ) -> None:
        """Counts and logs a bad record, which is left out.

        Args:
            bad: The record's `Unreadable`, with its error.
            records: The dataset of the record.
            record: Index of the record in that dataset, as in `BadRecord`.
            feed: Number of the record's feed; None in a pipeline without feeds.

        Raises:
            BadRecordsError: There are too many bad records.
        """
        origin = Origin.of(records, record)
        self._count_bad(BadRecord(record, describe_error(bad.error), feed, origin), bad.error)

    def add(self, counts: FaultCounts) -> None:
        """Adds the counts of a worker process, or of an object that `with_own_counts` made.

        Raises:
            BadRecordsError: There are now too many bad records.
        """
        unlisted = counts.bad_records - len(counts.listed)
        self.count(counts._replace(bad_records=unlisted, listed=()))
        for bad in counts.listed:
            self._count_bad(bad, None)

    def _count_bad(self, bad: BadRecord, error: BaseException | None) -> None:
        """Counts a bad record. Outside a worker, also logs it and raises an error for too many.

        Args:
            bad: The record.
            error: The record's error; None if only its text is known, because another process or
                object has counted the record before.

        Raises:
            BadRecordsError: There are now too many bad records.
        """
        # The sums so far, as in `FaultCounts`.
        _, count, listed, records = self.count(FaultCounts(bad_records=1, listed=(bad,)))
        if self._is_worker:
            return
        text = (
            f"a record cannot be read, and is left out: {bad.name}: {bad.error}. This is bad record"
            f" number {count}. Further bad records are not logged for {_LOG_EVERY_S} s."
        )
        logging.log_every_n_seconds(logging.WARNING, text, _LOG_EVERY_S)
        if count > self._most():
            some = dict.fromkeys([*listed[:9], bad])  # a dict, so that no record comes twice
            shown = "\n".join(f"    {one.name}: {one.error}" for one in some)
            raise BadRecordsError(
                f"{count:,} of {records:,} records of this host cannot be read, more than"
                f" max_bad_records={self.rules.max_bad_records!r} allows. Among them:\n{shown}\n"
                "  remedy: repair or leave out the records' files, or raise max_bad_records."
            ) from error

    def advice(self, error: Exception) -> str:
        """Returns advice for a message: a ``retries=`` that allows more tries after this error."""
        name, times = type(error).__name__, self._retries.times
        if self.may_heal(error):
            return f"For more tries, pass retries=Retries({2 * times or 4}, on={name})"
        again = f"To try it again, pass retries=Retries({times or 4}, on={name})"
        return f"By default a read is not tried again after a {name}. {again}"


def read_by_several(rules: FaultRules) -> FaultRules:
    """Returns the rules for a pipeline in which several hosts read the same records.

    A record is then left out only for an error that every one of these hosts gets.
    """
    return replace(rules, is_read_once=False)
