"""``python -m grain_shard``: a small table of subcommands, each in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from grain_shard.errors import GrainShardError


class _Subcommand(NamedTuple):
    """A module that offers ``add_arguments(parser)`` and ``main(args) -> int``."""

    module: str
    summary: str
    example: str


_SUBCOMMANDS = {
    "demo": _Subcommand(
        "grain_shard.demo.command",
        "train a classifier on real images, from files to a checked result",
        "python -m grain_shard demo --hosts 2",
    ),
    "plan": _Subcommand(
        "grain_shard.planning.command",
        "say what every host of a pod would read, without the pod",
        "python -m grain_shard plan --topology v5e:16x16 --mesh data=32,model=8 --batch 4096"
        " --records 1281167",
    ),
    "rehearse": _Subcommand(
        "grain_shard.rehearse",
        "run a multi-host script on this machine, as one process for each host",
        "python -m grain_shard rehearse --hosts 4 train.py",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: The words after the program's name; None takes those of this process.

    Returns:
        The subcommand's exit code, or 1 after an error of this package.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(called=argv[0] if argv else None).parse_args(argv)
    try:
        return args.main(args)
    except GrainShardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser(called: str | None) -> argparse.ArgumentParser:
    """The parser of all subcommands, with the arguments of the one that is called.

    The modules of the others are not imported, since that takes seconds.
    """
    parser = argparse.ArgumentParser(
        prog="python -m grain_shard",
        description="What comes with grain_shard, the end of a Grain pipeline: .shard_to(mesh).",
        epilog="\n  ".join(["examples:", *(each.example for each in _SUBCOMMANDS.values())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(metavar="subcommand", required=True)
    for name, subcommand in _SUBCOMMANDS.items():
        choice = choices.add_parser(
            name, help=subcommand.summary, epilog=f"example: {subcommand.example}"
        )
        if name == called:
            module = import_module(subcommand.module)
            module.add_arguments(choice)
            choice.set_defaults(main=module.main)
    return parser


if __name__ == "__main__":
    sys.exit(main())
