"""The face of the package: its names, and that importing it is cheap."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import grain
import jax
import pytest

import grain_shard

FACE = Path(grain_shard.__file__)
ROOT = FACE.parents[1]
MODULES = ["checkpoint", "measuring", "placement", "rehearse", "training"]


@pytest.mark.parametrize("module", [grain_shard, grain_shard.placement, grain_shard.training])
def test_every_public_name_is_there_and_has_a_docstring_with_an_example(module):
    for name in module.__all__:
        doc = getattr(module, name).__doc__
        assert doc, name
        assert ">>> " in doc or name in MODULES, f"{name} has no example"


def test_the_face_is_small_and_completion_shows_all_of_it():
    assert len(set(grain_shard.__all__) - set(MODULES)) <= 34
    assert set(grain_shard.__all__) <= set(dir(grain_shard))


def test_completion_of_an_iterator_shows_what_a_user_calls():
    def own(kind):
        return {name for name in dir(kind) if not name.startswith("_")} - set(
            dir(grain.DatasetIterator)
        )

    both = {"reset", "seek", "stats", "read_state", "write_state"}
    epochs = grain.MapDataset.range(8).batch(4).shard_to(jax.make_mesh((1,), ("data",))).epochs(2)
    assert own(grain_shard.ShardedIterator) == own(type(epochs)) == both


def test_the_names_that_type_checkers_see_are_those_that_can_be_imported():
    stub = ast.parse(FACE.with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname for node in imports for alias in node.names}
    assert seen == set(grain_shard.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_is_that_of_its_name(name):
    assert name in grain_shard.__all__  # the site has a page of all names of each
    assert getattr(grain_shard, name) is importlib.import_module(f"grain_shard.{name}")


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


@pytest.mark.slow
def test_type_checkers_know_what_the_function_returns(tmp_path):
    """The method `.shard_to` no type checker can know; the function of that name is the same."""
    script = tmp_path / "train.py"
    script.write_text(
        "import grain, jax, grain_shard\n"
        "batches = grain.MapDataset.range(8).batch(4)\n"
        "reveal_type(grain_shard.shard_to(batches, jax.make_mesh((1,), ('data',))))\n"
        "reveal_type(grain_shard.shard_to(batches, remainder='drop').epochs(2))\n"
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, script]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.findall(r'is "(\w+)"', done.stdout) == ["ShardedDataset", "Epochs"]


def test_the_package_says_it_is_typed():
    assert (FACE.parent / "py.typed").exists()
