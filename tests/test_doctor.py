"""`python -m grain_shard doctor`: a report of parts, none of which can hang or end the others."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest

from grain_shard.grain_inside import nodes
from grain_shard.tools import doctor, extras
from grain_shard.tools.command import main
from grain_shard.tools.libtpu import keep_libtpu_quiet, tpu_is_here
from tests.conftest import HANG_S

TPU = {"platform": "tpu", "devices": "8 x TPU v5 lite", "hosts": 2}


@pytest.fixture
def report(capsys, monkeypatch):
    """Makes a report of a machine with a TPU, or one whose devices raise the error given."""

    def make(*words, error=None):
        monkeypatch.setattr(doctor, "devices", Mock(return_value=TPU, side_effect=error))
        assert main(["doctor", *words]) == 0
        return capsys.readouterr().out

    return make


def test_every_part_is_there_as_text_and_as_json(report):
    parts = json.loads(report("--json"))
    assert list(parts) == ["versions", "hints", "checks", "devices"]
    packages = {"python", "grain-shard", "jax", "jaxlib", "grain", "numpy", "array-record"}
    assert packages | {"orbax-checkpoint", "flax"} <= set(parts["versions"])
    assert set(parts["hints"].values()) == {"found"}
    assert parts["devices"] == TPU
    lines = [line.split() for line in report().splitlines()]
    assert ["devices", "8", "x", "TPU", "v5", "lite"] in lines
    assert [name for name in parts if [name] in lines] == list(parts)


def test_it_fits_a_narrow_terminal(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, report().splitlines())) <= 60


def test_a_part_that_fails_says_why_and_the_others_are_there(report, monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda: 1 / 0)
    text = " ".join(report(error=TimeoutError("no answer within 60 s: try again.")).split())
    assert "error ZeroDivisionError: division by zero" in text
    assert "error TimeoutError: no answer within 60 s: try again." in text
    assert " python 3." in text


def test_a_private_part_of_grain_that_is_not_found_is_named(monkeypatch):
    monkeypatch.setattr(nodes, "batch_node", lambda ds: None)
    found = doctor.hints()
    assert found["batch size"].startswith("not found in this version of Grain: ")
    assert found["way to the source"] == "found"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="without libtpu nothing complains")
@pytest.mark.skipif(tpu_is_here(), reason="libtpu finds its TPU here")
@pytest.mark.parametrize(
    "program",
    [
        "from grain_shard.tools.command import main; main(['doctor', '--json'])",
        "from grain_shard.tools.doctor import devices; devices(60)",
        "from grain_shard.tools.libtpu import keep_libtpu_quiet; keep_libtpu_quiet()\n"
        "import jax; assert jax.default_backend() == 'cpu'",
    ],
)
def test_an_installed_libtpu_says_nothing_in_our_commands(program):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_where_there_is_a_tpu_nothing_is_set(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] * pattern.count("accel"))
    keep_libtpu_quiet()
    assert "TPU_WORKER_HOSTNAMES" not in os.environ
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "ours")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e")
    keep_libtpu_quiet()
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "ours"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import signal; signal.pause()", "TimeoutError: JAX did not find its devices within 5 s"),
        ("raise ValueError('boom')", "RuntimeError: ValueError: boom"),
        ("import os; os.abort()", "RuntimeError: exit code -6"),
        ("print('starting'); print('{\"hosts\": 7}')", None),
    ],
)
def test_devices_that_hang_or_crash_are_an_error(program, error, tmp_path, monkeypatch, capsys):
    (tmp_path / "jax.py").write_text(program + "; raise SystemExit")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    assert main(["doctor", "--json", "--timeout", "5"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    if error is None:
        assert devices == {"hosts": 7}
    else:
        assert devices["error"].startswith(error)


@pytest.mark.slow
def test_the_devices_of_this_machine():
    assert doctor.devices(HANG_S)["platform"] == "cpu"


@pytest.mark.parametrize(
    ("soft", "told"),
    [
        (1024, "1024; a source of more than some 512 files needs more: ulimit -n 9000"),
        (9000, "9000"),
        (-1, "no limit"),
    ],
)
def test_a_low_limit_of_open_files_comes_with_advice(soft, told, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (soft, 9000))
    assert doctor.checks()["open files"] == told


def test_what_an_extra_lacks_is_named(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "tqdm" else name)
    found = doctor.checks()
    remedy = 'lacks tqdm: pip install "grain-shard[demo]"'
    assert found["[demo]"] == f"{remedy} (for python -m grain_shard demo)"
    assert found["[plan]"] == "ok"
