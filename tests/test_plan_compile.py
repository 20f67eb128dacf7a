"""``plan --compile``: a step compiled by the TPU compiler, with no TPU."""

import json
import sys

import pytest

from grain_shard.tools.command import main
from tests.test_plan import needs_libtpu

pytestmark = needs_libtpu

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from grain_shard.training import microbatches

def step(state, batch):
    def loss(w):
        return ((batch["x"] @ w).sum(-1) * batch["valid_mask"]).sum()
    return {"w": state["w"] - jax.grad(loss)(state["w"])}

def build(mesh):
    sharding = NamedSharding(mesh, P(None, "model"))
    state = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32, sharding=sharding)}
    return step, state, {"x": jax.ShapeDtypeStruct((1024,), np.float32)}

def donating(mesh):
    return jax.jit(step, donate_argnums=0), *build(mesh)[1:]

def replicated_batch(mesh):
    replicated = NamedSharding(mesh, P())
    _, state, record = build(mesh)
    shardings = (state["w"].sharding, replicated)
    return jax.jit(step, in_shardings=shardings), state, record

def explicit(mesh):
    def step(table, batch):
        def add(total, part):
            rows = table.at[part["id"]].get(out_sharding=P("data", "model"))
            return total + rows.sum(0), None
        return jax.lax.scan(add, table, microbatches(batch, 4))[0]

    create = lambda key: jax.random.normal(key, (64, 128), out_sharding=P(None, "model"))
    key = jax.random.key(0)
    with jax.set_mesh(mesh):
        return step, jax.eval_shape(create, key), {"id": jax.ShapeDtypeStruct((), np.int32)}

def auto(mesh):
    def step(w, batch):  # on Explicit axes JAX refuses a product over a dim that is sharded
        x = jax.lax.with_sharding_constraint(batch["x"], P("data", "model"))
        return w + (x @ w).sum(0)

    rows = NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names), P("model"))
    state = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=rows)
    return step, state, {"x": jax.ShapeDtypeStruct((128,), np.float32)}

def helped(mesh):
    import model_beside_the_script
    return build(mesh)

def broken(mesh):
    def step(state, batch):
        raise ValueError("a step with a fault of its own")
    return step, *build(mesh)[1:]
"""
WORDS = "plan --topology v5e:4x4 --mesh data=8,model=2 --batch 256 --records 2560"
ARGUMENTS = WORDS.split()


@pytest.fixture
def compiled(tmp_path, capsys, monkeypatch):
    """Compiles one of the script's steps: the exit code, what was printed, what was complained."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script's folder is added
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(name, *options):
        code = main([*ARGUMENTS, "--compile", f"{script}:{name}", *options])
        return code, *capsys.readouterr()

    return run


def test_the_memory_of_one_device(compiled):
    figures = json.loads(compiled("build", "--json")[1])["compiled"]
    weights, rows = 1024 * 4096 // 2 * 4, 256 // 8 * (1024 * 4 + 1)
    # The compiler rounds small arrays up to its tiles.
    assert figures["argument_bytes"] == pytest.approx(weights + rows, rel=0.01)
    assert figures["output_bytes"] == pytest.approx(weights, rel=0.01)
    assert figures["alias_bytes"] == 0
    donating = json.loads(compiled("donating", "--json")[1])["compiled"]
    assert donating["alias_bytes"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("name", ["explicit", "auto"])
def test_the_mesh_is_in_use_and_the_state_tells_the_type_of_its_axes(compiled, name):
    code, shown, complaint = compiled(name)
    assert (code, complaint) == (0, "")
    assert "as .shard_to hands it out" in shown


def test_a_module_beside_the_script(compiled, tmp_path):
    (tmp_path / "model_beside_the_script.py").touch()
    assert compiled("helped")[0] == 0


def test_text(compiled):
    code, shown, _ = compiled("donating")
    assert code == 0
    lines = [line.split() for line in shown.splitlines()]
    assert ["temporaries", "0", "bytes"] in lines
    assert "the batch goes in as .shard_to hands it out".split(" ") in lines  # noqa: SIM905
    assert "16 x TPU v5 lite on 4 hosts" in shown


def test_a_step_that_wants_the_batch_elsewhere_is_refused(compiled):
    code, _, complaint = compiled("replicated_batch")
    assert code == 1
    assert "in other shardings than .shard_to gives them" in complaint


def test_a_step_with_a_fault_of_its_own(compiled):
    with pytest.raises(ValueError, match="a fault of its own"):
        compiled("broken")


def test_a_spec_that_does_not_fit_the_record(compiled):
    code, _, complaint = compiled("build", "--spec", "data,model,data")
    assert code == 2
    assert ". remedy: " in complaint


def test_a_script_without_the_function(compiled):
    code, _, complaint = compiled("nothing")
    assert code == 2
    assert "script.py defines no 'nothing'. remedy: write script.py:name with" in complaint
    assert complaint.count("\n") == 1
