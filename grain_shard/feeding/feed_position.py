"""`FeedsPosition`: the position of a host's feeds, which is saved as a state."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grain_shard.errors import StateError, shortened
from grain_shard.feeding.feed_reader import FeedState
from grain_shard.hosts.feed_files import FEED_ENTRIES
from grain_shard.hosts.state_files import FEEDS, KIND
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint, plain
from grain_shard.reading.padding import REMAINDER
from grain_shard.state_json import UNCHANGED, sealed, unsealed

# Keys of a state: the number of batches handed out, and the user's choice for a feed that has ended
# ("pad", "drop" or "error").
_STEP = "step"


class FeedsPosition(NamedTuple):
    """The position of feeds between two batches.

    Attributes:
        step: Number of batches that were handed out.
        pickled_states: The pickled state of each feed after these batches, by the feed's number.
    """

    step: int
    pickled_states: Mapping[int, bytes]

    @classmethod
    def at(cls, step: int, feeds: Iterable[int], state: FeedState) -> FeedsPosition:
        """Returns a position at which all feeds have the same state: at the start or past the end.

        Args:
            step: Number of batches that were handed out, batches of padding included.
            feeds: The numbers of the feeds.
            state: The state of each feed.
        """
        return cls(step, dict.fromkeys(feeds, pickle.dumps(state)))

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], fingerprint: Fingerprint, feeds: Iterable[int]
    ) -> FeedsPosition:
        """Returns the position of some feeds in a saved state.

        Args:
            state: The saved state. It may also have feeds that are not in `feeds`.
            fingerprint: The fields that must be the same as when the state was saved.
            feeds: The numbers of the feeds to take from the state.

        Raises:
            StateError: The state was saved by another pipeline, or does not have one of the feeds.
        """
        check_fingerprint(
            state,
            {KIND: FEEDS, **fingerprint},
            kind="feeds",
            keys=(_STEP, FEED_ENTRIES),
            optional=(REMAINDER,),  # not in a state that was saved without .shard_to
        )
        step = state[_STEP]
        if type(step) is not int or not 0 <= step <= sys.maxsize:
            problem = f"the state's number of batches is {shortened(step)}, not a whole number"
            raise StateError(f"{problem} of 0 or more.\n{UNCHANGED}")
        saved = state[FEED_ENTRIES]
        if not isinstance(saved, Mapping):
            raise StateError(f"the state's feeds are {shortened(saved)}, not a dict.\n{UNCHANGED}")
        missing = [feed for feed in feeds if str(feed) not in saved]
        if missing:
            raise StateError(
                f"the state has no entry for feeds {', '.join(map(str, missing))}, which this host"
                " runs.\n  remedy: restore with grain_shard.checkpoint.CheckpointRestore. Or join"
                f' the "{FEED_ENTRIES}" dicts of the states of all hosts, because get_state()'
                " returns only the feeds of the host on which it is called."
            )
        states = {
            feed: unsealed(saved[str(feed)], f"the entry of feed {feed} in the state")
            for feed in feeds
        }
        begins = [feed for feed, feed_state in states.items() if step and not feed_state]
        if begins:
            problem = f"feeds {shortened(begins)} are at their beginning in a state of step {step}"
            raise StateError(f"{problem}.\n{UNCHANGED}")
        return cls(step, {feed: pickle.dumps(state) for feed, state in states.items()})

    def to_state(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """Returns the position as a state in plain JSON.

        Args:
            fingerprint: The fields that must be the same when the state is restored.
        """
        states = {str(feed): sealed(state) for feed, state in self.feed_states().items()}
        return {KIND: FEEDS, _STEP: self.step, **plain(fingerprint), FEED_ENTRIES: states}

    def feed_states(self) -> dict[int, FeedState]:
        """Returns the state of each feed, by the feed's number. Each call returns new copies."""
        return {feed: pickle.loads(state) for feed, state in self.pickled_states.items()}
