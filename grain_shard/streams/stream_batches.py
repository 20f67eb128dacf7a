"""`StreamBatches`: this host's batches of streams, each with the position after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grain

from grain_shard.errors import reopening
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.first_record import FirstRecord, without_digest
from grain_shard.state_json import from_storage
from grain_shard.streams.position import StreamsPosition
from grain_shard.streams.rows import LEFT_OUT, StreamRows
from grain_shard.streams.streams import Turn
from grain_shard.streams.turns import Turns, TurnSettings, TurnsOfWorkers
from grain_shard.threads.tasks import Producer, Raised
from grain_shard.trees import Batch


@dataclass(frozen=True)
class StreamOptions:
    """The options with which a host reads its streams.

    Attributes:
        num_threads: Number of threads that read ahead for the streams, in this process or in each
            worker process. None adapts the number while they read.
        num_workers: Number of worker processes that run the streams. 0 runs them in this process.
        buffer_size: Number of batches that are made ahead. With workers it is at least four,
            because Grain makes no smaller buffer.
        fault_rules: The rules for failed reads.
    """

    num_threads: int | None = None
    num_workers: int = 0
    buffer_size: int = 1
    fault_rules: FaultRules = FaultRules()  # noqa: RUF009 (it is frozen)


class StreamBatches(Producer[tuple[Batch, StreamsPosition]]):
    """The pairs (host batch, position after it) of streams, made by the thread that asks.

    With the first batch, or at the end, it also reads the source's first record; see `FirstRecord`.

    Args:
        plan: The streams, and how their turns become batches.
        options: The options with which the streams run.
        position: The position at which the streams start; None for the beginning.
        first_record: The digest of the source's first record.

    Attributes:
        faults: Decides on records that cannot be read, and counts them.
        position: The position after the last batch. A later batch replaces it.
    """

    def __init__(
        self,
        plan: StreamRows,
        options: StreamOptions,
        position: StreamsPosition | None = None,
        first_record: FirstRecord = FirstRecord(),  # noqa: B008 (it has nothing to read)
    ):
        self._plan, self._first_record = plan, first_record
        self._end: Raised | None = None
        self.faults: Faults = Faults(options.fault_rules)
        step, pickled, learned = position or StreamsPosition.at(0, plan.numbers, {})
        self._joiner = plan.begin(learned)
        states = StreamsPosition(step, pickled).states()
        settings = TurnSettings(
            plan.streams, plan.rows_in_turn, self.faults, options.num_threads, options.buffer_size
        )
        if options.num_workers:
            self._turns: Turns | TurnsOfWorkers
            self._turns = TurnsOfWorkers(settings, states, options.num_workers)
        else:
            self._turns = Turns(settings, states)
            pickled = self._turns.pickled_states()  # of streams that are open by now
        self.position: StreamsPosition = StreamsPosition(step, pickled, self._joiner.learned)

    def __next__(self) -> tuple[Batch, StreamsPosition]:
        if self._end is not None:
            self._end.throw()
        try:
            batch, turns = LEFT_OUT, list[Turn]()
            while batch is LEFT_OUT:
                turns = next(self._turns)
                if self._joiner.has_ended(turns):
                    # Other hosts may have a batch although this host has none, and all compare
                    # the record.
                    self._first_record.run()
                    raise StopIteration
                if not (streams := self._plan.streams).has_begun:
                    streams.has_begun = True
                    streams.warn_of(turns, self._plan.unpadded_size or 0)
                batch = self._joiner.join(turns)
        except StopIteration:
            # Without the traceback, whose frames would keep this object in memory.
            self._end = Raised(StopIteration(), None)
            raise
        except Exception as error:
            # The streams have already given the rows of this batch. A further ``next`` would skip
            # these rows, so it raises the error again.
            self._end = Raised(error, error.__traceback__)
            raise
        states = {turn.number: turn.state for turn in turns}
        self.position = StreamsPosition(self.position.step + 1, states, self._joiner.learned)
        self._first_record.run()
        return batch, self.position

    def first_digest(self) -> str:
        """Returns the digest of the first whole batch, or ""; see `Joiner`."""
        return self._joiner.first_digest

    def stop(self) -> None:
        self.faults.stop()
        self._turns.stop()

    def close(self) -> None:
        self._turns.close()


class StreamIterator(grain.DatasetIterator):
    """An iterator of Grain over batches of streams, without ``.shard_to``.

    Args:
        plan: The streams, and how their turns become batches.
    """

    # Grain calls `close` even if `__init__` failed.
    _batches: Any = None

    def __init__(self, plan: StreamRows):
        super().__init__()
        # `close` may run at the interpreter's exit, when the names of this module are gone. So the
        # error is made here.
        self._closed = ValueError("this is a closed iterator: call iter(ds) for a new one.")
        self._is_closed = False
        self._plan, self._batches = plan, StreamBatches(plan, StreamOptions())
        self._position, self._is_broken = self._batches.position, False

    def __next__(self) -> Batch:
        if self._is_closed:
            raise self._closed
        position = self._position
        if self._is_broken:
            with reopening():
                self._go_to(position)
        try:
            # The batch counts as handed out by this assignment, which is atomic.
            batch, self._position = next(self._batches)
            return batch
        except Exception:
            raise
        except BaseException:
            # An interrupt: the streams may have given rows of a batch that was not handed out.
            self._position, self._is_broken = position, True
            raise

    def get_state(self) -> dict[str, Any]:
        position, streams = self._position, self._plan.streams
        if streams.why_unsaved:
            # As it is: the loop may never save it, and a save says what cannot be saved.
            return dict(next(iter(position.states().values())))
        return position.to_state(streams, streams.fingerprint)

    def set_state(self, state: dict[str, Any]) -> None:
        if self._is_closed:
            raise self._closed
        plan, (state, _) = self._plan, without_digest(from_storage(state))
        self._go_to(StreamsPosition.of_state(state, plan, plan.streams.fingerprint))

    def _go_to(self, position: StreamsPosition) -> None:
        # The new streams replace the old ones before the old ones are closed. If closing raises an
        # error, the iterator is at the new position already, and uses no closed stream.
        before = self._batches
        self._batches = StreamBatches(self._plan, StreamOptions(), position)
        self._position, self._is_broken = position, False
        before.close()

    def close(self) -> None:
        self._is_closed = True
        if self._batches is not None:
            self._batches.close()
