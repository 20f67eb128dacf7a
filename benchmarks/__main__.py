"""How fast grain_shard is beside its peers, on this machine's CPU made eight devices.

    python -m benchmarks                     # everything, more than half an hour
    python -m benchmarks --quick             # everything, about nine minutes
    python -m benchmarks P7 P8 overlap       # some, by number or by name

Prints a table and writes results.json, and results.png if P1 to P3 are among them. Peers that are
not installed (the ``bench`` extra has them) are skipped with a word.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

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
    args = parser.parse_args(argv)

    # Before JAX starts. Not the accelerator: these are comparisons of what a host does.
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    # Here, since worker processes import this module too.
    from benchmarks import chart, groups, measure, report

    if unknown := [name for name in args.names if name not in groups.names()]:
        parser.error(f"nothing is called {unknown}; names are {', '.join(groups.names())}")
    if args.write and args.names:
        parser.error("--write is for all of them: name none")
    try:  # now, and not when all has been measured
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").open("a").close()
    except OSError as error:
        parser.error(f"cannot write to --out: {error}")
    chosen = groups.named(args.names)
    conditions, results = report.conditions(args.quick), []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        for number, group in enumerate(chosen, start=1):
            print(f"[{number}/{len(chosen)}] {group.name}", file=sys.stderr, flush=True)
            results += measure.results(group, measure.Run(args.quick, Path(folder)))
    report.print_table(results)
    report.write_json(results, conditions, args.out / "results.json")
    print(f"written: {args.out / 'results.json'}")
    if chart.write_chart(results, args.out / "results.png"):
        print(f"written: {args.out / 'results.png'}")
    if args.write:
        report.write_page(results, conditions, HERE / "RESULTS.md")
        chart.write_chart(results, HERE / "results.png")
        print(f"written: {HERE / 'RESULTS.md'}")
    return 1 if any((result.skipped or "").startswith("failed") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
