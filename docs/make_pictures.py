"""Draws the pictures of docs/contract.md, from what the library itself says.

    python docs/make_pictures.py [FOLDER]

Eight virtual CPU devices stand for four hosts with two each; no second process is started.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "32")  # threads enough for eight devices on few cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain
import jax
import matplotlib
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from grain_shard import DevicePut, ShardingTree, hosts_mesh
from grain_shard.tools.palette import EMPTY, FILLS, PADDING

HOST_COLORS = FILLS[:4]
DEVICES_PER_HOST = 2


def save(figure, folder, name):
    # No date and no version in the file, so that it changes only if the picture does.
    figure.savefig(folder / name, dpi=110, facecolor="white", metadata={"Software": None})


def cell(axes, x, y, color, text=""):
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=1.5))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8)


def grid(axes, width, height, title=""):
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def devices_of_hosts(devices_per_host=DEVICES_PER_HOST):
    """Stand-ins for eight devices, so many of them on each host."""
    hosts = 8 // devices_per_host
    return hosts_mesh({"data": 8}, hosts=hosts, devices_per_host=devices_per_host).devices


def rows_by_host(folder, global_batch_size=16):
    """Which rows of a batch each of four hosts reads, for three meshes."""
    devices = devices_of_hosts()
    inside = ShardingTree.of(Mesh(devices.reshape(4, 2), ("data", "model")))
    across = ShardingTree.of(Mesh(devices.reshape(2, 4).T, ("data", "model")))
    panels = [
        ("data=8", ShardingTree.of(Mesh(devices, ("data",)))),
        ("data=4, model=2, both model devices on one host", inside),
        ("data=4, model=2, the model axis spans hosts", across),
    ]
    figure = Figure(figsize=(6, 6.4), layout="constrained")
    for axes, (title, shardings) in zip(figure.subplots(3, 1), panels, strict=True):
        by_host = list(shardings.layouts().values())
        title += f"\nrows read by all hosts: {by_host[0].amplification:g} x those of the batch"
        grid(axes, global_batch_size, len(by_host), title)
        for host, layout in enumerate(by_host):
            held = set(layout.rows(global_batch_size).tolist())
            for row in range(global_batch_size):
                cell(axes, row, host, HOST_COLORS[host] if row in held else EMPTY,
                     str(row) if row in held else "")  # fmt: skip
        axes.set_yticks(np.arange(len(by_host)) + 0.5, [f"host {i}" for i in range(len(by_host))])
        axes.set_xticks([])
        axes.set_xlabel("row of the global batch", fontsize=9)
    save(figure, folder, "rows_by_host.png")


def padding(folder, num_records=42):
    """Every row of an epoch and its mask, as the loop gets them."""
    mesh = jax.make_mesh((8,), ("data",))
    records = grain.MapDataset.range(num_records).map(lambda i: {"record": i})
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 4))
    for axes, global_batch_size in zip(panels, (16, 12), strict=True):
        with iter(records.batch(global_batch_size).shard_to(mesh)) as iterator:
            batches = [jax.tree.map(np.asarray, batch) for batch in iterator]
        title = f"{num_records} records in batches of {global_batch_size}, over 8 devices"
        grid(axes, len(batches[0]["record"]), len(batches), title)
        for k, batch in enumerate(batches):
            for row, (record, valid) in enumerate(zip(*batch.values(), strict=True)):
                if valid:
                    cell(axes, row, k, HOST_COLORS[0], str(record))
                else:
                    cell(axes, row, k, PADDING, "pad")
        axes.set_yticks(np.arange(len(batches)) + 0.5, [f"batch {k}" for k in range(len(batches))])
        axes.set_xticks(range(0, len(batches[0]["record"]) + 1, 2))
        axes.set_xlabel("row of the global batch (two rows a device)", fontsize=9)
    figure.legend(
        handles=[
            Patch(facecolor=HOST_COLORS[0], label="a record; valid_mask is True"),
            Patch(facecolor=PADDING, label="padding, zeros; valid_mask is False"),
        ],
        loc="outside lower center", ncols=2, frameon=False, fontsize=9,
    )  # fmt: skip
    save(figure, folder, "padding.png")


def resume(folder, num_batches=8, stop_after=4, global_batch_size=8):
    """Batches on four hosts, a saved state, and the batches that follow on two."""
    mesh = jax.make_mesh((8,), ("data",))
    ds = grain.MapDataset.range(num_batches * global_batch_size).map(lambda i: {"record": i})
    with iter(ds.batch(global_batch_size).shard_to(mesh)) as iterator:
        batches = [np.asarray(next(iterator)["record"]) for _ in range(stop_after)]
        state = iterator.get_state()
        batches += [np.asarray(batch["record"]) for batch in iterator]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    gap = 4
    grid(axes, num_batches + gap, global_batch_size)
    for k, batch in enumerate(batches):
        x = k if k < stop_after else k + gap
        per_host = DEVICES_PER_HOST if k < stop_after else 2 * DEVICES_PER_HOST
        of_hosts = Mesh(devices_of_hosts(per_host), ("data",))
        for host, layout in ShardingTree.of(of_hosts).layouts().items():
            for row in layout.rows(global_batch_size):
                cell(axes, x, row, HOST_COLORS[host], str(batch[row]))
    axes.add_patch(
        FancyArrowPatch((stop_after + 0.2, 4), (stop_after + gap - 0.2, 4),
                        arrowstyle="-|>", mutation_scale=18, color="black")
    )  # fmt: skip
    size = len(json.dumps(state))
    shown = f'{{\n  "step": {state["step"]},\n  "record": {state["record"]},\n  ...\n}}'
    middle = stop_after + gap / 2
    axes.text(middle, 3.7, "get_state()", ha="center", va="bottom", fontsize=10)
    axes.text(middle - 1.1, 4.4, shown, ha="left", va="top", fontsize=10)
    axes.text(middle, 6.9, f"{size} bytes of JSON", ha="center", va="top", fontsize=10)
    columns = [k if k < stop_after else k + gap for k in range(num_batches)]
    axes.set_xticks(np.array(columns) + 0.5, [f"batch {k}" for k in range(num_batches)], fontsize=8)
    axes.set_yticks(np.arange(global_batch_size) + 0.5, range(global_batch_size))
    axes.set_ylabel("row of the global batch")
    axes.set_title(
        "four hosts, then two: the cells are records, which do not depend on who reads them",
        loc="left", fontsize=10,
    )  # fmt: skip
    hosts = [Patch(facecolor=c, label=f"host {i}") for i, c in enumerate(HOST_COLORS)]
    figure.legend(handles=hosts, loc="outside lower center", ncols=4, frameon=False)
    save(figure, folder, "resume.png")


def buffers(folder, in_use=7):
    """Where each batch of a run is at one moment, with the default sizes."""
    on_devices, on_host = DevicePut.device_buffer_size, DevicePut.cpu_buffer_size
    in_making = 2  # of those on the host
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 22), ylim=(6.6, 0), aspect="equal")
    axes.axis("off")

    def memory(x, width, name, color):
        axes.add_patch(Rectangle((x, 0.9), width, 3.5, facecolor=color, alpha=0.25, lw=0))
        axes.text(x + width / 2, 0.55, name, ha="center", va="center", fontsize=10)

    def batch(x, number, color, text="", filled=1.0):
        """A batch as four rows, so many of which are there."""
        axes.add_patch(Rectangle((x, 1.5), 1.3, 1.6, facecolor="white", edgecolor="black"))
        for row in range(round(4 * filled)):
            of_batch = Rectangle((x, 1.5 + row * 0.4), 1.3, 0.4, facecolor=color, edgecolor="white")
            axes.add_patch(of_batch)
        axes.add_patch(Rectangle((x, 1.5), 1.3, 1.6, fill=False, edgecolor="black"))
        axes.text(x + 0.65, 2.3, str(number), ha="center", va="center", fontsize=11)
        axes.text(x + 0.65, 3.3, text, ha="center", va="top", fontsize=8)

    def thread(start, end, text):
        """Who carries a batch from one place to the next."""
        ends = (start, 4.75), (end, 4.75)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color="black"))
        axes.text((start + end) / 2, 5.0, text, ha="center", va="top", fontsize=9)

    memory(3.4, 8.6, f"memory of the host: at most {on_host} (cpu_buffer_size)", FILLS[0])
    memory(
        12.6,
        8.6,
        f"memory of the devices: at most {on_devices} wait (device_buffer_size)",
        FILLS[1],
    )
    axes.add_patch(Rectangle((0.3, 1.5), 2.3, 1.6, facecolor=EMPTY, edgecolor="black"))
    axes.text(1.45, 2.3, "records", ha="center", va="center", fontsize=10)
    number = in_use + on_devices + on_host
    for place in range(on_host):
        making = place < in_making
        filled = (0.25, 0.75)[place] if making else 1.0
        state = "being read" if making else "waits"
        batch(4.0 + 2 * place, number - place, FILLS[0], state, filled)
    for place in range(on_devices):
        batch(13.6 + 2 * place, in_use + on_devices - place, FILLS[1], "waits")
    batch(18.9, in_use, FILLS[1], "the step uses it")
    thread(1.5, 6.0, "threads that read side by side,\nas many as help")
    thread(10.6, 14.2, "one thread that hands\nfull batches to the devices")
    thread(16.2, 19.5, "the training loop\ntakes the next one")
    save(figure, folder, "buffers.png")


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    jax.config.update("jax_num_cpu_devices", 8)
    for draw in (rows_by_host, padding, resume, buffers):
        draw(folder)


if __name__ == "__main__":
    main()
