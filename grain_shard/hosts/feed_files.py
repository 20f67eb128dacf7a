"""The files of a checkpoint with the states of feeds. A file's name has the numbers of its feeds.

Hosts that hold the same shards run the same feeds. So each feed is saved by one host only: the
first host that runs it. The host writes one file for each range of consecutive feeds, and no two
hosts write the same file. A host that restores lists the folder, and reads only the files with
feeds that it runs. So the number of hosts may have changed since the save. Four hosts with 16 feeds
each write these files::

    feeds-00000-00015-of-00064.json     feeds 0 to 15 of 64
    feeds-00016-00031-of-00064.json
    ...
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from etils import epath

from grain_shard.errors import StateError

# Keys of a state of feeds: the dict with the state of each feed, and the number of feeds.
FEED_ENTRIES, NUM_FEEDS = "feeds", "num_feeds"

_NAME = re.compile(r"feeds-(\d+)-(\d+)-of-(\d+)\.json")
_MOST_NAMES = 8  # most names of files that a message lists


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
        return file if file is not None and file.first <= file.last < file.num_feeds else None

    @property
    def name(self) -> str:
        """Name of the file in the folder."""
        return f"feeds-{self.first:05d}-{self.last:05d}-of-{self.num_feeds:05d}.json"

    @property
    def feeds(self) -> range:
        """Numbers of the feeds in the file."""
        return range(self.first, self.last + 1)


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
        (directory / file.name).write_text(json.dumps({**state, FEED_ENTRIES: entries}))


def read_feeds(
    directory: epath.Path, files: Sequence[FeedFile], run: Iterable[int]
) -> dict[str, Any]:
    """Reads the files with the feeds of a host, and joins them to one state.

    Args:
        directory: The folder of the files.
        files: All files of the checkpoint.
        run: The feeds that the host runs. If no file has any of them, the checkpoint belongs to
            another pipeline. One file is then read, so that an error can name the difference.

    Returns:
        The state. It may have more feeds than the host runs.

    Raises:
        StateError: A feed is in no file or in two files; or the files that were read are damaged,
            or differ in their step or pipeline.
    """
    file_of = _complete(directory, files)
    wanted = list(dict.fromkeys(file_of[feed] for feed in run if feed in file_of))
    first, *others = wanted or files[:1]
    joined = _of_file(directory, first)
    for file in others:
        state = _of_file(directory, file)
        for key in {**joined, **state}:
            if key != FEED_ENTRIES and joined.get(key) != state.get(key):
                raise _not_of_one_checkpoint(
                    directory,
                    f"{key} is {joined.get(key)!r} in {first.name}"
                    f" and {state.get(key)!r} in {file.name}",
                )
        joined[FEED_ENTRIES].update(state[FEED_ENTRIES])
    return joined


def _complete(directory: epath.Path, files: Sequence[FeedFile]) -> dict[int, FeedFile]:
    """Returns the file of each feed, by the feed's number.

    Only the names of the files are used. So every host gets the same result, or the same error.

    Raises:
        StateError: A feed is in no file or in two files, or files differ in the number of feeds.
    """
    file_of: dict[int, FeedFile] = {}
    for file in files:
        if file.num_feeds != files[0].num_feeds:
            differ = f"{files[0].name} and {file.name} differ in the number of feeds"
            raise _not_of_one_checkpoint(directory, differ)
        for feed in file.feeds:
            if feed in file_of:
                twice = f"{file_of[feed].name} and {file.name} both hold feed {feed}"
                raise _not_of_one_checkpoint(directory, twice)
            file_of[feed] = file
    num_feeds = files[0].num_feeds
    missing = [feed for feed in range(num_feeds) if feed not in file_of]
    if missing:
        names = [file.name for file in files[:_MOST_NAMES]]
        more = f" and {len(files) - _MOST_NAMES} more" if len(files) > _MOST_NAMES else ""
        raise StateError(
            f"{directory} lacks {len(missing)} of {num_feeds} feeds: {_described(missing)}.\n"
            f"  found:  {', '.join(names)}{more}\n"
            "  remedy: restore another step. Call the save on every host: each host writes only"
            " its own feeds."
        )
    return file_of


def _of_file(directory: epath.Path, file: FeedFile) -> dict[str, Any]:
    path = directory / file.name
    state = read_object(path)
    entries = state.get(FEED_ENTRIES)
    if not isinstance(entries, dict) or set(entries) != set(map(str, file.feeds)):
        raise damaged(
            path,
            f"its name says feeds {_described(file.feeds)}, but it holds a different set of feeds",
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
    numbered = itertools.groupby(enumerate(feeds), lambda item: item[1] - item[0])
    return [[feed for _, feed in of_run] for _, of_run in numbered]


def _described(feeds: Iterable[int]) -> str:
    runs = _runs(feeds)
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def read_object(path: epath.Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        StateError: The file does not hold a JSON object, or cannot be read.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # the text is not JSON, or the bytes are not text
        raise damaged(path, str(error)) from error
    except OSError as error:
        remedy = "check that this host can read the file."
        raise StateError(f"{path} cannot be read: {error}\n  remedy: {remedy}") from error
    if not isinstance(found, dict):
        raise damaged(path, f"it holds a {type(found).__name__} in place of a JSON object")
    return found


def damaged(path: epath.Path, how: str) -> StateError:
    """Returns the error for a file with wrong contents.

    Args:
        path: The file.
        how: The fault in the contents.
    """
    return StateError(f"{path} is damaged: {how}.\n  remedy: restore another step.")
