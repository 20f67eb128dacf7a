"""``python -m grain_shard rehearse``: its options, its signals and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import types
from functools import partial
from pathlib import Path

from grain_shard.tools.arguments import UsageError, positive_integer, positive_seconds
from grain_shard.tools.rehearse.rehearsal import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``rehearse`` to its parser."""
    parser.description = (
        "Rehearse a multi-host JAX script on this machine, with a process for each host. The script"
        " calls jax.distributed.initialize() without arguments, and collectives cross the"
        " processes."
    )
    add = parser.add_argument
    number = partial(add, type=positive_integer, metavar="N")
    number("--hosts", required=True, help="number of hosts")
    number("--devices-per-host", default=1, help="CPU devices of each host (default: 1)")
    timeout = "seconds after which all hosts are ended (default: 600)"
    add("--timeout", type=positive_seconds, metavar="SECONDS", default=600.0, help=timeout)
    add("-m", dest="module", action="store_true", help="run SCRIPT as a module, like python -m")
    add("script", help="the training script")
    add("args", nargs=argparse.REMAINDER, help="the arguments of the script")


def main(args: argparse.Namespace) -> int:
    """Rehearses a script from the command line, and returns the exit code.

    It is the code of the first host to fail (128 + n if signal n killed that host), 124 after a
    timeout, 1 if no host joined the others, 128 + n if signal n ended the rehearsal, and else 0.

    Raises:
        UsageError: There is no such script.
    """
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"there is no script {args.script!r}.")

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise _Stopped(number)

    with contextlib.ExitStack() as cleanup:
        # A closing terminal sends SIGHUP to this process, but not to the hosts, which run in
        # sessions of their own.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup(1), SIGHUP stays ignored
                # The inner call sets `stop`, and returns the handler to set again at the end.
                cleanup.callback(signal.signal, number, signal.signal(number, stop))
        try:
            result = run_script(
                [*(["-m"] if args.module else []), args.script, *args.args],
                hosts=args.hosts,
                devices_per_host=args.devices_per_host,
                timeout_s=args.timeout,
                echo=sys.stdout,
            )
        except _Stopped as stopped:
            (number,) = stopped.args
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            print(f"rehearse: stopped by {name}; no host runs any more", file=sys.stderr)
            return 128 + number
    if result.exit_code != 0:
        print("rehearse:", "\n".join(result.verdict()), file=sys.stderr)
    return result.exit_code


class _Stopped(BaseException):
    """Raised by a signal that ends the rehearsal. Its argument is the number of the signal."""
