"""The files of a checkpoint that hold feeds, each of which is named by the feeds in it.

Hosts that hold the same shards run the same feeds, so each feed is saved by one host only: the
first host that runs it. It writes a file for each run of consecutive feeds, and no two hosts
write one file. A host that restores lists the folder, and reads only the files that
hold its own feeds, whatever the number of hosts before and now::

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

# A state of feeds has two keys: one for the entries of the feeds, one for the number of feeds.
FEED_ENTRIES, NUM_FEEDS = "feeds", "num_feeds"

_NAME = re.compile(r"feeds-(\d+)-(\d+)-of-(\d+)\.json")
_MOST_NAMES = 8  # in a message


class OwnFeeds(NamedTuple):
    """The feeds of a host, ascending.

    Attributes:
        run: The feeds whose rows the host holds, and whose entries it needs.
        saved: The feeds among them whose entries it writes.
    """

    run: Sequence[int] = ()
    saved: Sequence[int] = ()


class FeedFile(NamedTuple):
    """A file with the feeds from `first` to `last`, of `num_feeds` feeds in all."""

    first: int
    last: int
    num_feeds: int

    @classmethod
    def named(cls, name: str) -> FeedFile | None:
        """Returns the file of this name; None if feeds have no file of such a name."""
        match = _NAME.fullmatch(name)
        file = cls(*map(int, match.groups())) if match else None
        return file if file is not None and file.first <= file.last < file.num_feeds else None

    @property
    def name(self) -> str:
        """The file's name in the folder."""
        return f"feeds-{self.first:05d}-{self.last:05d}-of-{self.num_feeds:05d}.json"

    @property
    def feeds(self) -> range:
        """The feeds in the file."""
        return range(self.first, self.last + 1)


def write_feeds(directory: epath.Path, state: dict[str, Any], saved: Sequence[int]) -> None:
    """Writes some feeds of a state."""
    for feeds in _runs(saved):
        file = FeedFile(feeds[0], feeds[-1], state[NUM_FEEDS])
        entries = {str(feed): state[FEED_ENTRIES][str(feed)] for feed in feeds}
        (directory / file.name).write_text(json.dumps({**state, FEED_ENTRIES: entries}))


def read_feeds(
    directory: epath.Path, files: Sequence[FeedFile], run: Iterable[int]
) -> dict[str, Any]:
    """Reads the files that hold a host's feeds, and joins them to one state.

    Args:
        directory: The folder of the files.
        files: All files of the checkpoint.
        run: The host's feeds. If no file holds any of them, the checkpoint belongs to another
            pipeline, and one file is read to report that.

    Raises:
        StateError: A feed is in no file, or in two; or the files that were read are of different
            steps or pipelines, or damaged.
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
    """Returns the file of each feed, by the names alone, so that every host finds the same."""
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
            path, f"it does not hold exactly feeds {_described(file.feeds)}, as in its name"
        )
    return state


def _not_of_one_checkpoint(directory: epath.Path, why: str) -> StateError:
    return StateError(
        f"the files in {directory} are not of one checkpoint: {why}.\n"
        "  remedy: restore another step. Save each step into a folder of its own."
    )


def _runs(feeds: Iterable[int]) -> list[list[int]]:
    """Cuts ascending feeds into runs without a gap.

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
        StateError: The file holds something else, or cannot be read.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # of JSON, or of the encoding
        raise damaged(path, str(error)) from error
    except OSError as error:
        remedy = "check that this host can read the file."
        raise StateError(f"{path} cannot be read: {error}\n  remedy: {remedy}") from error
    if not isinstance(found, dict):
        raise damaged(path, f"it holds a {type(found).__name__} in place of a JSON object")
    return found


def damaged(path: epath.Path, how: str) -> StateError:
    """Returns the error for a file that holds something else than it should."""
    return StateError(f"{path} is damaged: {how}.\n  remedy: restore another step.")
