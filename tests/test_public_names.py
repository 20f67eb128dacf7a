"""The face of the package: its names, and that importing it is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import grain_shard

FACE = Path(grain_shard.__file__)


def test_every_public_name_is_there_and_has_a_docstring_with_an_example():
    for name in grain_shard.__all__:
        doc = getattr(grain_shard, name).__doc__
        assert doc, name
        assert ">>> " in doc, f"{name} has no example"


def test_type_checkers_see_the_names_that_are_imported_on_use():
    (block,) = (
        node
        for node in ast.parse(FACE.read_text()).body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    seen = {alias.name for statement in block.body for alias in statement.names}
    assert seen == set(grain_shard._MODULE_OF) | {"rehearse"}
    assert seen <= set(grain_shard.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(grain_shard, "shard_too")


def test_importing_it_starts_no_backend_and_does_not_import_flax():
    program = """
import sys, grain_shard
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print([m for m in ("flax", "optax", "sklearn") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_package_says_it_is_typed():
    assert (FACE.parent / "py.typed").exists()
