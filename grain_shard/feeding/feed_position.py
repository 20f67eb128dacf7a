"""Where the feeds of a host stand, and the state that says so."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grain_shard.errors import StateError
from grain_shard.feeding.feed_reader import ENDED, Entry, is_entry
from grain_shard.hosts.feed_files import FEED_ENTRIES
from grain_shard.hosts.state_files import FEEDS, KIND
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint
from grain_shard.reading.state_json import from_json, to_json

_STEP = "step"  # the state's key for the number of batches that were handed out
_UNCHANGED = "  remedy: pass what get_state() gave, unchanged."


class FeedsPosition(NamedTuple):
    """How many batches were handed out, and where each feed then stood, pickled."""

    step: int
    entries: Mapping[int, bytes]

    @classmethod
    def at_start(cls, feeds: Iterable[int]) -> FeedsPosition:
        """The position of these feeds before the first batch."""
        return cls(0, dict.fromkeys(feeds, pickle.dumps({})))

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], fingerprint: Fingerprint, feeds: Iterable[int]
    ) -> FeedsPosition:
        """Where these feeds stood when a state was saved; it may hold others, too.

        Raises:
            StateError: The state was saved by other feeds, or lacks one of these.
        """
        check_fingerprint(state, fingerprint, kind="feeds", keys=(_STEP, FEED_ENTRIES))
        if type(state[_STEP]) is not int or state[_STEP] < 0:
            raise StateError(f"the state stands at batch {state[_STEP]!r}.\n{_UNCHANGED}")
        saved = state[FEED_ENTRIES]
        if not isinstance(saved, Mapping):
            raise StateError(f"the state's feeds are {saved!r}.\n{_UNCHANGED}")
        missing = [feed for feed in feeds if str(feed) not in saved]
        if missing:
            raise StateError(
                f"the state has no entry for feeds {', '.join(map(str, missing))}, which this host"
                " runs.\n  remedy: each host's get_state() has the feeds that it runs; join the"
                f' "{FEED_ENTRIES}" of all, as CheckpointRestore does.'
            )
        entries = {feed: from_json(saved[str(feed)]) for feed in feeds}
        for feed, entry in entries.items():
            if not is_entry(entry):
                raise StateError(f"the state has {entry!r} for feed {feed}.\n{_UNCHANGED}")
        return cls(state[_STEP], {feed: pickle.dumps(entry) for feed, entry in entries.items()})

    def to_state(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """The state of these feeds as plain JSON."""
        entries = {str(feed): to_json(entry) for feed, entry in self.opened().items()}
        return {KIND: FEEDS, _STEP: self.step, **fingerprint, FEED_ENTRIES: entries}

    def opened(self) -> dict[int, Entry]:
        """Where each feed stands; a copy of its own."""
        return {feed: pickle.loads(entry) for feed, entry in self.entries.items()}

    def past_end(self) -> FeedsPosition:
        """The position after one more batch, for which none of these feeds had a row any more."""
        return FeedsPosition(self.step + 1, dict.fromkeys(self.entries, pickle.dumps(ENDED)))
