"""Random pipelines, kills and faults against plain Grain, for as long as one likes.

    python -m benchmarks.soak --minutes 60            # another seed each time, which it prints
    python -m benchmarks.soak --minutes 60 --seed 7
    python -m benchmarks.soak --seed 7 --case 123     # that case alone, again

Kinds of cases: pipelines of random access, and feeds, in one process; faults, that is sources that
are slow, fail or hold what cannot be decoded; kill chains over real processes; and hosts that fail
or are killed while others train. A case that fails is written to a file, with all that there is to
say of it, and the soak goes on. The exit code is 1 if one failed.
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
    add("--minutes", type=float, default=10.0, help="begin no case after these (default: 10)")
    add("--seed", type=int, help="what the cases follow from (default: drawn)")
    add("--case", type=int, help="run this one alone")
    add("--out", type=Path, default=Path("soak_failures"), help="folder for the cases that fail")
    args = parser.parse_args(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    numbers = itertools.count() if args.case is None else [args.case]
    # As Ctrl-C does it: whatever was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return soak(seed, numbers, time.monotonic() + 60 * args.minutes, args.out)


def soak(seed: int, numbers: Iterable[int], deadline: float, out: Path) -> int:
    """Runs cases until the deadline, and tells how they went; the exit code."""
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
    """Writes down a case that failed."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"seed-{seed}-case-{number}.txt"
    path.write_text(
        f"--seed {seed} --case {number}\n\n{case!r}\n\n{outcome.failure}\n\n"
        f"--- printed meanwhile\n{outcome.printed}"
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
