"""Compares the speed of grain_shard with other loaders, on eight virtual devices of this CPU.

    python -m benchmarks                     # everything, more than half an hour
    python -m benchmarks --quick             # everything, about nine minutes
    python -m benchmarks P7 P8 overlap       # some measurements, by number or by name

The command prints tables and writes results.json. It writes results.png if P1, P2 or P3 was
measured. If a loader is not installed (the ``bench`` extra has all) or raises, its row has the
error. The exit code is 1 if grain_shard itself fails.
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
    add("names", nargs="*", help="names of groups or numbers of goals (default: all)")
    add("--quick", action="store_true", help="run fewer rounds with less work")
    add("--out", type=Path, default=Path("benchmark_results"), help="folder for JSON and picture")
    add("--write", action="store_true", help=f"also write {HERE.name}/RESULTS.md and its picture")
    again = f"write {HERE.name}/RESULTS.md from a saved results.json, and measure nothing"
    add("--again", type=Path, metavar="FILE", help=again)
    args = parser.parse_args(argv)

    # Must be set before JAX starts. The CPU is used, because the benchmarks compare the work of a
    # host.
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    # Imported here, because worker processes import this module, too, and need none of the others.
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
    try:  # before the measurements, which take long
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
            # After each group, so that a run that is stopped keeps the groups before.
            saved.write_json(measured, conditions, args.out / "results.json")
    report.print_tables(measured)
    print(f"written: {args.out / 'results.json'}")
    if chart.write_chart(measured, args.out / "results.png"):
        print(f"written: {args.out / 'results.png'}")
    if args.write:
        write(measured, conditions)
    failed = [measure.has_failed(group, one) for group, results in measured for one in results]
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
