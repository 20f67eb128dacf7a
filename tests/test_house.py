"""The structure of the package, read from its source: where imports may point, and who asks what.

The floors are drawn in docs/rooms.svg, which is made of the same table.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.make_rooms import CORE, FLOORS, draw_rooms
from docs.make_way import draw_way
from grain_shard.grain_inside.private_names import PRIVATE_NAMES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grain_shard"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def room_of(module):
    """The folder of a module in the package, or the module itself if it is in none."""
    return module.split(".")[1] if "." in module else "the face"


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path):
    """The modules of the package that a file imports, wherever in the file it does."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grain_shard"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("grain_shard"))


def test_the_table_of_floors_names_every_room_once():
    rooms = [room for rooms in FLOORS for room in rooms]
    assert sorted(rooms) == sorted({room_of(module) for module in MODULES})


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down_and_the_core_imports_no_tool(path):
    here = room_of(module_of(path))
    for module in imports_of(path):
        there = room_of(module)
        assert there == here or FLOOR_OF[there] < FLOOR_OF[here], f"{here} imports {module}"
        assert there in CORE or here not in CORE, f"{here} imports {module}"


def test_a_loop_imports_what_it_needs_and_no_more():
    program = """
import sys, grain, jax, grain_shard
mesh = jax.make_mesh((1,), ("data",))
for batch in grain.MapDataset.range(8).batch(4).shard_to(mesh, mask_key=None):
    pass
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "grain_shard.iteration.iterator" in imported, done.stderr
    assert not imported & {"flax", "optax", "rich", "matplotlib"}
    assert not imported & {"grain_shard.tools", "grain_shard.training"}


def test_no_two_files_import_each_other_even_by_way_of_others():
    below = {module: set(imports_of(path)) for module, path in MODULES.items()}
    while True:  # takes away what imports nothing that is left
        done = {module for module, imported in below.items() if not imported & below.keys()}
        if not done:
            break
        for module in done:
            del below[module]
    assert below == {}, "these import each other in a circle"


def test_the_picture_of_the_rooms_is_drawn_from_the_imports(tmp_path):
    draw_rooms(tmp_path / "rooms.svg")
    drawn = (tmp_path / "rooms.svg").read_text()
    assert drawn == (ROOT / "docs" / "rooms.svg").read_text(), "run python docs/make_rooms.py"


def test_the_way_of_a_batch_names_files_that_exist(tmp_path):
    draw_way(tmp_path / "way.svg")
    drawn = (tmp_path / "way.svg").read_text()
    assert drawn == (ROOT / "docs" / "way.svg").read_text(), "run python docs/make_way.py"
    pages = [PACKAGE / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "way.svg"]
    named = {name for page in pages for name in re.findall(r"[\w/]+\.pyi?\b", page.read_text())}
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py*")]
    unknown = [name for name in named if not any(f.endswith(f"/{name}") for f in files)]
    assert not unknown


# Grain's and JAX's private parts.


# Public, says Python, in spite of their names: of NamedTuple, Enum, os and sys, and a module.
OF_PYTHON = {"_replace", "_asdict", "_fields", "_value_", "_exit", "_current_frames", "_thread"}


def private_names(path):
    """What a file takes by a name that begins with an underscore, other than from itself."""
    nodes = nodes_of(path)
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and _is_self(n.value)}
    assigned = [target for n in nodes if isinstance(n, ast.Assign) for target in n.targets]
    own |= {target.id for target in assigned if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            if node.attr not in own | OF_PYTHON:
                yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            private = {name for name in names if re.search(r"(^|\.)_[a-z]", name)}
            yield from private - OF_PYTHON
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            whose, name = node.args[:2]
            private = isinstance(name, ast.Constant) and re.match(r"_[a-z]", str(name.value))
            if private and not _is_self(whose):
                yield str(name.value)


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_what_is_private_to_grain_and_jax_is_looked_at_in_one_folder(path):
    if path.parent.name != "grain_inside":
        # Grain's name for batched reads, which a source has to have.
        assert set(private_names(path)) <= {"_getitems"}


def test_the_table_of_private_names_has_each_that_the_folder_uses():
    files = [path for path in FILES if path.parent.name == "grain_inside"]
    used = {name for path in files for name in private_names(path)}
    for path in files:
        if path.stem != "private_names":
            texts = {n.value for n in nodes_of(path) if isinstance(n, ast.Constant)}
            used |= {t for t in texts if isinstance(t, str) and re.fullmatch(r"_[a-z]\w*", t)}
    of_others = {"_fingerprint"}  # of a Hugging Face dataset
    assert used - of_others == set(PRIVATE_NAMES)


# Our own datasets.

STAGE = "grain_shard.transforms.stage"
# Each of our datasets, and the modules that ask whether a dataset is one.
ASKED_IN = {
    "ElementsOfParents": {"grain_shard.grain_inside.routes"},
    "IterableBatches": {"grain_shard.reading.from_iterable", "grain_shard.streams.whole_rows"},
    "RecordReads": set(),
    "RecordStream": set(),
    "RowMapDataset": {STAGE},
    "ShardedDataset": {"grain_shard.iteration.sharded_dataset"},
    "StreamDataset": {STAGE},
    "_Share": set(),
}
GRAINS = {"MapDataset", "IterDataset"}


def test_what_kind_a_dataset_is_is_asked_in_one_place():
    classes = [n for path in FILES for n in nodes_of(path) if isinstance(n, ast.ClassDef)]
    ours = [c.name for c in classes if GRAINS & {getattr(base, "attr", "") for base in c.bases}]
    asked = {name: set() for name in ours}
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                for name in names & asked.keys():
                    asked[name].add(module)
    assert asked == ASKED_IN


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_wait_is_left_to_a_simple_queue(path):
    """Before Python 3.13 `SimpleQueue.get(timeout=...)` may wait for ever if it ends late."""
    used = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes_of(path)}
    assert "SimpleQueue" not in used
