"""Draws docs/way.svg: the way of a batch through the package, from the dataset to the loop.

    python docs/make_way.py

The steps are those of grain_shard/README.md, which names the files.
"""

from itertools import pairwise
from pathlib import Path

PICTURE = Path(__file__).with_name("way.svg")

LEFT, RIGHT, BOTH = 0, 1, 2  # random access, streams, and every kind of pipeline
# (column, step, its files), from the top down; two columns of one step stand side by side.
STEPS = [
    [(BOTH, "1  shard_to: stages choose rows", "transforms/, reading/host_rows.py")],
    [(BOTH, "2  iter: a run opens at a position", "iteration/iterator.py, run.py")],
    [
        (LEFT, "3  a task: the next records", "reading/batch_reads.py, cuts.py"),
        (RIGHT, "3  a task: a turn of a stream", "streams/turns.py"),
    ],
    [
        (LEFT, "4  indices become rows", "grain_inside/routes.py"),
        (RIGHT, "4  Grain's iterator gives rows", "streams/reader.py"),
    ],
    [
        (LEFT, "5  rows become a padded batch", "reading/batch_builder.py, padding.py"),
        (RIGHT, "5  rows become a padded batch", "streams/feed_rows.py, whole_rows.py"),
    ],
    [(BOTH, "6  a bounded buffer, in order", "threads/pool.py")],
    [(BOTH, "7  onto the devices", "iteration/device_batches.py, sharding/assemble.py")],
    [(BOTH, "8  next: the hosts agree", "iteration/run.py, hosts/compare.py")],
]
# Who does the steps from the first number to the second.
LANES = [
    (1, 2, "the loop's thread", "#FDF3E1"),
    (3, 6, "reading threads", "#E8F1F8"),
    (7, 7, "the device thread", "#E6F4EC"),
    (8, 8, "the loop's thread", "#FDF3E1"),
]
WIDTH, BOX, GAP, HEIGHT, PITCH, LANE, TOP = 760, 290, 12, 44, 60, 148, 34


def place(column):
    """The left edge and the width of the boxes in a column."""
    return LANE + (column % BOTH) * (BOX + GAP), 2 * BOX + GAP if column == BOTH else BOX


def draw_way(path):
    """Writes the picture."""
    height = TOP + len(STEPS) * PITCH + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for first, last, who, color in LANES:
        y, tall = TOP + (first - 1) * PITCH - 6, (last - first + 1) * PITCH - 4
        lines += [
            f'<rect x="4" y="{y}" width="{WIDTH - 8}" height="{tall}" rx="8" fill="{color}"/>',
            f'<text x="14" y="{y + 24}" font-size="13" text-anchor="start" fill="#333333">'
            f"{who}</text>",
        ]
    for column, name in ((LEFT, "random access"), (RIGHT, "streams and feeds")):
        x, wide = place(column)
        lines.append(
            f'<text x="{x + wide / 2:g}" y="18" font-size="14" font-weight="bold">{name}</text>'
        )
    for number, (above, below) in enumerate(pairwise(STEPS), 1):
        narrow = max(above, below, key=len)  # a line for each of its boxes
        for column, *_ in narrow:
            x, wide = place(column)
            x, y = x + wide / 2, TOP + number * PITCH
            lines.append(
                f'<path d="M{x:g} {y - PITCH + HEIGHT}V{y}" stroke="#666666" stroke-width="1.5"/>'
            )
    for number, step in enumerate(STEPS):
        for column, what, files in step:
            x, wide = place(column)
            middle, y = x + wide / 2, TOP + number * PITCH
            lines += [
                f'<rect x="{x:g}" y="{y}" width="{wide:g}" height="{HEIGHT}" rx="6" fill="white"'
                ' stroke="#0072B2"/>',
                f'<text x="{middle:g}" y="{y + 19}" font-size="14">{what}</text>',
                f'<text x="{middle:g}" y="{y + 36}" font-size="12" fill="#333333"'
                f' font-family="monospace">{files}</text>',
            ]
    Path(path).write_text("\n".join([*lines, "</svg>", ""]))


if __name__ == "__main__":
    draw_way(PICTURE)
