"""The rows of one feed, in order, with a state after each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain

from grain_shard.errors import StateError

# Where a feed stands, as plain JSON: {} at its beginning, {"state": that of Grain's iterator}, or
# this once it has no row left.
Entry = Mapping[str, Any]
ENDED: Entry = {"ended": True}


def is_entry(entry: Any) -> bool:
    """Whether it says where a feed stands: what is mistyped must not start it anew."""
    return entry in ({}, ENDED) or (isinstance(entry, Mapping) and set(entry) == {"state"})


class FeedReader:
    """Takes rows of one feed. Opened by the first row that is taken, in the thread that takes it.

    Args:
        make: Makes the feed's dataset.
        entry: Where to start.
    """

    def __init__(self, make: Callable[[], grain.IterDataset], entry: Entry):
        self._make, self._entry = make, entry
        self._iterator: grain.DatasetIterator | None = None
        self._ended = entry == ENDED
        self._begun = bool(entry)  # whether it has given a row

    def take(self, num_rows: int) -> list[Any]:
        """The next rows; fewer, or none, once the feed has ended.

        Raises:
            StateError: The feed cannot start from its entry.
            IndexError: There are fewer files than feeds, most likely.
        """
        rows: list[Any] = []
        if self._ended or not num_rows:
            return rows
        try:
            if self._iterator is None:
                self._iterator = self._open()
            while len(rows) < num_rows:
                rows.append(next(self._iterator))
        except StopIteration:
            self._ended = True
            self.close()
        except IndexError as error:
            if self._begun or rows:
                raise
            raise IndexError(  # and no note: Grain's own would hide it
                f"the feed failed before its first row ({error}): are there fewer files than"
                " feeds?\n  remedy: make num_feeds no larger than the number of files, or divide"
                " the rows of the files among the feeds."
            ) from error
        self._begun = True
        return rows

    def entry(self) -> Entry:
        """Where the feed stands now."""
        if self._ended:
            return ENDED
        return self._entry if self._iterator is None else {"state": self._iterator.get_state()}

    def close(self) -> None:
        """Ends the threads and processes of the feed's own pipeline."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def _open(self) -> grain.DatasetIterator:
        try:
            iterator = iter(self._make())
            if "state" in self._entry:
                self._restore(iterator)
        except StopIteration as error:  # which would pass for the end
            raise RuntimeError(
                "the feed raised StopIteration before its first row: look for a bare next() in"
                " make_feed."
            ) from error
        return iterator

    def _restore(self, iterator: grain.DatasetIterator) -> None:
        try:
            iterator.set_state(self._entry["state"])
        except (KeyError, TypeError, IndexError) as error:
            raise StateError(
                f"the feed cannot take this state: {type(error).__name__}: {error}.\n"
                "  remedy: restore with the pipeline that saved it."
            ) from error


@contextlib.contextmanager
def naming_feed(feed: int, num_feeds: int) -> Iterator[None]:
    """Adds to an error the feed that it comes from; other hosts are told it, too."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"grain_shard: in feed {feed} of {num_feeds}")
        raise
