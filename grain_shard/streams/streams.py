"""`Streams`: the streams of which batches are made, turn by turn.

A turn is the rows that one stream gives to one batch. There are two kinds of streams. A user's
stream is a single stream, which gives a whole batch in each turn: `OneStream`. Feeds are several
streams, which all give the same number of rows in a turn: `Feeds` (`feeds.py`).
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grain

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.state_files import STREAM
from grain_shard.iteration.settings import Settings
from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.reading.fingerprint import BATCH_SIZES, Fingerprint
from grain_shard.reading.from_iterable import agreed_rows
from grain_shard.reading.record_reads import record_stream
from grain_shard.reading.stack import check_rows
from grain_shard.state_json import UNCHANGED, why_unsaved
from grain_shard.trees import check_record

# The state of one stream, as plain JSON: {} before its first row, then {"state": the state of
# Grain's iterator}, and `ENDED` after its last row.
StreamState = Mapping[str, Any]
ENDED: StreamState = {"ended": True}
# Threads that read ahead for all streams of a process together, unless the user sets a number. This
# is Grain's default for one stream.
READ_AHEAD_THREADS = 16
# Records per batch that are assumed for a stream that does not tell the number.
_ASSUMED_PER_BATCH = 4


class Turn(NamedTuple):
    """The rows that one stream gives to one batch.

    Attributes:
        number: Number of the stream.
        rows: The rows. A user's stream gives one row, which is a whole batch. Once the stream has
            ended, the list is shorter or empty.
        state: The pickled state of the stream after these rows.
        faults: The counts of failed reads of these rows.
    """

    number: int
    rows: list[Any]
    state: bytes
    faults: FaultCounts = FaultCounts()


class StreamReads(NamedTuple):
    """The way in which one process reads its streams.

    Attributes:
        faults: Decides about records that cannot be read. Each stream counts them apart.
        num_threads: The user's limit for the threads that read ahead, for all streams of the
            process together; None without a limit.
        num_streams: Number of streams that the process runs.
        rows: Rows that each stream gives in a turn.
        batches: The maximum number of batches that wait or are unfinished.
    """

    faults: Faults
    num_threads: int | None = None
    num_streams: int = 1
    rows: int = 1
    batches: int = 1


class Streams(ABC):
    """The streams of which batches are made.

    Attributes:
        kind: The kind of the pipeline, as states have it.
        name_of_kind: The kind with its article, in messages.
        one: The word for one of the streams, in messages.
        stays_open: True if a stream is opened and closed together with the iterator. False if its
            first turn opens it, and its end closes it.
        learned: Names of facts in a state that may be unknown before the first batch.
        has_begun: True once a batch was made of the streams in this process.
        why_unsaved: Why no state of the streams can be saved, with the remedy; "" if no reason is
            known so far.
    """

    kind: ClassVar[str]
    name_of_kind: ClassVar[str]
    one: ClassVar[str]
    stays_open: ClassVar[bool]
    learned: ClassVar[tuple[str, ...]]
    has_begun: bool = False
    why_unsaved: str = ""

    @property
    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """The fields that must be the same when a state is saved and when it is restored."""

    @abstractmethod
    def make(self, number: int) -> grain.IterDataset:
        """Returns one of the streams, which count from 0."""

    @abstractmethod
    def open(self, number: int, reads: StreamReads) -> grain.DatasetIterator:
        """Returns an iterator over one of the streams, from the stream's beginning."""

    def lacks(self, numbers: Sequence[int]) -> str:
        """Returns the text of an error: a state has no entry for some of the streams."""
        return f"the state has no entry for the {self.one}.\n{UNCHANGED}"

    @abstractmethod
    def name(self, number: int) -> str:
        """Returns the name of one of the streams, for an error of closing."""

    @abstractmethod
    def where(self, number: int) -> str:
        """Returns a note for an error in a stream, such as "in feed 2 of 8"; "" for none."""

    def failed_at_start(self, error: IndexError) -> str:
        """Returns a clearer text for an error before the first row; "" keeps the error's own."""
        return ""

    def warn_of(self, turns: Sequence[Turn], batch_size: int) -> None:  # noqa: B027
        """Logs a warning if the first rows of the streams show a mistake.

        Args:
            turns: The turns of the first batch. At least one of them has a row.
            batch_size: Rows of a global batch, without padding.
        """

    def look_at(self, state: bytes) -> None:
        """Sets `why_unsaved` by the pickled state of an open stream."""
        self.why_unsaved = why_unsaved(pickle.loads(state))

    @abstractmethod
    def check_options(self, settings: Settings) -> None:
        """Raises a `ShardingError` if an option of `shard_to` does not fit these streams."""

    @abstractmethod
    def yields(self, settings: Settings) -> str:
        """Returns a word for the rows that the streams yield; see `HostBatches.rows`.

        Raises:
            ShardingError: The option `rows` contradicts the source.
        """

    @abstractmethod
    def no_epochs(self) -> ShardingError:
        """Returns the error of ``ds.epochs(n)``: an epoch's end is unknown before it is reached."""


class OneStream(Streams):
    """The stream of a user: a dataset of batches, which gives one batch in each turn.

    Raises:
        ShardingError: Grain would lose epochs of the dataset after a restore.
    """

    kind, name_of_kind, one = STREAM, "a stream", "stream"
    stays_open, learned = True, ("rows",)

    def __init__(self, ds: grain.IterDataset):
        refuse_lost_epochs(ds)
        self._ds = ds

    @property
    def fingerprint(self) -> Fingerprint:
        # The position of the user's iterator may count the batches of a ``.batch``.
        return {BATCH_SIZES: nodes.batch_sizes(self._ds)}

    def make(self, number: int) -> grain.IterDataset:
        return self._ds

    def open(self, number: int, reads: StreamReads) -> grain.DatasetIterator:
        ahead = reads.batches * (nodes.records_per_batch(self._ds) or _ASSUMED_PER_BATCH)
        threads = reads.num_threads or READ_AHEAD_THREADS

        def read(records: grain.MapDataset, options: grain.ReadOptions) -> grain.IterDataset:
            return record_stream(records, options, reads.faults, threads=threads, ahead=ahead)

        return iter(replace_read_ahead(self._ds, read, check_record, check_rows))

    def name(self, number: int) -> str:
        return f"this host's {self.one}"

    def where(self, number: int) -> str:
        return ""

    def check_options(self, settings: Settings) -> None:
        if settings.num_workers:
            raise ShardingError(
                "num_workers needs random access or feeds, and the dataset is a stream.",
                remedy="call .mp_prefetch before .shard_to, cut the stream into grain_shard.feeds,"
                " or keep the pipeline a grain.MapDataset down to .batch.",
            )
        if settings.fault_rules.masks:
            raise ShardingError(
                'on_bad_record="mask" needs random access or feeds: in a stream it is unknown which'
                " row a record belongs to.",
                remedy="keep the pipeline a grain.MapDataset down to .batch. Or cut the stream into"
                " grain_shard.feeds, which leave a bad record out. Or catch the error in the .map"
                " that raises it, return a marker such as None, and .filter the markers out.",
            )
        num_hosts = settings.shardings.layout().num_hosts
        if num_hosts > 1 and agreed_rows(self._ds, settings.rows) is None:
            raise ShardingError(
                f"the dataset is a stream, and rows= does not say what the stream yields on each"
                f" of {num_hosts} hosts.",
                remedy="cut the stream into grain_shard.feeds, whose batches are the same on any"
                ' number of hosts. Or pass rows="local" if each host yields the rows of its own'
                ' devices (shard the source by grain_shard.ShardByMesh), or rows="global" if every'
                " host yields the same whole batches. Or keep the pipeline a grain.MapDataset down"
                " to .batch, which needs no rows=.",
            )

    def yields(self, settings: Settings) -> str:
        return agreed_rows(self._ds, settings.rows) or GLOBAL

    def no_epochs(self) -> ShardingError:
        return ShardingError(
            "ds.epochs(n) needs random access, and this pipeline is a stream, whose length is"
            " unknown in advance.",
            remedy="call iter(ds) once per epoch, and shuffle in the source with a seed that"
            " depends on the epoch. Or keep the pipeline a grain.MapDataset down to .batch.",
        )


def refuse_lost_epochs(ds: grain.IterDataset) -> None:
    """Refuses a stream of which Grain would lose epochs after a restore.

    Grain loses them if a `RepeatIterDataset` repeats interleaved streams. After a restore in a
    later epoch, such a stream ends with that epoch, without an error. ``.mp_prefetch`` interleaves
    the streams of its workers.

    Raises:
        ShardingError: The stream has a `RepeatIterDataset` of interleaved streams.
    """
    if nodes.repeats_interleaved(ds):
        raise ShardingError(
            "a RepeatIterDataset repeats interleaved streams, and Grain loses the later epochs of"
            " such a stream after a restore. (.mp_prefetch interleaves its workers' streams.)",
            remedy="repeat before the interleaving: RepeatIterDataset(ds, n).mp_prefetch(...), or"
            " repeat each interleaved stream, or call .repeat(n) on the MapDataset at the beginning"
            " of the stream.",
        )
