"""How fast grain_shard is beside its peers, on this machine's CPU made eight devices.

    python -m benchmarks                     # everything, more than half an hour
    python -m benchmarks --quick             # everything, about nine minutes
    python -m benchmarks P7 P8 overlap       # some, by number or by name

Prints tables and writes results.json, and results.png if P1 to P3 are among them. A peer that is
not installed (the ``bench`` extra has them), or that raises, has a row that names its error. The
exit code is 1 if a side of grain_shard fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", help="what to measure: names of groups or numbers (default: all)")
    add("--quick", action="store_true", help="fewer rounds, less work")
    add("--out", type=Path, default=Path("benchmark_results"), help="folder for JSON and picture")
    add("--write", action="store_true", help=f"also write {HERE.name}/RESULTS.md and its picture")
    add("--again", type=Path, metavar="FILE", help="measure nothing: write that page from FILE")
    args = parser.parse_args(argv)

    # Before JAX starts. Not the accelerator: these are comparisons of what a host does.
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    # Here, since worker processes import this module too.
    from benchmarks import chart, groups, measure, page, report, saved

    def write(measured: saved.Measured, conditions: dict[str, Any]) -> None:
        page.write_page(measured, conditions, HERE / "RESULTS.md")
        chart.write_chart(measured, HERE / "results.png")
        print(f"written: {HERE / 'RESULTS.md'}")

    if unknown := [name for name in args.names if name not in groups.names()]:
        parser.error(f"nothing is called {unknown}; names are {', '.join(groups.names())}")
    for option in ("write", "again"):
        if getattr(args, option) and args.names:
            parser.error(f"--{option} is for all of them: name none")
    if args.again:
        try:
            conditions, measured = saved.read_json(args.again, groups.GROUPS)
        except (OSError, ValueError) as error:
            parser.error(f"--again: {error}")
        write(measured, conditions)
        return 0
    try:  # now, and not when all has been measured
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").open("a").close()
    except OSError as error:
        parser.error(f"cannot write to --out: {error}")
    chosen = groups.named(args.names)
    conditions, measured = report.conditions(args.quick), []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        for number, group in enumerate(chosen, start=1):
            print(f"[{number}/{len(chosen)}] {group.name}", file=sys.stderr, flush=True)
            run = measure.Run(args.quick, Path(folder))
            measured.append((group, measure.results(group, run)))
    report.print_tables(measured)
    saved.write_json(measured, conditions, args.out / "results.json")
    print(f"written: {args.out / 'results.json'}")
    if chart.write_chart(measured, args.out / "results.png"):
        print(f"written: {args.out / 'results.png'}")
    if args.write:
        write(measured, conditions)
    failed = [measure.has_failed(group, one) for group, results in measured for one in results]
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
