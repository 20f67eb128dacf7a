"""`python -m grain_shard doctor`: a report of parts, none of which can hang or end the others."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from grain_shard.tools import extras
from grain_shard.tools.command import main
from grain_shard.tools.doctor import child, machine
from grain_shard.tools.libtpu import keep_libtpu_quiet, tpu_is_here
from tests.conftest import HANG_S


@pytest.fixture
def files(tmp_path):
    for file in range(2):
        writer = ArrayRecordWriter(str(tmp_path / f"train-{file}.array_record"), "group_size:1")
        for record in range(10):
            writer.write(bytes([record] * 100))
        writer.close()
    return tmp_path


@pytest.fixture
def answers(monkeypatch):
    """What the processes would answer, by the last word of their module."""
    given = {
        "devices": {
            "platform": "tpu",
            "devices": "8 x TPU v5 lite",
            "on_this_host": 4,
            "device_bytes": 17_000_000_000,
            "hosts": 2,
            "this_host": 1,
        }
    }

    def ask(module, words, *, timeout_s, if_late):
        answer = given[module.rpartition(".")[2]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("grain_shard.tools.doctor.command.ask", ask)
    return given


def report(capsys, *words):
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def test_every_part_is_there_as_text_and_as_json(answers, capsys):
    text = report(capsys)
    parts = json.loads(report(capsys, "--json"))
    assert list(parts) == ["versions", "machine", "limits", "extras", "accelerators", "devices"]
    assert [line for line in text.splitlines() if line and line[0] != " "] == list(parts)
    packages = {"python", "grain-shard", "jax", "jaxlib", "grain", "numpy", "array-record"}
    assert packages | {"orbax-checkpoint", "flax"} <= set(parts["versions"])
    assert parts["machine"]["cores"] >= 1
    assert parts["devices"] == answers["devices"]
    for line in (
        "  platform           tpu",
        "  devices            8 x TPU v5 lite",
        "  on this host       4",
        "  device             17.0 GB",
        "  hosts              2",
        "  this host          1",
    ):
        assert line in text.splitlines()


def test_it_fits_a_narrow_terminal(answers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(machine, "_OF_JAX", ())  # a path of this machine may be as long as it likes
    assert max(map(len, report(capsys).splitlines())) <= 60


def test_a_part_that_fails_says_why_and_the_others_are_there(answers, capsys, monkeypatch):
    answers["devices"] = TimeoutError("no answer within 60 s: another process may hold the TPU.")
    monkeypatch.setattr("grain_shard.tools.doctor.machine.limits", lambda: 1 / 0)
    text = report(capsys)
    assert "  error              ZeroDivisionError: division by zero\n" in text
    assert "  error              no answer within 60 s: another process may hold the TPU.\n" in text
    assert "  python  " in text


def test_of_files_it_says_what_a_read_takes(files, answers, capsys):
    from grain_shard.tools.doctor import reads

    answers["reads"] = found = reads.reads([f"{files}/train-*"])
    with pytest.raises(FileNotFoundError, match="no file matches"):
        reads.reads(["x-*"])
    assert (found["files"], found["records"], found["record_bytes"]) == (2, 20, 100)
    assert 0 < found["median_read_ms"] <= found["slowest_read_ms"]
    assert set(found["records_per_s_side_by_side"]) == {"1", "4", "16", "64"}
    assert found["side_by_side_that_help"] in ("1", "4", "16", "64")
    text = report(capsys, f"{files}/train-*")
    assert "  records            20\n  record             100 bytes\n" in text
    assert "  side by side that help " in text


@pytest.mark.slow
def test_the_processes_that_it_asks_answer_in_json(files, capsys):
    parts = json.loads(report(capsys, "--json", f"{files}/train-*"))
    assert parts["devices"]["hosts"] == 1
    assert parts["devices"]["platform"] == "cpu"
    assert parts["reads"]["records"] == 20


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="without libtpu nothing complains")
@pytest.mark.skipif(tpu_is_here(), reason="libtpu finds its TPU here")
@pytest.mark.parametrize(
    "program",
    [
        "from grain_shard.tools.command import main; main(['doctor', '--json'])",
        "from grain_shard.tools.doctor import devices; devices.devices()",
        "from grain_shard.tools.libtpu import keep_libtpu_quiet; keep_libtpu_quiet()\n"
        "import jax; assert jax.default_backend() == 'cpu'",
    ],
)
def test_an_installed_libtpu_says_nothing_in_our_commands(program):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_where_there_is_a_tpu_nothing_is_set(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] * pattern.count("accel"))
    keep_libtpu_quiet()
    assert "TPU_WORKER_HOSTNAMES" not in os.environ
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    with monkeypatch.context() as environment:
        environment.setenv("TPU_WORKER_HOSTNAMES", "ours")
        environment.setenv("TPU_ACCELERATOR_TYPE", "v5e")
        keep_libtpu_quiet()
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "ours"


class TestAsk:
    """A process that is asked, and does not answer as it should."""

    @pytest.fixture
    def program(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def write(text):
            (tmp_path / "asked.py").write_text(text)
            return "asked"

        return write

    def test_what_hangs_is_killed(self, program):
        module = program("import signal\nsignal.pause()")
        with pytest.raises(TimeoutError, match=r"^no answer within 0\.2 s: the mount hangs$"):
            child.ask(module, [], timeout_s=0.2, if_late="the mount hangs")

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("raise ValueError('boom')", "ValueError: boom"),
            ("import os; os.abort()", "exit code -6"),
            ("import sys; sys.exit('no chip')", "no chip"),
        ],
    )
    def test_what_fails_says_why(self, program, text, why):
        with pytest.raises(RuntimeError, match=rf"^{why}$"):
            child.ask(program(text), [], timeout_s=HANG_S, if_late="")

    def test_what_it_prints_before_its_answer_does_not_count(self, program):
        module = program("import sys; print('starting'); print('{\"a\": ' + sys.argv[1] + '}')")
        assert child.ask(module, ["7"], timeout_s=HANG_S, if_late="") == {"a": 7}


@pytest.mark.parametrize(
    ("soft", "advice"),
    [
        (1024, "a source of more than some 512 files needs more open files: ulimit -n 9000"),
        (9000, None),
    ],
)
def test_a_low_limit_of_open_files_comes_with_advice(soft, advice, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, 9000))
    assert machine.limits()["advice"] == advice


def test_what_an_extra_lacks_is_named(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "tqdm" else name)
    found = machine.extras()
    remedy = 'lacks tqdm: pip install "grain-shard[demo]"'
    assert found["demo"] == f"{remedy} (for python -m grain_shard demo)"
    assert found["plan"].startswith("there (for ")
