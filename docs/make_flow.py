"""Draws docs/flow.svg: how the rows of a global batch come to hosts and devices, as an animation.

    python docs/make_flow.py

Which host holds which rows, and which record is in which row, is what the library itself says. The
animation is CSS inside the picture, so that it runs wherever the picture is shown. It begins with
the end of the last batch, so that a still of it shows all there is, the padding as well; that is
what is seen where nothing moves, too.
"""

import os
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "32")  # threads enough for eight devices on few cores

import grain
import jax
import numpy as np

from grain_shard import ShardingTree, hosts_mesh
from grain_shard.tools.palette import GREEN, ORANGE, PADDING, PURPLE, SKY, VERMILION

PICTURE = Path(__file__).with_name("flow.svg")

HOST_COLORS = [SKY, ORANGE, GREEN, PURPLE]
NUM_RECORDS, GLOBAL_BATCH_SIZE, NUM_DEVICES = 42, 16, 8
HOSTS_OF_STEP = [4, 4, 2]  # the run is stopped after two steps, and goes on with fewer hosts

SECONDS_A_STEP = 4.5
MOVE = 0.16  # the part of a step that a row takes from one column to the next
SECONDS_BEFORE = 1  # of the last step's end, with which the animation begins

# Columns, in the units of the picture: where a row of the batch stands, and how large it is.
WIDTH, HEIGHT = 620, 520
TOP, PITCH, CELL = 78, 21, (54, 18)
BATCH_X, HOST_X, DEVICE_X, MASK_X = 46, 208, 360, 554


def batches():
    """The records of each step's rows, and which of the rows are valid."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    records = grain.MapDataset.range(NUM_RECORDS).seed(42).shuffle().map(lambda i: {"id": i})
    with iter(records.batch(GLOBAL_BATCH_SIZE).shard_to(mesh)) as iterator:
        for batch in iterator:
            yield np.asarray(batch["id"]).tolist(), np.asarray(batch["valid_mask"]).tolist()


def rows_by_host(hosts):
    """For each host, the rows of the batch that it reads."""
    mesh = hosts_mesh({"data": NUM_DEVICES}, hosts=hosts, devices_per_host=NUM_DEVICES // hosts)
    layouts = ShardingTree.of(mesh).layouts()
    return {host: layout.rows(GLOBAL_BATCH_SIZE).tolist() for host, layout in layouts.items()}


def y_of(row):
    """Rows of two devices stand a little apart, and those of two hosts a little more."""
    device = row // (GLOBAL_BATCH_SIZE // NUM_DEVICES)
    return TOP + row * PITCH + 6 * device + 8 * (device // 2)


def text(x, y, words, style="", extra=""):
    return f'<text x="{x}" y="{y}" class="{style}" {extra}>{words}</text>'


def while_shown(step):
    """The style of what belongs to one step, and is seen in the last one where nothing moves."""
    return f"step{step}" + ("" if step == len(HOSTS_OF_STEP) - 1 else " moving")


def frames_of(hosts, rows):
    """The frame of each host, around its rows and its devices, with its name where no row goes."""
    for host, held in rows.items():
        top, bottom = y_of(held[0]) - 7, y_of(held[-1]) + CELL[1] + 7
        color = HOST_COLORS[host]
        yield (
            f'<rect x="{HOST_X - 8}" y="{top}" width="{DEVICE_X + 130 - HOST_X}" rx="6"'
            f' height="{bottom - top}" fill="{color}" fill-opacity="0.12" stroke="{color}"/>'
        )
        yield text(DEVICE_X + 70, (top + bottom) / 2 + 4, f"host {host}", "small")


def moving_rows(step, ids, valid, rows):
    """The rows of one batch, each of which goes from the batch to its host and to its device.

    Where it was, a pale copy stays.
    """
    width, height = CELL
    for host, held in rows.items():
        for row in held:
            y = y_of(row)
            color = HOST_COLORS[host] if valid[row] else PADDING
            words = str(ids[row]) if valid[row] else "pad"
            cell = (
                f'<rect width="{width}" height="{height}" rx="3" fill="{color}"/>'
                f'<text x="{width / 2}" y="{height - 4}" class="cell">{words}</text></g>'
            )
            yield f'<g class="copy" transform="translate({BATCH_X} {y})">{cell}'
            yield f'<g class="copy of-host" transform="translate({HOST_X} {y})">{cell}'
            yield f'<g class="row" style="--y: {y}px">{cell}'
            yield text(MASK_X, y + height - 4, valid[row], "mask" if valid[row] else "no")


def styles():
    """The animation: every step has its part of the whole, and in it the rows move twice."""
    steps = len(HOSTS_OF_STEP)
    whole = steps * SECONDS_A_STEP
    repeated = f"{SECONDS_A_STEP}s {SECONDS_BEFORE - whole}s infinite"
    yield f"""
svg {{ font-family: system-ui, sans-serif; font-size: 15px; fill: #222 }}
.head {{ font-weight: 600; text-anchor: middle }}
.small {{ font-size: 13.5px }}
.code {{ font-family: ui-monospace, Menlo, Consolas, monospace }}
.cell {{ font-size: 14px; text-anchor: middle }}
.mask, .no {{ font-size: 14px; text-anchor: middle; animation: mask {repeated} }}
.no {{ fill: {VERMILION}; font-weight: 600 }}
.moving {{ opacity: 0 }}
.copy {{ opacity: 0.3 }}
.of-host {{ animation: of-host {repeated} }}
.row {{ animation: row {repeated} }}
.row {{ transform: translate({DEVICE_X}px, var(--y)) }}"""
    for step in range(steps):
        begin, end = 100 * step / steps, 100 * (step + 1) / steps
        yield f".step{step} {{ animation: step{step} {whole}s {SECONDS_BEFORE - whole}s infinite }}"
        before = "" if step == 0 else f"0%, {begin - 0.1:.2f}% {{ opacity: 0 }} "
        after = "" if step == steps - 1 else f"{end:.2f}%, 100% {{ opacity: 0 }} "
        shown = f"{begin:.2f}%, {end - 0.1:.2f}% {{ opacity: 1 }} "
        yield f"@keyframes step{step} {{ {before}{shown}{after}}}"
    places = [(0.14, BATCH_X), (0.14 + MOVE, HOST_X), (0.5, HOST_X), (0.5 + MOVE, DEVICE_X)]
    moves = "".join(
        f"{100 * part:g}% {{ transform: translate({x}px, var(--y)) }} " for part, x in places
    )
    yield (
        f"@keyframes row {{ 0% {{ transform: translate({BATCH_X}px, var(--y)) }} {moves}"
        f"100% {{ transform: translate({DEVICE_X}px, var(--y)) }} }}"
    )
    yield "@keyframes of-host { 0%, 30% { opacity: 0 } 31%, 100% { opacity: 0.3 } }"
    yield "@keyframes mask { 0%, 64% { opacity: 0 } 70%, 100% { opacity: 1 } }"
    yield "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }"


def draw():
    """The picture, as text."""
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>',
        text(BATCH_X + 27, 32, ".batch(16)", "head code"),
        text(BATCH_X + 27, 52, "of the whole job", "small", 'text-anchor="middle"'),
        text(HOST_X + 27, 32, "hosts", "head"),
        text(HOST_X + 27, 52, "read their rows", "small", 'text-anchor="middle"'),
        text(DEVICE_X + 27, 32, "devices", "head"),
        text(DEVICE_X + 27, 52, "hold a shard each", "small", 'text-anchor="middle"'),
        text(MASK_X, 32, "valid_mask", "head code"),
        text(MASK_X, 52, "which rows count", "small", 'text-anchor="middle"'),
    ]
    for device in range(NUM_DEVICES):
        y = y_of(device * GLOBAL_BATCH_SIZE // NUM_DEVICES)
        parts.append(
            f'<rect x="{DEVICE_X - 5}" y="{y - 3}" width="{CELL[0] + 10}" rx="4"'
            f' height="{PITCH + CELL[1] + 6}" fill="white" stroke="#888"/>'
        )
    captions = [
        "step 0, on four hosts",
        "step 1, on four hosts: then the run is stopped",
        "step 2, continued on two hosts: no record twice, none left out",
    ]
    for step, (ids, valid) in enumerate(batches()):
        rows = rows_by_host(HOSTS_OF_STEP[step])
        parts += [
            f'<g class="{while_shown(step)}">',
            *frames_of(HOSTS_OF_STEP[step], rows),
            *moving_rows(step, ids, valid, rows),
            text(WIDTH / 2, HEIGHT - 16, captions[step], "head"),
            "</g>",
        ]
    described = (
        "Three global batches of 16 rows. Each row goes to the host that holds it and on to its"
        " device. The third batch comes on two hosts instead of four, and is padded."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
            f' aria-label="{described}">',
            "<style>" + "\n".join(styles()) + "\n</style>",
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    PICTURE.write_text(draw())
