"""``python -m grain_shard plan``: a plan from the command line, as text, JSON and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh, PartitionSpec

from grain_shard.errors import GrainShardError, ShardingError
from grain_shard.tools.arguments import UsageError, positive_integer
from grain_shard.tools.planning.compile_step import compile_step, load_step, memory_lines
from grain_shard.tools.planning.picture import draw_mesh
from grain_shard.tools.planning.plan import plan
from grain_shard.tools.planning.result import Plan
from grain_shard.tools.planning.topology import hosts_mesh, topology_mesh
from grain_shard.tools.showing.fitting import FittingTable
from grain_shard.tools.showing.tables import to_screen
from grain_shard.training.hardware import HardwareType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line that `main` takes."""
    parser.description = (
        "Say what every host of a job would read, without the job: rows and bytes a step, steps an"
        " epoch, padding, hosts that hold the same rows, and what to mind."
    )
    add = parser.add_argument
    slice_ = parser.add_mutually_exclusive_group(required=True)
    slice_.add_argument("--topology", metavar="KIND:SHAPE", help="a TPU slice: v5e:16x16")
    slice_.add_argument("--hosts", type=positive_integer, metavar="N", help="or so many hosts")
    add("--slices", type=positive_integer, metavar="N", help="so many slices of it; default: 1")
    add("--devices-per-host", type=positive_integer, metavar="N", help="devices of each")
    add("--mesh", type=_axes, required=True, metavar="AXES", help="name=size,...: data=32,model=8")
    add(
        "--spec",
        type=_spec,
        metavar="SPEC",
        help="a mesh axis for each dim of the batch: data; data,seq; data+fsdp for two on one dim;"
        ' a dash for none. Default: "data", or the only axis',
    )
    add("--batch", type=positive_integer, required=True, metavar="N", help="rows of a global batch")
    add("--records", type=positive_integer, required=True, metavar="N", help="records of an epoch")
    add("--record-bytes", type=positive_integer, metavar="N", help="bytes of one in the batch")
    add("--remainder", choices=("pad", "drop", "error"), default="pad", help="default: pad")
    add("--microbatches", type=positive_integer, metavar="N", help="of each batch; default: none")
    add("--read", choices=("auto", "needed", "once"), default="auto", help="default: auto")
    add(
        "--hardware",
        choices=[chip.value for chip in HardwareType],
        metavar="CHIP",
        help="the chip, for advice on the batch size: %(choices)s; default: that of the topology",
    )
    add(
        "--compile",
        type=_script_and_name,
        metavar="SCRIPT.PY:NAME",
        help="compile a training step for the slice: a function of the mesh that returns the step,"
        " its state and one record, as jax.ShapeDtypeStruct",
    )
    add("--json", action="store_true", help="print JSON, with every host")
    add("--picture", type=_picture, metavar="FILE", help="draw who holds which rows: mesh.png")


def main(args: argparse.Namespace) -> int:
    """Makes the plan and prints it.

    Raises:
        UsageError: The options do not fit together, or name a file that is missing.
        GrainShardError: An optional package is missing, or a picture cannot be written.
    """
    if (args.hosts is None) != (args.devices_per_host is None):
        raise UsageError(
            "--hosts and --devices-per-host go together.\n  remedy: give both, or --topology alone."
        )
    if args.slices is not None and args.topology is None:
        raise UsageError(
            "--slices are of a TPU topology.\n  remedy: give --topology in place of --hosts."
        )
    if args.compile is not None and args.topology is None:
        raise UsageError(
            "there is no compiler for devices that are not known.\n"
            "  remedy: name a TPU slice, --topology."
        )
    try:
        mesh, planned = _mesh_and_plan(args)
    except ShardingError as error:  # a plan is made of the options and of nothing else
        raise UsageError(str(error)) from None
    memory = None
    if args.compile is not None:
        # The script makes its arrays on this machine, and must not look for a TPU.
        jax.config.update("jax_platforms", "cpu")
        try:
            step = load_step(args.compile)
        except GrainShardError as error:
            raise UsageError(str(error)) from None
        size = planned.reads.padded_batch_size
        memory = compile_step(step, mesh, args.spec, size, args.microbatches)
    if args.picture is not None:
        rows_of = "a batch" if args.microbatches is None else "a microbatch"
        num_rows = planned.reads.padded_batch_size // (args.microbatches or 1)
        draw_mesh(mesh, args.spec, num_rows, args.picture, rows_of=rows_of)
        print(f"drawn: {args.picture}", file=sys.stderr)
    if args.json:
        more = {} if memory is None else {"compiled": dataclasses.asdict(memory)}
        print(json.dumps(planned.to_dict() | more))
    else:
        to_screen(planned)
        if memory is not None:
            columns = ["the compiled step", "on a device"]
            to_screen(FittingTable(columns, memory_lines(memory), left=1))
    return 0


def _mesh_and_plan(args: argparse.Namespace) -> tuple[Mesh, Plan]:
    if args.topology is not None:
        mesh = topology_mesh(args.topology, args.mesh, slices=args.slices or 1)
    else:
        mesh = hosts_mesh(args.mesh, hosts=args.hosts, devices_per_host=args.devices_per_host)
    return mesh, plan(
        mesh,
        args.spec,
        global_batch_size=args.batch,
        num_records=args.records,
        record_bytes=args.record_bytes,
        remainder=args.remainder,
        microbatches=args.microbatches,
        read=args.read,
        hardware=None if args.hardware is None else HardwareType(args.hardware),
    )


def _script_and_name(text: str) -> str:
    """``train.py:build``, of a script that is there."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not like train.py:build")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path!r}")
    return text


def _picture(text: str) -> Path:
    """A file whose name says what picture it is."""
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a picture: write one ending in .png or .svg (or .pdf)"
        )
    return Path(text)


def _axes(text: str) -> dict[str, int]:
    """``data=32,model=8`` as a dict."""
    axes = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        if not name or not size.isdecimal() or name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} is not like data=32,model=8")
        axes[name] = int(size)
    return axes


def _spec(text: str) -> PartitionSpec:
    """``data+fsdp,-,seq`` as ``P(("data", "fsdp"), None, "seq")``."""
    entries = []
    for word in text.split(","):
        names = word.split("+")
        if not all(names):
            raise argparse.ArgumentTypeError(f"{text!r} is not like data, data,seq or data+fsdp")
        one = None if word == "-" else word
        entries.append(tuple(names) if len(names) > 1 else one)
    return PartitionSpec(*entries)
