"""The position of the feeds of a host, and its state."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grain_shard.errors import StateError
from grain_shard.feeding.feed_reader import ENDED, FeedState
from grain_shard.hosts.feed_files import FEED_ENTRIES
from grain_shard.hosts.state_files import FEEDS, KIND
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint
from grain_shard.reading.state_json import from_json, to_json

# The state's keys for the number of batches that were handed out, and for the treatment of the end.
_STEP, REMAINDER = "step", "remainder"
_UNCHANGED = "  remedy: pass set_state() the value that get_state() returned, unchanged."


class FeedsPosition(NamedTuple):
    """The number of batches that were handed out, and each feed's state after them, pickled."""

    step: int
    pickled_states: Mapping[int, bytes]

    @classmethod
    def at_start(cls, feeds: Iterable[int]) -> FeedsPosition:
        """Returns the position of these feeds before the first batch."""
        return cls(0, dict.fromkeys(feeds, pickle.dumps({})))

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], fingerprint: Fingerprint, feeds: Iterable[int]
    ) -> FeedsPosition:
        """Returns the position of these feeds in a state, which may hold other feeds, too.

        Raises:
            StateError: The state was saved by other feeds, or lacks one of these.
        """
        check_fingerprint(
            state,
            {KIND: FEEDS, **fingerprint},
            kind="feeds",
            keys=(_STEP, FEED_ENTRIES),
            optional=(REMAINDER,),  # a state of plain iteration, which pads nothing, has none
        )
        step = state[_STEP]
        if type(step) is not int or not 0 <= step <= sys.maxsize:
            problem = f"the state's number of batches is {step!r}, not a whole number from 0 on."
            raise StateError(f"{problem}\n{_UNCHANGED}")
        saved = state[FEED_ENTRIES]
        if not isinstance(saved, Mapping):
            raise StateError(f"the state's feeds are {saved!r}, not a dict.\n{_UNCHANGED}")
        missing = [feed for feed in feeds if str(feed) not in saved]
        if missing:
            raise StateError(
                f"the state has no entry for feeds {', '.join(map(str, missing))}, which this host"
                f' runs.\n  remedy: join the "{FEED_ENTRIES}" dicts of the states of all hosts, as'
                " CheckpointRestore does: get_state() returns only the feeds of its own host."
            )
        states = {feed: from_json(saved[str(feed)]) for feed in feeds}
        for feed, feed_state in states.items():
            is_begun = isinstance(feed_state, Mapping) and set(feed_state) == {"state"}
            # Any other state would start the feed anew, so it is refused.
            if not (is_begun or feed_state == ENDED or (feed_state == {} and not step)):
                entry = f"the state has an invalid entry for feed {feed}: {feed_state!r}."
                raise StateError(f"{entry}\n{_UNCHANGED}")
        return cls(step, {feed: pickle.dumps(states[feed]) for feed in states})

    def to_state(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """Returns the state of these feeds as plain JSON."""
        states = {str(feed): to_json(state) for feed, state in self.feed_states().items()}
        return {KIND: FEEDS, _STEP: self.step, **fingerprint, FEED_ENTRIES: states}

    def feed_states(self) -> dict[int, FeedState]:
        """Returns the state of each feed, as a copy of its own."""
        return {feed: pickle.loads(state) for feed, state in self.pickled_states.items()}

    def past_end(self, batches: int) -> FeedsPosition:
        """Returns the position after more batches, in which these feeds had no row any more."""
        return FeedsPosition(
            self.step + batches, dict.fromkeys(self.pickled_states, pickle.dumps(ENDED))
        )
