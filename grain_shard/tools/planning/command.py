"""``python -m grain_shard plan``: a plan from the command line, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path
from typing import get_args

import jax
from jax.sharding import PartitionSpec

from grain_shard.errors import ShardingError
from grain_shard.reading.padding import Remainder
from grain_shard.tools.arguments import UsageError, positive_integer
from grain_shard.tools.planning.compile_step import compile_step, load_step, memory_table
from grain_shard.tools.planning.plan import plan
from grain_shard.tools.planning.topology import hosts_mesh, topology_mesh
from grain_shard.tools.showing.tables import to_screen
from grain_shard.training.hardware import HardwareType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan`` to its parser."""
    parser.description = (
        "Show what every host of a job would read, without the job: rows and bytes per step, steps"
        " per epoch, padding, hosts that hold the same rows, and warnings."
    )
    add = parser.add_argument
    number = partial(add, type=positive_integer, metavar="N")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--topology", metavar="KIND:SHAPE", help="TPU slice, such as v5e:16x16")
    hosts = "number of hosts, in place of --topology"
    either.add_argument("--hosts", type=positive_integer, metavar="N", help=hosts)
    number("--slices", default=1, help="number of slices of the topology; default: 1")
    number("--devices-per-host", help="devices of each host, with --hosts")
    mesh = "mesh axes and their sizes, such as data=32,model=8"
    add("--mesh", type=_axes, required=True, metavar="AXES", help=mesh)
    spec = (
        "mesh axis for each dim of the batch, such as data or data,seq; data+fsdp shards one dim"
        ' over two axes, and a dash leaves a dim whole. Default: "data", or the only axis'
    )
    add("--spec", type=_spec, metavar="SPEC", help=spec)
    number("--batch", dest="global_batch_size", required=True, help="rows of a global batch")
    number("--records", dest="num_records", required=True, help="records of an epoch")
    number("--record-bytes", help="bytes of one record in the batch; default: unknown")
    remainder = "treatment of a short last batch; default: pad"
    add("--remainder", choices=get_args(Remainder), default="pad", help=remainder)
    chips = ", ".join(HardwareType)
    hardware = f"chip, to be warned if it wants more rows than a device holds: {chips}"
    add("--hardware", type=HardwareType, metavar="CHIP", help=hardware)
    compiled = (
        "compile a training step for the slice. NAME(mesh) returns the step, its state and one"
        " record, the last two as jax.ShapeDtypeStruct. The step is traced under"
        " jax.set_mesh(mesh). For Auto axes, make the state on"
        " jax.sharding.Mesh(mesh.devices, mesh.axis_names)"
    )
    add("--compile", type=_script_and_name, metavar="SCRIPT.PY:NAME", help=compiled)
    add("--json", action="store_true", help="print JSON, with every host")


def main(args: argparse.Namespace) -> int:
    """Makes the plan, prints it, and returns the exit code 0.

    Raises:
        UsageError: The options do not fit together, or the script of ``--compile`` does not define
            the function.
        GrainShardError: An optional package is missing, or the step of ``--compile`` does not take
            batches in the shardings of `shard_to`.
    """
    if (args.hosts is None) != (args.devices_per_host is None):
        raise UsageError(
            "--hosts and --devices-per-host belong together.\n"
            "  remedy: give both, or --topology alone."
        )
    for option, is_given in (("--slices", args.slices > 1), ("--compile", args.compile)):
        if is_given and args.topology is None:
            raise UsageError(
                f"{option} needs a TPU topology.\n  remedy: give --topology in place of --hosts."
            )
    parameters = inspect.signature(plan).parameters
    # The options that have the name of a parameter of `plan` are its arguments.
    options = {name: value for name, value in vars(args).items() if name in parameters}
    try:
        if args.topology is None:
            mesh = hosts_mesh(args.mesh, hosts=args.hosts, devices_per_host=args.devices_per_host)
        else:
            mesh = topology_mesh(args.topology, args.mesh, slices=args.slices)
        planned = plan(mesh, **options)
    except ShardingError as error:  # the options are wrong, because a plan depends on nothing else
        raise UsageError(str(error)) from None
    memory = None
    if args.compile is not None:
        # The user's script runs on this machine, where JAX must not look for a TPU.
        jax.config.update("jax_platforms", "cpu")
        step = load_step(*args.compile)
        memory = compile_step(step, mesh, args.spec, planned.reads.padded_batch_size)
    if args.json:
        more = {} if memory is None else {"compiled": dataclasses.asdict(memory)}
        print(json.dumps(planned.to_dict() | more))
    else:
        to_screen(planned)
        if memory is not None:
            to_screen(memory_table(memory))
    return 0


def _script_and_name(text: str) -> tuple[str, str]:
    """Returns the script and the name in a text such as ``train.py:build``."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form train.py:build")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path!r}")
    return path, name


def _axes(text: str) -> dict[str, int]:
    """Returns ``data=32,model=8`` as the dict ``{"data": 32, "model": 8}``."""
    axes = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        if not name or not size.isdecimal() or name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} does not have the form data=32,model=8")
        axes[name] = int(size)
    return axes


def _spec(text: str) -> PartitionSpec:
    """Returns ``data+fsdp,-,seq`` as ``P(("data", "fsdp"), None, "seq")``."""
    entries = []
    for word in text.split(","):
        names = word.split("+")
        if not all(names):
            raise argparse.ArgumentTypeError(
                f"{text!r} has an empty axis name. Put a comma between dims, and a plus between two"
                " axes of one dim: 'data', 'data,seq' or 'data+fsdp,seq'"
            )
        entries.append(None if word == "-" else tuple(names))
    return PartitionSpec(*entries)
