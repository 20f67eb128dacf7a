"""The time that reads of some files take. A program, since a mount may hang."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grain_shard.sources.array_record_source import ArrayRecordSource

_SIDE_BY_SIDE = 1, 4, 16, 64
_EACH_S = 1.0  # for each number side by side


def reads(paths: list[str]) -> dict[str, Any]:
    """Returns the milliseconds of opening files and of reading single records anywhere in them.

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

    def read_for_a_second(_: int) -> list[tuple[float, int]]:
        start, read = time.perf_counter(), []
        while not read or time.perf_counter() < start + _EACH_S:
            before = time.perf_counter()
            record = source[anywhere.randrange(num_records)]
            read.append((time.perf_counter() - before, len(record)))
        return read

    rates, alone = {}, []
    for number in _SIDE_BY_SIDE:
        before = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            found = [one for read in pool.map(read_for_a_second, range(number)) for one in read]
        rates[str(number)] = round(len(found) / (time.perf_counter() - before), 1)
        alone = alone or found
    seconds, sizes = zip(*alone, strict=True)
    times_s = {
        "open_ms": opened - began,
        "first_read_ms": seconds[0],
        "median_read_ms": statistics.median(seconds),
        "slowest_read_ms": max(seconds),
    }
    return {
        "files": len(source.paths),
        "records": num_records,
        "record_bytes": round(statistics.median(sizes)),
        **{name: round(1000 * taken, 3) for name, taken in times_s.items()},
        "records_per_s_side_by_side": rates,
        # The fewest threads within a tenth of the best rate: smaller differences are noise.
        "side_by_side_that_help": next(
            n for n, rate in rates.items() if rate >= 0.9 * max(rates.values())
        ),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(reads(sys.argv[1:])))
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))
