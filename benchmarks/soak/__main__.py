"""Tests random pipelines, kills and faults against plain Grain, for as long as you like.

    python -m benchmarks.soak --minutes 60            # with a random seed, which it prints
    python -m benchmarks.soak --minutes 60 --seed 7
    python -m benchmarks.soak --seed 7 --case 123     # runs one case again

There are five kinds of cases. Pipelines with random access, and feeds, run in one process. In
faults, a source is slow, fails, or holds records that cannot be decoded. Kill chains run over real
processes. In the last kind, one host fails or is killed while all other hosts train.

A case that fails is written to a file with its literal, the difference and its output, and the soak
goes on. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.soak.worker import Outcome, Worker


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="time to start new cases (default: 10)")
    add("--seed", type=int, help="seed of the cases (default: random)")
    add("--case", type=int, help="number of a single case to run")
    add("--out", type=Path, default=Path("soak_failures"), help="folder for the cases that fail")
    args = parser.parse_args(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    numbers = itertools.count() if args.case is None else [args.case]
    # SIGTERM ends the soak like Ctrl-C: it first ends the processes that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return soak(seed, numbers, time.monotonic() + 60 * args.minutes, args.out)


def soak(seed: int, numbers: Iterable[int], deadline: float, out: Path) -> int:
    """Runs cases until the deadline, prints their outcomes, and returns the exit code.

    Args:
        seed: The seed from which cases are drawn.
        numbers: The numbers of the cases, in order.
        deadline: Time by `time.monotonic` after which no case is started.
        out: Folder for the cases that fail.

    Returns:
        1 if a case failed, else 0.
    """
    from benchmarks.soak import cases

    kinds: collections.Counter[str] = collections.Counter()
    counted: collections.Counter[str] = collections.Counter()
    failed = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        worker = Worker(Path(folder, "printed"))
        try:
            for number in numbers:
                if time.monotonic() > deadline:
                    break
                kind, case = cases.draw(seed, number)
                outcome = worker.run(seed, number, case.limit_s)
                kinds[kind] += 1
                counted += outcome.counted
                how = "ok" if outcome.failure is None else "FAILED"
                print(f"--seed {seed} --case {number}: {kind}: {how}, {outcome.seconds:.1f} s")
                if outcome.failure is not None:
                    failed.append(number)
                    print(f"  {write(out, seed, number, case, outcome)}", flush=True)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            worker.end()
    print(f"seed {seed}: {kinds.total()} cases, {len(failed)} failed")
    for name, count in [*kinds.items(), *counted.items()]:
        print(f"  {name}: {count}")
    for number in failed:
        print(f"  failed: --seed {seed} --case {number}")
    return 1 if failed else 0


def write(out: Path, seed: int, number: int, case: object, outcome: Outcome) -> Path:
    """Writes a failed case to a file of the folder `out`, and returns the path of the file."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"seed-{seed}-case-{number}.txt"
    path.write_text(
        f"--seed {seed} --case {number}\n\n{case!r}\n\n{outcome.failure}\n\n"
        f"--- printed meanwhile\n{outcome.printed}"
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
