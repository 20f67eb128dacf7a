"""`StreamReader`: reads the rows that one stream gives to each batch."""

from __future__ import annotations

import contextvars
import pickle
from typing import Any

import grain

from grain_shard.errors import Raised, noting
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.state_json import restore
from grain_shard.streams.streams import ENDED, StreamReads, Streams, StreamState, Turn


class StreamReader:
    """Reads the rows of one stream, turn by turn.

    A turn is the rows that one stream gives to one batch. One thread at a time uses a reader.

    Args:
        streams: The streams of all hosts.
        number: Number of the stream.
        state: The state from which the stream starts.
        reads: The way in which this process reads its streams.

    Attributes:
        number: Number of the stream.
        faults: The rules for failed reads, and this stream's counts since its last turn.
    """

    def __init__(self, streams: Streams, number: int, state: StreamState, reads: StreamReads):
        self.number: int = number
        # Counted apart, so that a fault is added to the total together with the batch of its turn.
        self.faults: Faults = reads.faults.with_own_counts()
        self._streams, self._state = streams, state
        self._reads = reads._replace(faults=self.faults)
        self._iterator: grain.DatasetIterator | None = None
        # Each turn may run in another thread, but all run in this one context: a generator of the
        # user may set a `ContextVar` in one turn and reset it in another one.
        self._context = contextvars.copy_context()
        self._where, self._name = streams.where(number), streams.name(number)
        if streams.stays_open and state != ENDED:
            self._iterator = self._open()
            self._state = {"state": self._iterator.get_state()}

    @property
    def pickled_state(self) -> bytes:
        """The state of the stream after the last turn."""
        return pickle.dumps(self._state)

    def turn(self, num_rows: int) -> Turn:
        """Returns the rows of the stream for the next batch. The first turn opens the stream.

        Args:
            num_rows: Number of rows to return. A stream that ends returns fewer rows, or none.

        Raises:
            StateError: The stream cannot start from its state.
            IndexError: A feed raised an IndexError before its first row. The usual cause is that
                there are fewer files than feeds.
        """
        rows: list[Any] = []
        with span(READ), noting(self._where):
            if self._state != ENDED:
                self._context.run(self._take, rows, num_rows)
            # Pickled, because Grain may change the state that its iterator returned.
            return Turn(self.number, rows, pickle.dumps(self._state), self.faults.take_counts())

    def _take(self, rows: list[Any], num_rows: int) -> None:
        """Appends the rows of the next turn to `rows`; see `turn`."""
        try:
            if self._iterator is None:
                self._iterator = self._open()
            while len(rows) < num_rows:
                rows.append(next(self._iterator))
            self._state = {"state": self._iterator.get_state()}
        except StopIteration:
            self._state = ENDED
            if not self._streams.stays_open:
                self._close()
        except IndexError as error:
            text = self._streams.failed_at_start(error)  # "" if the error's own text is enough
            has_begun = self._state or rows
            if has_begun or not text:
                raise
            # A new error, because a note would be hard to see among Grain's own notes.
            raise IndexError(text) from error

    def close(self) -> None:
        """Closes the stream's iterator, which ends its threads and processes."""
        self._context.run(self._close)

    def _close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            try:  # without `noting`: at the program's exit the names of this module may be gone
                iterator.close()
            except BaseException as error:
                error.add_note(f"grain_shard: while closing {self._name}")
                raise

    def _open(self) -> grain.DatasetIterator:
        try:
            iterator = self._streams.open(self.number, self._reads)
            if self._state:
                restore(iterator, self._state["state"], f"the {self._streams.one}")
        except StopIteration as error:  # which would look like the end of the stream
            Raised.of(error).throw()
        return iterator
