"""``python -m grain_shard``: a table of subcommands, each of which has a module of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from grain_shard.errors import GrainShardError
from grain_shard.tools.arguments import UsageError

# For each subcommand: its module, and a summary and an example for ``--help``. The module has the
# functions ``add_arguments(parser)`` and ``main(args) -> int``.
_SUBCOMMANDS = {
    "check": (
        "grain_shard.tools.checking.command",
        "prove that all readers of a pipeline get the same batches",
        "python -m grain_shard check train:pipeline",
    ),
    "plan": (
        "grain_shard.tools.planning.command",
        "show what every host of a pod would read, without the pod",
        "python -m grain_shard plan --topology v5e:16x16 --mesh data=32,model=8 --batch 4096"
        " --records 1281167",
    ),
    "rehearse": (
        "grain_shard.tools.rehearse.command",
        "run a multi-host script on this machine, as one process for each host",
        "python -m grain_shard rehearse --hosts 4 train.py",
    ),
}

_EXIT_CODES = """exit codes:
  0    the command succeeded
  1    the command failed
  2    the arguments are wrong, or name a missing file
  130  Ctrl-C
  141  the reader of the output stopped reading (| head)
rehearse ends with the code of the first host that failed
(128 + n if signal n ended the host), and with 124 after a
timeout."""

# A shell uses the same codes: 128 + SIGINT, 128 + SIGPIPE.
_INTERRUPTED, _UNREAD = 130, 141


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a single line, without the usage that argparse prints before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. Run it with --help to see its arguments.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: The arguments after the program's name; None takes the arguments of this process.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for wrong arguments, 130 after Ctrl-C, and
        141 if the reader of the output stopped. ``rehearse`` returns the script's exit code.

    Raises:
        SystemExit: ``--help`` is given, or the parser refuses an argument.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    called = argv[0] if argv and argv[0] in _SUBCOMMANDS else None
    name = "grain_shard" if called is None else f"grain_shard {called}"
    try:
        try:
            args = _parser(called).parse_args(argv)
            return args.main(args)
        finally:
            if sys.stdout is not None:  # None if the process was started without a stdout
                # So that a closed pipe raises its error here, where it is handled.
                sys.stdout.flush()
    except UsageError as error:
        return _fail(2, f"{name}: {_one_line(error)}")
    except (GrainShardError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _nobody_reads()
        return _fail(1, f"{name}: {_one_line(error)}")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich raises SystemExit in its place
            return _nobody_reads()
        raise
    except KeyboardInterrupt:
        return _fail(_INTERRUPTED, f"{name}: stopped by Ctrl-C")


def _fail(code: int, line: str) -> int:
    print(line, file=sys.stderr)
    return code


def _nobody_reads() -> int:
    # Python flushes stdout at exit. On a closed pipe that would print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD


def _one_line(error: BaseException) -> str:
    """Returns the lines of an error as one line.

    It reads like this: ``7 rows do not split. leaf: f32[7] mesh: data=2. remedy: use 8 rows.``
    """
    lines = (str(error).strip() or type(error).__name__).splitlines()
    sentences = [" ".join(line.split()).rstrip(".") for line in lines if line.strip()]
    return f"{'. '.join(sentences)}."


def _parser(called: str | None) -> argparse.ArgumentParser:
    """Returns the parser of all subcommands, with the arguments of the subcommand that is called.

    No other subcommand's module is imported, because each import takes seconds.
    """
    examples = "\n  ".join(["examples:", *(example for *_, example in _SUBCOMMANDS.values())])
    parser = _Parser(
        prog="python -m grain_shard",
        description="Commands of grain_shard, the end of a Grain pipeline.",
        epilog=f"{examples}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices: Any = parser.add_subparsers(metavar="subcommand", required=True)
    for name, (module, summary, example) in _SUBCOMMANDS.items():
        choice = choices.add_parser(name, help=summary, epilog=f"example: {example}")
        if name == called:
            subcommand = import_module(module)
            subcommand.add_arguments(choice)
            choice.set_defaults(main=subcommand.main)  # called by `main` of this file
    return parser


def command() -> NoReturn:
    """Runs `main` for ``python -m grain_shard`` or ``grain-shard``, and ends the process."""
    code = main()
    if code == _INTERRUPTED:
        # After a Ctrl-C, XLA's threads may still compile. An ordinary exit would destroy objects
        # that they use, which is a segmentation fault. So the process ends by `os._exit`.
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(code)
    # The output is complete. From here on a Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
