"""Draws docs/flow.svg: how the rows of a global batch come to hosts and devices, as an animation.

    python docs/make_flow.py

The library itself says which host holds which rows. Attributes draw the end of the last batch, so
that a program without animations, or a reader who wants none, sees a whole picture. CSS inside the
picture moves the rows. It begins with the end of the last batch, too.
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
WIDTH, HEIGHT = 620, 416
TOP, PITCH, CELL = 64, 17, (54, 15)
BATCH_X, HOST_X, DEVICE_X, MASK_X = 46, 208, 360, 554
PALE = "#B8B8B8"  # words of a copy


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
    return TOP + row * PITCH + 4 * device + 6 * (device // 2)


def text(x, y, words, size=14, extra='text-anchor="middle"'):
    return f'<text x="{x}" y="{y}" font-size="{size}" {extra}>{words}</text>'


HEAD = 'text-anchor="middle" font-weight="600"'
CODE = f'{HEAD} font-family="ui-monospace, Menlo, Consolas, monospace"'


def while_shown(step):
    """The attributes of one step's group: the last one is seen where nothing moves."""
    return f'data-part="step{step}" opacity="{int(step == len(HOSTS_OF_STEP) - 1)}"'


def frames_of(hosts, rows):
    """The frame of each host, around its rows and its devices, with its name where no row goes."""
    for host, held in rows.items():
        top, bottom = y_of(held[0]) - 6, y_of(held[-1]) + CELL[1] + 6
        color = HOST_COLORS[host]
        yield (
            f'<rect x="{HOST_X - 8}" y="{top}" width="{DEVICE_X + 130 - HOST_X}" rx="6"'
            f' height="{bottom - top}" fill="{pale(color, 0.12)}" stroke="{color}"/>'
        )
        yield text(DEVICE_X + 70, (top + bottom) / 2 + 4, f"host {host}", extra="")


def devices():
    for device in range(NUM_DEVICES):
        y = y_of(device * GLOBAL_BATCH_SIZE // NUM_DEVICES)
        yield (
            f'<rect x="{DEVICE_X - 5}" y="{y - 2}" width="{CELL[0] + 10}" rx="4"'
            f' height="{PITCH + CELL[1] + 4}" fill="white" stroke="#888"/>'
        )


def pale(color, share):
    """A color on white: not every program draws what is half transparent."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02X}" for part in parts)


def cell(attributes, color, words, ink):
    width, height = CELL
    return (
        f'<g {attributes}><rect width="{width}" height="{height}" rx="3" fill="{color}"/>'
        + text(width / 2, height - 3, words, 12.5, f'text-anchor="middle" fill="{ink}"')
        + "</g>"
    )


def moving_rows(step, ids, valid, rows):
    """The rows of one batch, each of which goes from the batch to its host and to its device.

    Where it was, a pale copy stays.
    """
    for host, held in rows.items():
        for row in held:
            y = y_of(row)
            color = HOST_COLORS[host] if valid[row] else PADDING
            words = str(ids[row]) if valid[row] else "pad"
            yield cell(f'transform="translate({BATCH_X} {y})"', pale(color, 0.3), words, PALE)
            at_host = f'data-part="copy" transform="translate({HOST_X} {y})"'
            yield cell(at_host, pale(color, 0.3), words, PALE)
            yield f'<g transform="translate({DEVICE_X} {y})">'
            yield cell('data-part="row"', color, words, "#222") + "</g>"
            mark = "" if valid[row] else f' fill="{VERMILION}" font-weight="600"'
            extra = f'data-part="mask" text-anchor="middle"{mark}'
            yield text(MASK_X, y + CELL[1] - 3, valid[row], size=12.5, extra=extra)


def styles():
    """The animation: every step has its part of the whole, and in it the rows move twice.

    It names no class, because ImageMagick draws nothing of what has one.
    """
    steps = len(HOSTS_OF_STEP)
    whole = steps * SECONDS_A_STEP
    repeated = f"{SECONDS_A_STEP}s {SECONDS_BEFORE - whole}s infinite"
    yield f"[data-part=mask] {{ animation: mask {repeated} }}"
    yield f"[data-part=copy] {{ animation: copy {repeated} }}"
    yield f"[data-part=row] {{ animation: row {repeated} }}"
    for step in range(steps):
        begin, end = 100 * step / steps, 100 * (step + 1) / steps
        moves = f"step{step} {whole}s {SECONDS_BEFORE - whole}s infinite"
        yield f"[data-part=step{step}] {{ animation: {moves} }}"
        before = "" if step == 0 else f"0%, {begin - 0.1:.2f}% {{ opacity: 0 }} "
        after = "" if step == steps - 1 else f"{end:.2f}%, 100% {{ opacity: 0 }} "
        shown = f"{begin:.2f}%, {end - 0.1:.2f}% {{ opacity: 1 }} "
        yield f"@keyframes step{step} {{ {before}{shown}{after}}}"
    places = [(0.14, BATCH_X), (0.14 + MOVE, HOST_X), (0.5, HOST_X), (0.5 + MOVE, DEVICE_X)]
    moves = "".join(
        f"{100 * part:g}% {{ transform: translateX({x - DEVICE_X}px) }} " for part, x in places
    )
    start, end = (f"transform: translateX({x - DEVICE_X}px)" for x in (BATCH_X, DEVICE_X))
    yield f"@keyframes row {{ 0% {{ {start} }} {moves}100% {{ {end} }} }}"
    yield "@keyframes copy { 0%, 30% { opacity: 0 } 31%, 100% { opacity: 1 } }"
    yield "@keyframes mask { 0%, 64% { opacity: 0 } 70%, 100% { opacity: 1 } }"
    yield "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }"


def draw():
    """The picture, as text."""
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>',
        text(BATCH_X + 27, 24, ".batch(16)", size=15, extra=CODE),
        text(BATCH_X + 27, 43, "of the whole job"),
        text(HOST_X + 27, 24, "hosts", size=15, extra=HEAD),
        text(HOST_X + 27, 43, "read their rows"),
        text(DEVICE_X + 27, 24, "devices", size=15, extra=HEAD),
        text(DEVICE_X + 27, 43, "hold a shard each"),
        text(MASK_X, 24, "valid_mask", size=15, extra=CODE),
        text(MASK_X, 43, "which rows count"),
    ]
    captions = [
        "step 0, on four hosts",
        "step 1, on four hosts: then the run is stopped",
        "step 2, continued on two hosts: no record twice, none left out",
    ]
    for step, (ids, valid) in enumerate(batches()):
        rows = rows_by_host(HOSTS_OF_STEP[step])
        parts += [
            f"<g {while_shown(step)}>",
            # It covers the steps before, where a program shows all of them.
            f'<rect x="4" y="52" width="{WIDTH - 8}" height="{HEIGHT - 56}" fill="white"/>',
            *frames_of(HOSTS_OF_STEP[step], rows),
            *devices(),
            *moving_rows(step, ids, valid, rows),
            text(WIDTH / 2, HEIGHT - 12, captions[step], size=15, extra=HEAD),
            "</g>",
        ]
    described = (
        "Three global batches of 16 rows. Each row goes to the host that holds it and on to its"
        " device. The third batch comes on two hosts instead of four, and is padded."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
            f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif"'
            f' fill="#222" stroke="none"'
            f' role="img" aria-label="{described}">',
            *parts,
            "<style>" + "\n".join(styles()) + "\n</style>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    PICTURE.write_text(draw())
