"""The files of a checkpoint with the states of feeds. A file's name has the numbers of its feeds.

Each feed is saved by the first of the hosts that run it: hosts that hold the same shards run the
same feeds. The host writes one file for each range of consecutive feeds. A host that restores lists
the folder, and reads only the files with feeds that it runs. So the number of hosts may have
changed since the save. Four hosts with 16 feeds each write these files::

    feeds-00000-00015-of-00064.json     feeds 0 to 15 of 64
    feeds-00016-00031-of-00064.json
    ...
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from etils import epath

from grain_shard.errors import StateError, shortened
from grain_shard.hosts.json_files import damaged, listed, read_object, write_object

# Keys of a state of feeds: the dict with the state of each feed, and the number of feeds.
FEED_ENTRIES, NUM_FEEDS = "feeds", "num_feeds"

_NAME = re.compile(r"feeds-([0-9]+)-([0-9]+)-of-([0-9]+)\.json")


class OwnFeeds(NamedTuple):
    """The numbers of a host's feeds, ascending.

    Attributes:
        run: The feeds that the host runs, because it holds their rows.
        saved: The feeds of `run` whose states the host writes into a checkpoint.
    """

    run: Sequence[int] = ()
    saved: Sequence[int] = ()


class FeedFile(NamedTuple):
    """A file with the states of the feeds from `first` to `last`, both included.

    Attributes:
        first: Number of the first feed in the file.
        last: Number of the last feed in the file.
        num_feeds: Number of feeds in the whole checkpoint.
    """

    first: int
    last: int
    num_feeds: int

    @classmethod
    def named(cls, name: str) -> FeedFile | None:
        """Returns the file with a given name; None if it is not the name of a file of feeds."""
        match = _NAME.fullmatch(name)
        file = cls(*map(int, match.groups())) if match else None
        if file is None or not file.first <= file.last < file.num_feeds:
            return None
        return file if file.name == name else None

    @property
    def name(self) -> str:
        """Name of the file in the folder."""
        return f"feeds-{self.first:05d}-{self.last:05d}-of-{self.num_feeds:05d}.json"


def write_feeds(directory: epath.Path, state: dict[str, Any], saved: Sequence[int]) -> None:
    """Writes the states of some feeds into files.

    Args:
        directory: The folder of the checkpoint.
        state: The state of the iterator, with all feeds of the host.
        saved: The numbers of the feeds to write, ascending.
    """
    for feeds in _runs(saved):
        file = FeedFile(feeds[0], feeds[-1], state[NUM_FEEDS])
        entries = {str(feed): state[FEED_ENTRIES][str(feed)] for feed in feeds}
        write_object(directory / file.name, {**state, FEED_ENTRIES: entries})


def read_feeds(
    directory: epath.Path, files: Sequence[FeedFile], run: Iterable[int]
) -> dict[str, Any]:
    """Reads the files with the feeds of a host, and joins them into one state.

    Args:
        directory: The folder of the files.
        files: All files of the checkpoint.
        run: The feeds that the host runs. If no file has any of them, another pipeline saved the
            checkpoint. One file is then read, so that an error can name the difference.

    Returns:
        The state. It may have more feeds than the host runs.

    Raises:
        StateError: A feed is in no file or in two files; or the files that were read are damaged,
            or differ in their step or pipeline.
    """
    files = _complete(directory, files)
    last_feeds = [file.last for file in files]
    # The file of each feed: the first file that ends with this feed or a later one. A checkpoint
    # of another pipeline may have fewer feeds.
    wanted = [
        files[bisect.bisect_left(last_feeds, feed)] for feed in run if feed < files[0].num_feeds
    ]
    first, *others = dict.fromkeys(wanted or files[:1])  # each file once
    joined = _of_file(directory, first)
    for file in others:
        state = _of_file(directory, file)
        for key in {**joined, **state}:
            if key != FEED_ENTRIES and joined.get(key) != state.get(key):
                raise _not_of_one_checkpoint(
                    directory,
                    f"{key} is {shortened(joined.get(key))} in {first.name}"
                    f" and {shortened(state.get(key))} in {file.name}",
                )
        joined[FEED_ENTRIES].update(state[FEED_ENTRIES])
    return joined


def _complete(directory: epath.Path, files: Iterable[FeedFile]) -> list[FeedFile]:
    """Returns the files in the order of their feeds; an error if they are not one checkpoint.

    Only the names of the files are used. So every host gets the same result, or the same error.

    Raises:
        StateError: A feed is in no file or in two files, or files differ in the number of feeds.
    """
    files = sorted(files)
    missing = []  # the feeds between two files; some ranges are empty
    end = 0  # the feed after the files so far
    num_feeds = files[0].num_feeds
    for number, file in enumerate(files):
        if file.num_feeds != num_feeds:
            differ = f"{files[0].name} and {file.name} differ in the number of feeds"
            raise _not_of_one_checkpoint(directory, differ)
        if file.first < end:
            twice = f"{files[number - 1].name} and {file.name} both hold feed {file.first}"
            raise _not_of_one_checkpoint(directory, twice)
        missing.append(range(end, file.first))
        end = file.last + 1
    missing = [feeds for feeds in (*missing, range(end, num_feeds)) if feeds.start < feeds.stop]
    if missing:
        count = sum(feeds.stop - feeds.start for feeds in missing)
        raise StateError(
            f"{directory} lacks {count} of {num_feeds} feeds:"
            f" {listed([_described(feeds) for feeds in missing])}.\n"
            f"  found:  {listed([file.name for file in files])}\n"
            "  remedy: restore another step. Call the save on every host: each host writes only"
            " its own feeds."
        )
    return files


def _of_file(directory: epath.Path, file: FeedFile) -> dict[str, Any]:
    path = directory / file.name
    state = read_object(path)
    entries, feeds = state.get(FEED_ENTRIES), range(file.first, file.last + 1)
    # A name may promise more feeds than fit into memory, so the numbers are compared first.
    count = len(entries) if isinstance(entries, dict) else 0
    if count != feeds.stop - feeds.start or set(entries or ()) != set(map(str, feeds)):
        raise damaged(
            path,
            f"its name says feeds {_described(feeds)}, but it holds a different set of feeds",
        )
    return state


def _not_of_one_checkpoint(directory: epath.Path, why: str) -> StateError:
    return StateError(
        f"the files in {directory} come from different checkpoints: {why}.\n"
        "  remedy: restore another step. Save each step into a folder of its own."
    )


def _runs(feeds: Iterable[int]) -> list[list[int]]:
    """Divides ascending numbers into lists of consecutive numbers.

    Example:
        >>> _runs([0, 1, 2, 5, 6])
        [[0, 1, 2], [5, 6]]
    """
    # Among consecutive numbers, the difference between number and position stays the same.
    grouped = itertools.groupby(enumerate(feeds), lambda item: item[1] - item[0])
    return [[feed for _, feed in run] for _, run in grouped]


def _described(feeds: range) -> str:
    first, last = feeds.start, feeds.stop - 1
    return f"{first} to {last}" if first < last else str(first)
