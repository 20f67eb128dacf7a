"""What all commands have in common: exit codes, one line, closed pipes, Ctrl-C."""

import os
import re
import subprocess
import sys

import pytest

from grain_shard.errors import GrainShardError, ShardingError
from tests.conftest import HOSTS_S
from tests.programs import command, without_grains_warning

# A command of a test's own, in place of rehearse: PROGRAM % what it does.
PROGRAM = """
import sys, types
import grain_shard.tools.command as face
def body(args):
    %s
command = types.ModuleType("command")
command.add_arguments, command.main = lambda parser: None, body
sys.modules["grain_shard.tools.rehearse.command"] = command
face.command()
"""


def run(*words, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": HOSTS_S} | options
    done = subprocess.run([sys.executable, *words], text=True, **options)
    done.stderr = without_grains_warning(done.stderr)
    return done


TWO = "plan --hosts 2 --devices-per-host 1 --mesh"
SIZES = "--batch 8 --records 80"
NO_NUMBER = "is not a whole number of at least 1."
NO_SECONDS = "is not a positive number of seconds."


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "python -m grain_shard: the following arguments are required: subcommand. "),
        ("train", "python -m grain_shard: argument subcommand: invalid choice: 'train' "),
        *((f"rehearse --hosts {n} a.py", f"--hosts: '{n}' {NO_NUMBER}") for n in ("x", "0", "2.5")),
        ("plan --hosts -1", f"python -m grain_shard plan: argument --hosts: '-1' {NO_NUMBER}"),
        *(
            (f"rehearse --hosts 2 --timeout {s} a.py", f"argument --timeout: '{s}' {NO_SECONDS}")
            for s in ("0", "-3", "nan", "inf", "soon")
        ),
        ("plan", "python -m grain_shard plan: the following arguments are required: --mesh, "),
        (f"plan --mesh data=2 {SIZES}", "one of the arguments --topology --hosts is required. "),
        (f"plan --hosts 2 --topology v5e:2x2 --mesh data=2 {SIZES}", "not allowed with argument"),
        (f"{TWO} data {SIZES}", "argument --mesh: 'data' does not have the form data=32,model=8. "),
        (f"{TWO} data=1,data=2 {SIZES}", "argument --mesh: 'data=1,data=2' does not have the form"),
        (f"{TWO} data=2 --spec data++x {SIZES}", "--spec: 'data++x' has an empty axis name. "),
        (f"{TWO} data=2 --hardware v5e {SIZES}", "invalid HardwareType value: 'v5e'. "),
        (f"{TWO} data=2 --compile a.py {SIZES}", "'a.py' does not have the form train.py:build. "),
        (f"{TWO} data=2 --compile :f {SIZES}", "':f' does not have the form train.py:build. "),
        (f"{TWO} data=2 --compile no.py:f {SIZES}", "--compile: there is no file 'no.py'. "),
        ("check train --seconds 0", f"argument --seconds: '0' {NO_SECONDS}"),
        # Words that are understood, but do not go together.
        ("check train", "grain_shard check: 'train' does not have the form module:function."),
        ("check nowhere:f", "grain_shard check: there is no module 'nowhere' in "),
        ("rehearse --hosts 2 .", "grain_shard rehearse: there is no script '.'."),
        ("rehearse --hosts 2 nowhere.py", "grain_shard rehearse: there is no script 'nowhere.py'."),
        (f"plan --hosts 2 --mesh data=2 {SIZES}", "--devices-per-host belong together. remedy: "),
        (f"{TWO} data=3 {SIZES}", "there are 2 devices. mesh: data=3. remedy: give axes"),
        (f"{TWO} data=2 --spec x {SIZES}", "does not exist. spec: P('x') mesh: data=2. remedy: "),
        (f"{TWO} data=2 --slices 2 {SIZES}", "--slices needs a TPU topology. remedy: give"),
        (
            f"{TWO} data=2 --compile {__file__}:f {SIZES}",
            "--compile needs a TPU topology. remedy: ",
        ),
    ],
)
def test_words_that_make_no_sense_are_one_line_and_exit_code_2(words, line, capsys):
    assert command(words) == 2
    printed, complaint = capsys.readouterr()
    if complaint.startswith("python -m grain_shard"):
        assert complaint.endswith(" Run it with --help to see its arguments.\n")
    else:
        assert complaint.startswith("grain_shard ")
        assert complaint.endswith("\n")
    assert printed == ""  # no plan above an error, where it would be overlooked
    assert complaint.count("\n") == 1
    assert line in complaint


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GrainShardError("it is late"), "it is late."),
        (GrainShardError("it is late.\n  remedy: go."), "it is late. remedy: go."),
        (
            ShardingError("7 rows.", mesh_axes=[("data", 2), ("model", 4)], remedy="use 8 rows."),
            "7 rows. mesh: data=2, model=4. remedy: use 8 rows.",
        ),
        (
            GrainShardError("they differ.\n  mesh: 2 on host 0\n  rows: 3 on 1\n  remedy: look."),
            "they differ. mesh: 2 on host 0. rows: 3 on 1. remedy: look.",
        ),
        (GrainShardError(), "GrainShardError."),
    ],
)
def test_the_parts_of_an_error_are_joined_as_sentences(error, line, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(sys.modules[__name__], "pipeline", fail, raising=False)
    assert command(f"check {__name__}:pipeline") == 1
    assert capsys.readouterr().err == f"grain_shard check: {line}\n"


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -0` does, whenever it comes to it
    done = run("-m", "grain_shard", *f"{TWO} data=2 {SIZES}".split(), stdout=writer)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_help_has_the_commands_and_exit_codes_in_60_columns_and_imports_no_command():
    program = (
        "import atexit, sys; from grain_shard.tools.command import main;"
        "atexit.register(lambda: print(*sys.modules)); main(['--help'])"
    )
    done = run("-c", program, env=os.environ | {"COLUMNS": "60"})
    *text, modules = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    examples = {line for line in text if "python -m" in line}
    assert "  python -m grain_shard rehearse --hosts 4 train.py" in examples
    assert all(len(line) <= 60 for line in text if line not in examples)
    codes = re.findall(r"^  (\d+)  ", done.stdout, re.MULTILINE)
    assert codes == ["0", "1", "2", "130", "141"]
    commands = {
        f"grain_shard.tools.{name}.command" for name in ("checking", "planning", "rehearse")
    }
    assert not commands & set(modules.split())


@pytest.mark.parametrize("subcommand", ["check", "plan", "rehearse"])
def test_help_of_a_subcommand_ends_with_an_example(subcommand, capsys):
    assert command(f"{subcommand} -h") == 0
    assert f"example: python -m grain_shard {subcommand} " in capsys.readouterr().out


# Ctrl-C.


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", id="in Python"),
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
    lines = (ignored + body).replace("\n", "\n    ")
    done = run("-c", PROGRAM % lines, "rehearse")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "grain_shard rehearse: stopped by Ctrl-C\n"
