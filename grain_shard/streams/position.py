"""`StreamsPosition`: the position of a host's streams, and how it is saved as a state."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grain_shard.errors import StateError, shortened
from grain_shard.hosts.feed_files import FEED_ENTRIES
from grain_shard.hosts.state_files import KIND
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint, plain
from grain_shard.reading.padding import REMAINDER
from grain_shard.state_json import UNCHANGED, sealed, unsealed
from grain_shard.streams.stream_rows import StreamRows
from grain_shard.streams.streams import Streams, StreamState

# The key of a state for the number of batches handed out.
_STEP = "step"


class StreamsPosition(NamedTuple):
    """The position of streams between two batches.

    Attributes:
        step: Number of batches that were handed out.
        pickled_states: The pickled state of each stream after these batches, by its number.
        learned: Facts that the batches so far have shown, by the names in `Streams.learned`: for a
            user's stream, the rows of a full batch.
    """

    step: int
    pickled_states: Mapping[int, bytes]
    learned: Mapping[str, int] = {}

    @classmethod
    def at(
        cls, step: int, numbers: Iterable[int], state: StreamState, learned: Mapping[str, int] = {}
    ) -> StreamsPosition:
        """Returns a position with the same state for all streams: at the start or past the end."""
        return cls(step, dict.fromkeys(numbers, pickle.dumps(state)), learned)

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], stream_rows: StreamRows, fingerprint: Fingerprint
    ) -> StreamsPosition:
        """Returns the position of this host's streams in a saved state.

        Args:
            state: The saved state. It may have more streams than this host runs.
            stream_rows: The streams of the pipeline, and which of them this host runs.
            fingerprint: The fields that must be the same as when the state was saved.

        Raises:
            StateError: The state was saved by another pipeline, lacks a stream, or was changed.
        """
        streams, numbers = stream_rows.streams, stream_rows.numbers
        check_fingerprint(
            state,
            {KIND: streams.kind, **fingerprint},
            name=streams.name_of_kind,
            keys=(_STEP, FEED_ENTRIES),
            optional=(REMAINDER,),  # not in a state that was saved without .shard_to
        )
        step, saved = state[_STEP], state[FEED_ENTRIES]
        if type(step) is not int or not 0 <= step <= sys.maxsize:
            problem = f"the state's number of batches is {shortened(step)}, not a whole number"
            raise StateError(f"{problem} of 0 or more.\n{UNCHANGED}")
        if not isinstance(saved, Mapping):
            problem = f"the state's {FEED_ENTRIES} are {shortened(saved)}, not a dict"
            raise StateError(f"{problem}.\n{UNCHANGED}")
        if missing := [number for number in numbers if str(number) not in saved]:
            raise StateError(streams.lacks(missing))
        entry = f"the entry of {streams.one} {{}} in the state"
        states = {n: unsealed(saved[str(n)], entry.format(n)) for n in numbers}
        learned: dict[str, int] = {}
        # `to_state` has added these facts to every entry, so the facts of the last entry are used.
        for found in states.values():
            learned = {name: found.pop(name, None) for name in streams.learned}
        if any(type(count) is not int for count in learned.values()):
            raise StateError(f"{entry.format(0)} lacks {', '.join(learned)}.\n{UNCHANGED}")
        # {} is the state of a stream before its first row.
        unread = [number for number, found in states.items() if step and not found]
        if unread:
            problem = f"feeds {shortened(unread)} are at their beginning in a state of step {step}"
            raise StateError(f"{problem}.\n{UNCHANGED}")
        pickled = {number: pickle.dumps(found) for number, found in states.items()}
        return cls(step, pickled, learned)

    def to_state(self, streams: Streams, fingerprint: Fingerprint) -> dict[str, Any]:
        """Returns the position as a state in plain JSON, with the fingerprint of the pipeline."""
        entries = {str(n): sealed({**self.learned, **state}) for n, state in self.states().items()}
        fields = {KIND: streams.kind, _STEP: self.step, **plain(fingerprint)}
        return {**fields, FEED_ENTRIES: entries}

    def states(self) -> dict[int, StreamState]:
        """Returns the state of each stream, by its number. Each call returns new copies."""
        return {number: pickle.loads(state) for number, state in self.pickled_states.items()}
