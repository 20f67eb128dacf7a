"""``python -m grain_shard rehearse``: its options, its end by a signal, its exit code."""

from __future__ import annotations

import argparse
import signal
import sys
import types
from functools import partial
from pathlib import Path

from grain_shard.tools.arguments import UsageError, positive_integer, positive_seconds
from grain_shard.tools.rehearse.rehearsal import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line that `main` takes."""
    parser.description = (
        "Rehearse a multi-host JAX script on this machine, one process a host: in it "
        "jax.distributed.initialize() needs no arguments, and collectives cross the processes."
    )
    add = parser.add_argument
    number = partial(add, type=positive_integer, metavar="N")
    number("--hosts", required=True, help="number of hosts")
    number("--devices-per-host", default=1, help="CPU devices of each host (default: 1)")
    timeout = "seconds after which all hosts are ended (default: 600)"
    add("--timeout", type=positive_seconds, metavar="SECONDS", default=600.0, help=timeout)
    add("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    add("script", help="the training script")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")


def main(args: argparse.Namespace) -> int:
    """Rehearses a script from the command line, and returns the exit code.

    The code is 0; or the code of the first host to fail (128 + n if signal n killed it); 124 at a
    timeout; 1 if no host joined the others; or 128 + n if signal n ended the rehearsal.

    Raises:
        UsageError: There is no such script.
    """
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"there is no script {args.script!r}.")

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise _Stopped(number)

    previous = {
        number: signal.signal(number, stop)
        # With SIGHUP: a closing terminal sends it to this process, but not to the hosts, which run
        # in sessions of their own.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup(1) asks for that
    }
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
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if result.exit_code != 0:
        print("rehearse:", "\n".join(result.verdict()), file=sys.stderr)
    return result.exit_code


class _Stopped(BaseException):
    """A signal that ends the rehearsal; its argument is the number of the signal."""
