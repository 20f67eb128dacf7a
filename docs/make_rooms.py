"""Draws docs/rooms.svg: the rooms of the package, floor by floor, and what imports what.

    python docs/make_rooms.py

The arrows are read from the imports. The floors are the table below; a test compares both.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grain_shard"

# From the ground up. A room imports rooms of lower floors only.
FLOORS = [
    ["errors", "digest", "spans", "callers", "host_arrays", "grain_inside", "public_names"],
    ["trees", "state_json"],
    ["threads", "sharding", "sources"],
    ["reading", "hosts"],
    ["stats"],
    ["iteration"],
    ["streams", "checkpoint"],
    ["transforms"],
    ["install", "training"],
    ["tools"],
    ["the face", "placement", "measuring", "rehearse", "__main__"],
]
# All that a pipeline needs; it runs without the rooms above.
CORE = {"install"}.union(*FLOORS[: FLOORS.index(["transforms"]) + 1])

# What a room is for, in a few words.
WORDS = {
    "errors": "what can go wrong",
    "digest": "long values, shortened",
    "spans": "who is at work when",
    "callers": "the user's line",
    "host_arrays": "aligned host memory",
    "public_names": "one list of names",
    "grain_inside": "Grain's private parts",
    "state_json": "states as plain JSON",
    "trees": "batches as trees",
    "threads": "at work beside the loop",
    "sharding": "which rows go where",
    "sources": "records by index",
    "reading": "rows of batches",
    "hosts": "what hosts say",
    "stats": "figures while it runs",
    "iteration": "the loop's iterator",
    "streams": "streams and feeds",
    "checkpoint": "Orbax",
    "placement": "its public names",
    "measuring": "its public names",
    "transforms": "shard_to, four stages",
    "training": "around the training step",
    "tools": "plan, profile, show, ...",
    "install": ".shard_to on Grain",
    "rehearse": "its public names",
    "the face": "import grain_shard",
    "__main__": "python -m grain_shard",
}
MOST = 5  # rooms side by side; a floor with more of them has several lines
WIDTH, HEIGHT, GAP_X, GAP_Y, GAP_OF_LINES, MARGIN = 164, 48, 12, 46, 14, 16
ARROW = "#666666"


def room_of(module):
    return module.split(".")[1] if "." in module else "the face"


def arrows():
    """(room, room below that it imports), sorted."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        here = room_of(".".join(parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grain_shard"):
                targets = (
                    [node.module]
                    if "." in node.module
                    else [
                        f"grain_shard.{alias.name}"
                        for alias in node.names
                        if (PACKAGE / alias.name).is_dir()
                        or (PACKAGE / f"{alias.name}.py").exists()
                    ]
                    or ["grain_shard"]
                )
                found |= {(here, room_of(target)) for target in targets}
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                found |= {(here, room_of(n)) for n in names if n.split(".")[0] == "grain_shard"}
    return sorted((a, b) for a, b in found if a != b)


def arrows_to_the_next_floor():
    """The arrows that are drawn."""
    floors = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    return [(a, b) for a, b in arrows() if floors[a] - floors[b] == 1]


def places(width):
    """The corner of each room, from the top floor down, and the height of the picture.

    Rooms with an arrow stand in the first line of their floor, so that no arrow crosses a room.
    """
    at, y = {}, MARGIN
    with_arrow = {below for _, below in arrows_to_the_next_floor()}
    for floor in reversed(FLOORS):
        rooms = sorted(floor, key=lambda room: room not in with_arrow)
        for line in (rooms[i : i + MOST] for i in range(0, len(rooms), MOST)):
            left = (width - len(line) * (WIDTH + GAP_X) + GAP_X) / 2
            at |= {room: (left + i * (WIDTH + GAP_X), y) for i, room in enumerate(line)}
            y += HEIGHT + GAP_OF_LINES
        y += GAP_Y - GAP_OF_LINES
    return at, y - GAP_Y + MARGIN


def draw_rooms(path):
    """Writes the picture; the same text for the same imports."""
    width = MOST * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    at, height = places(width)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{ARROW}"/></marker></defs>',
        '<g font-size="14" text-anchor="start">',
        f'<text x="{MARGIN}" y="{at["tools"][1] + 20:g}">Arrows are imports, drawn</text>',
        f'<text x="{MARGIN}" y="{at["tools"][1] + 39:g}">to the next floor alone.</text>',
        "</g>",
    ]
    for above, below in arrows_to_the_next_floor():
        (x1, y1), (x2, y2) = at[above], at[below]
        lines.append(
            f'<line x1="{x1 + WIDTH / 2:g}" y1="{y1 + HEIGHT:g}" x2="{x2 + WIDTH / 2:g}"'
            f' y2="{y2 - 3:g}" stroke="{ARROW}" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in at.items():
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#E8F1F8"'
            ' stroke="#0072B2"/>',
            f'<text x="{x + WIDTH / 2:g}" y="{y + 20:g}" font-size="15">{room}</text>',
            f'<text x="{x + WIDTH / 2:g}" y="{y + 38:g}" font-size="13" fill="#333333">'
            f"{WORDS[room]}</text>",
        ]
    Path(path).write_text("\n".join([*lines, "</svg>", ""]))


if __name__ == "__main__":
    draw_rooms(ROOT / "docs" / "rooms.svg")
