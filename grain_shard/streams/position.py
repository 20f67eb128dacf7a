"""`StreamsPosition`: the position of a host's streams, which is saved as a state."""

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
from grain_shard.streams.streams import Streams, StreamState

# The key of a state for the number of batches handed out.
_STEP = "step"


class StreamsPosition(NamedTuple):
    """The position of streams between two batches.

    Attributes:
        step: Number of batches that were handed out.
        pickled_states: The pickled state of each stream after these batches, by its number.
        learned: Facts that the batches have shown, by the names in `Streams.learned`.
    """

    step: int
    pickled_states: Mapping[int, bytes]
    learned: Mapping[str, int] = {}

    @classmethod
    def at(
        cls, step: int, numbers: Iterable[int], state: StreamState, learned: Mapping[str, int] = {}
    ) -> StreamsPosition:
        """Returns a position with the same state for all streams: at the start or past the end.

        Args:
            step: Number of batches that were handed out, batches of padding included.
            numbers: The numbers of the streams.
            state: The state of each stream.
            learned: Facts that the batches have shown.
        """
        return cls(step, dict.fromkeys(numbers, pickle.dumps(state)), learned)

    @classmethod
    def of_state(
        cls,
        state: Mapping[str, Any],
        streams: Streams,
        fingerprint: Fingerprint,
        numbers: Iterable[int],
    ) -> StreamsPosition:
        """Returns the position of some streams in a saved state.

        Args:
            state: The saved state. It may also have streams that are not in `numbers`.
            streams: The streams of the pipeline.
            fingerprint: The fields that must be the same as when the state was saved.
            numbers: The numbers of the streams to take from the state.

        Raises:
            StateError: The state was saved by another pipeline, or does not have one of the
                streams.
        """
        check_fingerprint(
            state,
            {KIND: streams.kind, **fingerprint},
            kind=streams.kind if streams.kind.endswith("s") else f"a {streams.kind}",
            keys=(_STEP, *streams.learned, FEED_ENTRIES),
            optional=(REMAINDER,),  # not in a state that was saved without .shard_to
        )
        step, *learned = (_count(state, name) for name in (_STEP, *streams.learned))
        saved = state[FEED_ENTRIES]
        if not isinstance(saved, Mapping):
            raise StateError(f"the state's feeds are {shortened(saved)}, not a dict.\n{UNCHANGED}")
        missing = [number for number in numbers if str(number) not in saved]
        if missing:
            raise StateError(
                f"the state has no entry for feeds {', '.join(map(str, missing))}, which this host"
                " runs.\n  remedy: restore with grain_shard.checkpoint.CheckpointRestore. Or join"
                f' the "{FEED_ENTRIES}" dicts of the states of all hosts, because get_state()'
                " returns only the feeds of the host on which it is called."
            )
        states = {
            number: unsealed(
                saved[str(number)], f"the entry of {streams.one} {number} in the state"
            )
            for number in numbers
        }
        begins = [number for number, entry in states.items() if step and not entry]
        if begins:
            problem = f"feeds {shortened(begins)} are at their beginning in a state of step {step}"
            raise StateError(f"{problem}.\n{UNCHANGED}")
        pickled = {number: pickle.dumps(entry) for number, entry in states.items()}
        return cls(step, pickled, dict(zip(streams.learned, learned, strict=True)))

    def to_state(self, streams: Streams, fingerprint: Fingerprint) -> dict[str, Any]:
        """Returns the position as a state in plain JSON.

        Args:
            streams: The streams of the pipeline.
            fingerprint: The fields that must be the same when the state is restored.
        """
        entries = {str(number): sealed(state) for number, state in self.states().items()}
        counts = {_STEP: self.step, **self.learned}
        return {KIND: streams.kind, **counts, **plain(fingerprint), FEED_ENTRIES: entries}

    def states(self) -> dict[int, StreamState]:
        """Returns the state of each stream, by its number. Each call returns new copies."""
        return {number: pickle.loads(state) for number, state in self.pickled_states.items()}


def _count(state: Mapping[str, Any], name: str) -> int:
    count = state[name]
    if type(count) is not int or not 0 <= count <= sys.maxsize:
        problem = f"the state's number of batches is {shortened(count)}, not a whole number"
        if name != _STEP:
            problem = f"the state's {name} is {shortened(count)}, not a whole number"
        raise StateError(f"{problem} of 0 or more.\n{UNCHANGED}")
    return count
