"""What all commands have in common: exit codes, one line, closed pipes, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys

import pytest

from grain_shard.errors import GrainShardError, ShardingError
from grain_shard.tools import doctor
from grain_shard.tools.command import main
from tests.conftest import HANG_S

PLAN = "plan --hosts 2 --devices-per-host 1 --mesh data=2 --batch 8 --records 80"

# A command of a test's own, in place of the demo: PROGRAM % what it does.
PROGRAM = """
import sys, types
import grain_shard.tools.command as face
def body(args):
    %s
command = types.ModuleType("command")
command.add_arguments, command.main = lambda parser: None, body
sys.modules["grain_shard.tools.demo.command"] = command
face.command()
"""


def run(*words, **options):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=HANG_S, **options
    )


def run_body(body):
    return run("-c", PROGRAM % body.replace("\n", "\n    "), "demo")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "python -m grain_shard: the following arguments are required: subcommand. "),
        ("train", "python -m grain_shard: argument subcommand: invalid choice: 'train' "),
        ("plan", "python -m grain_shard plan: the following arguments are required: --mesh, "),
        ("demo --hosts 3", "python -m grain_shard demo: argument --hosts: invalid choice: 3 "),
        ("demo --epochs x", "argument --epochs: 'x' is not a whole number of at least 1. "),
        ("demo --epochs 0", "argument --epochs: '0' is not a whole number of at least 1. "),
        *(
            (
                f"rehearse --hosts 2 --timeout {time} train.py",
                f"argument --timeout: '{time}' is not",
            )
            for time in ("0", "-3", "nan", "inf", "soon")
        ),
        ("rehearse --hosts 2.5 a.py", "argument --hosts: '2.5' is not a whole number of at le"),
        ("rehearse --hosts 2 .", "grain_shard rehearse: there is no script '.'."),
        ("rehearse --hosts 2 nowhere.py", "grain_shard rehearse: there is no script 'nowhere.py'."),
        ("doctor --timeout soon", "argument --timeout: 'soon' is not a positive number of sec"),
    ],
)
def test_words_that_make_no_sense_are_one_line_and_exit_code_2(words, line, capsys):
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    printed, complaint = capsys.readouterr()
    assert code == 2
    assert printed == ""
    assert complaint.count("\n") == 1
    assert line in complaint


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GrainShardError("it is late"), "it is late"),
        (GrainShardError("it is late.\n  remedy: go."), "it is late. Remedy: go."),
        (
            ShardingError(
                "7 rows.", mesh_axes=[("data", 2), ("model", 4)], remedy="use 8\nof them."
            ),
            "7 rows (mesh: data=2, model=4). Remedy: use 8 of them.",
        ),
        (
            GrainShardError(
                "they differ.\n  mesh: 2 on host 0\n  rows: 3 on host 1\n  remedy: look."
            ),
            "they differ (mesh: 2 on host 0; rows: 3 on host 1). Remedy: look.",
        ),
        (GrainShardError(), "GrainShardError"),
    ],
)
def test_the_parts_of_an_error_are_joined_as_sentences(error, line, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(doctor, "main", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == f"grain_shard doctor: {line}\n"


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -0` does, whenever it comes to it
    command = [sys.executable, "-m", "grain_shard", *PLAN.split()]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_help_names_every_exit_code_and_fits_60_columns():
    done = run("-m", "grain_shard", "--help", env=os.environ | {"COLUMNS": "60"})
    codes = re.findall(r"^  (\d+)  ", done.stdout, re.MULTILINE)
    assert codes == ["0", "1", "2", "130", "141"]
    examples = [line for line in done.stdout.splitlines() if "python -m" in line]
    assert all(len(line) <= 60 for line in done.stdout.splitlines() if line not in examples)


# Ctrl-C.


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", id="in Python"),
        pytest.param(
            "class Swallows:\n    def __del__(self):\n        raise KeyboardInterrupt\n"
            "Swallows()\nsignal.pause()",
            id="in a callback, where Python drops it",
        ),
        pytest.param(
            # XLA compiles in threads of its own, which do not hear of it.
            "import jax, jax.numpy as jnp, threading\n"
            "jax.config.update('jax_platforms', 'cpu')\n"
            "def deep(x):\n"
            "    for i in range(300):\n        x = jnp.sin(x @ x) + i\n    return x\n"
            "lowered = jax.jit(deep).lower(jnp.ones((8, 8)))\n"
            "us = threading.main_thread().ident\n"
            "threading.Timer(0.05, signal.pthread_kill, (us, signal.SIGINT)).start()\n"
            "while True:\n    lowered.compile()",
            id="while XLA compiles",
        ),
    ],
)
def test_ctrl_c_is_one_line_and_exit_code_130(body):
    ignored = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = run_body(ignored + body)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "grain_shard demo: stopped by Ctrl-C\n"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
def test_ctrl_c_while_the_demo_compiles(hosts, tmp_path):
    words = ["-u", "-m", "grain_shard", "demo", "--hosts", str(hosts)]
    with subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        mark = "compiling" if hosts == 1 else "[host 0] compiling"
        assert demo.stdout.readline() == "starting JAX ...\n"  # before anything that takes long
        for line in demo.stdout:
            if line.startswith(mark):
                break
        demo.send_signal(signal.SIGINT)
        _, complaint = demo.communicate(timeout=HANG_S)
    assert demo.returncode == 130
    assert complaint == "grain_shard demo: stopped by Ctrl-C\n"
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["grain_shard"]  # the images, and nothing half made
