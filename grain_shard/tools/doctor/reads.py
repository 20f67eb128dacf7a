"""The time that reads of some files take. A program, since a mount may hang."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grain_shard.reading.sources import ArrayRecordSource

_SINGLE_READS = 200
_SIDE_BY_SIDE = 1, 4, 16, 64
_EACH_S = 1.0  # for the single reads, and for each number side by side


def reads(paths: list[str]) -> dict[str, Any]:
    """Milliseconds of opening the files and of reading single records anywhere in them.

    Args:
        paths: As for `ArrayRecordSource`.
    """
    began = time.perf_counter()
    source = ArrayRecordSource(paths)
    num_records = len(source)
    opened = time.perf_counter()
    if not num_records:
        raise ValueError("the files hold no record")
    anywhere = random.Random(0)  # the same records each time, wherever this runs

    def read() -> tuple[float, int]:
        start = time.perf_counter()
        record = source[anywhere.randrange(num_records)]
        return time.perf_counter() - start, len(record)

    singles = _for_a_second(read, _SINGLE_READS)
    seconds = [taken for taken, _ in singles]
    per_second = {number: _rate(read, number) for number in _SIDE_BY_SIDE}
    return {
        "files": len(source.paths),
        "records": num_records,
        "record_bytes": round(statistics.median(size for _, size in singles)),
        "open_ms": _ms(opened - began),
        "first_read_ms": _ms(seconds[0]),
        "median_read_ms": _ms(statistics.median(seconds)),
        "slowest_read_ms": _ms(max(seconds)),
        "reads": len(singles),
        "records_per_s_side_by_side": per_second,
        # The fewest that come close to the best; the rest is noise, and more threads.
        "side_by_side_that_help": next(
            n for n, rate in per_second.items() if rate >= 0.9 * max(per_second.values())
        ),
    }


def _for_a_second(read: Callable[[], Any], at_most: int = sys.maxsize) -> list[Any]:
    """The answers to at least one read."""
    deadline = time.perf_counter() + _EACH_S
    answers = [read()]
    while len(answers) < at_most and time.perf_counter() < deadline:
        answers.append(read())
    return answers


def _rate(read: Callable[[], Any], number: int) -> float:
    """Records a second, with this many reads side by side."""
    began = time.perf_counter()
    with ThreadPoolExecutor(number) as pool:
        answers = pool.map(_for_a_second, [read] * number)
        count = sum(map(len, answers))
    return round(count / (time.perf_counter() - began), 1)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def main(paths: list[str]) -> None:
    """Prints the answer as JSON, or ends with the reason in one line."""
    try:
        print(json.dumps(reads(paths)))
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main(sys.argv[1:])
