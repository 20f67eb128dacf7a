"""`StreamBatches`: this host's batches of streams, each with the position after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from grain_shard.errors import Raised, reopening
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.first_record import FirstRecord, without_digest
from grain_shard.state_json import from_storage
from grain_shard.streams.position import StreamsPosition
from grain_shard.streams.stream_rows import LEFT_OUT, StreamRows
from grain_shard.streams.streams import StreamReads, Turn
from grain_shard.streams.turns import Turns, TurnsOfWorkers
from grain_shard.threads.producer import Producer
from grain_shard.trees import Batch


class StreamBatches:
    """Makes this host's batches of the turns of streams, one after the other.

    A turn is the rows that one stream gives to one batch. With the first batch, or at the end, the
    source's first record is read, too; see `FirstRecord`.

    Args:
        stream_rows: The streams, and how their turns become batches.
        faults: Adds up the failed reads of the turns.
        position: The position at which the streams start; None for the beginning.
        first_record: The digest of the source's first record.

    Attributes:
        states: The state from which each stream starts, by the stream's number.
        position: The position after the last batch that was made.
    """

    def __init__(
        self,
        stream_rows: StreamRows,
        faults: Faults,
        position: StreamsPosition | None = None,
        first_record: FirstRecord = FirstRecord(),  # noqa: B008 (it has nothing to read)
    ):
        self._stream_rows, self._faults, self._first_record = stream_rows, faults, first_record
        self.position: StreamsPosition = position or StreamsPosition.at(0, stream_rows.numbers, {})
        self.states = self.position.states()
        self._joiner = stream_rows.begin(self.position.learned)

    def opened(self, pickled: Mapping[int, bytes]) -> None:
        """Notes the states of streams that were opened before the first batch."""
        states = {**self.position.pickled_states, **pickled}
        self.position = StreamsPosition(self.position.step, states, self._joiner.learned)

    def join(self, turns: Sequence[Turn]) -> list[tuple[Batch, StreamsPosition]]:
        """Makes the next batch of one turn of each stream, and advances the position.

        The position also has the facts that the joiner has learned from the batches so far, such as
        the rows of a full batch.

        Returns:
            [(batch, position after it)]; [] if the batch is left out.

        Raises:
            StopIteration: The streams have ended.
            ShardingError: The rows do not make a batch.
            BadRecordsError: There are too many bad records now.
        """
        for turn in turns:
            self._faults.add(turn.faults)
        if self._joiner.has_ended(turns):
            # Other hosts may still have a batch, and all hosts compare the first record.
            self._first_record.run()
            raise StopIteration
        # The streams belong to the dataset, so further iterators do not warn again.
        if not (streams := self._stream_rows.streams).has_begun:
            streams.has_begun = True
            streams.warn_of(turns, self._stream_rows.unpadded_size or 0)
        batch = self._joiner.join(turns)
        if batch is LEFT_OUT:
            return []
        states = {turn.number: turn.state for turn in turns}
        self.position = StreamsPosition(self.position.step + 1, states, self._joiner.learned)
        self._first_record.run()  # reads the record once, with the first batch
        return [(batch, self.position)]

    def first_digest(self) -> str:
        """Returns the digest of the first whole batch, or ""; see `Joiner`."""
        return self._joiner.first_digest


class Joined(Producer[tuple[Batch, StreamsPosition]]):
    """The batches of turns, made by the thread that asks for them."""

    def __init__(self, batches: StreamBatches, turns: Turns | TurnsOfWorkers):
        self._batches, self._turns = batches, turns

    def __next__(self) -> tuple[Batch, StreamsPosition]:
        while not (made := self._batches.join(next(self._turns))):
            pass
        return made[0]

    def stop(self) -> None:
        self._turns.stop()

    def close(self) -> None:
        self._turns.close()


class StreamIterator(grain.DatasetIterator):
    """An iterator of Grain over batches of streams, without ``.shard_to``.

    Args:
        stream_rows: The streams, and how their turns become batches.
    """

    # Grain calls `close` even if `__init__` failed.
    _batches: Any = None

    def __init__(self, stream_rows: StreamRows):
        super().__init__()
        # `close` may run at the interpreter's exit, when the names of this module are gone. So the
        # error is made here.
        self._closed = ValueError("this is a closed iterator: call iter(ds) for a new one.")
        self._is_closed = False
        self._stream_rows = stream_rows
        self._is_broken = False  # True after an interrupt, which may have lost a batch
        self._open(None)

    def _open(self, position: StreamsPosition | None) -> None:
        faults = Faults(FaultRules())
        made = StreamBatches(self._stream_rows, faults, position)
        reads = StreamReads(faults, rows=self._stream_rows.rows_in_turn)
        turns = Turns(self._stream_rows.streams, reads, made.states)
        made.opened(turns.pickled_states())
        self._batches, self._position, self._end = Joined(made, turns), made.position, None

    def __next__(self) -> Batch:
        if self._is_closed:
            raise self._closed
        position = self._position
        if self._is_broken:  # the streams go back to the last batch that was handed out
            with reopening():
                self._go_to(position)
        if self._end is not None:
            self._end.throw()
        try:
            # The batch counts as handed out by this assignment, which is atomic.
            batch, self._position = next(self._batches)
            return batch
        except StopIteration:
            # Without the traceback, whose frames would keep this object in memory.
            self._end = Raised(StopIteration(), None)
            raise
        except Exception as error:
            # The streams have already given the rows of this batch. A further ``next`` would skip
            # these rows, so it raises the error again.
            self._end = Raised(error, error.__traceback__)
            raise
        except BaseException:
            # An interrupt: the streams may have given rows of a batch that was not handed out.
            self._position, self._is_broken = position, True
            raise

    def get_state(self) -> dict[str, Any]:
        position, streams = self._position, self._stream_rows.streams
        if streams.why_unsaved:
            # Returned as it is: saving it raises the error, and the loop may never save it.
            return dict(next(iter(position.states().values())))
        return position.to_state(streams, streams.fingerprint)

    def set_state(self, state: dict[str, Any]) -> None:
        if self._is_closed:
            raise self._closed
        stream_rows, (state, _) = self._stream_rows, without_digest(from_storage(state))
        self._go_to(StreamsPosition.of_state(state, stream_rows, stream_rows.streams.fingerprint))

    def _go_to(self, position: StreamsPosition) -> None:
        # The old streams are closed after the new ones have replaced them. So if closing raises an
        # error, the iterator is at the new position, and uses no closed stream.
        before = self._batches
        self._open(position)
        self._is_broken = False
        before.close()

    def close(self) -> None:
        self._is_closed = True
        if self._batches is not None:
            self._batches.close()
