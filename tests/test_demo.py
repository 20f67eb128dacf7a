"""``python -m grain_shard``, and its demo as a user runs it: in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from grain_shard import ArrayRecordSource
from grain_shard.errors import GrainShardError
from grain_shard.tools.command import main
from grain_shard.tools.demo import digits

HELP_AND_DEMO_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from grain_shard.tools.command import main
try:
    main(['demo', '--help'])
except SystemExit as end:
    assert end.code == 0
sys.exit(main(['demo']))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The user's cache folder, the same for all tests of this module."""
    return tmp_path_factory.mktemp("cache")


def run(cache, *words, columns=100):
    """A process of ``python``, with that cache folder and no terminal."""
    command = [sys.executable, *words]
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "COLUMNS": f"{columns}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def files(cache):
    """Every file of the cache, and when it was written."""
    return {str(p.relative_to(cache)): p.stat().st_mtime_ns for p in cache.rglob("*.*")}


@pytest.fixture(scope="module")
def first_run(cache):
    """The demo with an empty cache, on one host and then on two."""
    assert files(cache) == {}
    return run(cache, "-m", "grain_shard", "demo", "--hosts", "2")


def assert_printed(text, *lines):
    """Each line, a regular expression, is one of the text."""
    for line in lines:
        assert re.search(f"^{line}$", text, re.MULTILINE), f"{line}\n{text}"


@pytest.mark.slow
@pytest.mark.long
def test_first_run_writes_the_files_and_keeps_every_promise(cache, first_run):
    assert (first_run.returncode, first_run.stderr) == (0, "")
    assert f"digits written to {cache}/grain_shard/digits\n" in first_run.stdout
    assert sorted(files(cache)) == [
        *(f"grain_shard/digits/test-0000{i}-of-00002.array_record" for i in range(2)),
        *(f"grain_shard/digits/train-0000{i}-of-00004.array_record" for i in range(4)),
    ]
    on_one_host, heading, _ = first_run.stdout.partition("\n2 hosts\n")
    assert heading
    assert_printed(
        on_one_host,
        r"  mesh +data=8 *",
        r"  batch\['image'\] +f32\[128@data,8,8,1\] +16 +4.1 kB *",
        r"  batch\['label'\] +i32\[128@data\] +16 +64 bytes *",
        r"  batch\['valid_mask'\] +bool\[128@data\] +16 +16 bytes *",
        r"  0:16 +device 0 *",
        r"  112:128 +device 7 *",
        r"stopped after batch 66 of 120; going on from its checkpoint:",
        r"trained on [1-9][\d,]* examples per second",
        r"  ok: test accuracy 9[789]\.\d\d% \(>= 97%\)",
        r"  ok: 297 of 297 test images counted",
        r"  ok: compilations: 1 of train_step, 1 of eval_step",
        r"10 epochs of 1,500 images, 12 batches of 128 each; 120 in all",
        r"  ok: 54 batches after the restore are those of one run, bit for bit",
        r"  ok: 10 epochs read each of 1,500 images once \(15,000 reads on host 0\)",
    )


@pytest.mark.slow
@pytest.mark.long
def test_too_few_epochs_fail_and_the_files_are_used_again(cache):
    digits.write_digits(cache / "grain_shard" / "digits")
    before = files(cache)
    result = run(cache, "-m", "grain_shard", "demo", "--epochs", "1", columns=60)

    assert (result.returncode, result.stderr) == (1, "")
    assert "digits found in" in result.stdout
    assert files(cache) == before
    assert max(map(len, result.stdout.replace(f"{cache}", "").splitlines())) <= 60
    assert re.search(r"^  FAILED: test accuracy \d\d\.\d\d% \(>= 97%\)$", result.stdout, re.M)
    assert result.stdout.count("FAILED") == 1
    assert result.stdout.count("  ok: ") == 4
    assert "stopped after batch 6 of 12; " in result.stdout


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_read_half_each_and_end_with_the_parameters_of_one(first_run):
    assert_printed(
        first_run.stdout,
        r"\[host 0\]   48:64 +host 0: 3 *",
        r"\[host 0\]   64:80 +host 1: \d+ *",
        r"\[host 0\]   112:128 +host 1: \d+ *",
        r"\[host 0\]   ok: test accuracy 9[789]\.\d\d% \(>= 97%\)",
        r"\[host 0\]   ok: 54 batches after the restore are those of one run, bit for bit",
        r"\[host 0\]   ok: 10 epochs read each of 1,500 images once \(7,680 reads on host 0, 7,3.*",
        r"  ok: parameters and optimizer of 2 hosts differ from those of 1 host by at most"
        r" \S+ \(<= 1e-05\)",
    )


@pytest.mark.slow
def test_run_that_is_killed_while_it_writes_leaves_nothing_to_be_found(tmp_path):
    kill_at_the_last_file = """
import os, pathlib, sys
from grain_shard.tools.demo import digits
class Writer(digits.ArrayRecordWriter):
    def __init__(self, path, options):
        super().__init__(path, options)
        if "test-00001" in path:
            os.kill(os.getpid(), 9)
digits.ArrayRecordWriter = Writer
digits.write_digits(pathlib.Path(sys.argv[1]))
"""
    directory = tmp_path / "digits"
    assert run(tmp_path, "-c", kill_at_the_last_file, str(directory)).returncode == -9
    assert len(list(tmp_path.rglob("train-*"))) == 4
    assert not directory.exists()

    digits.write_digits(directory)
    for split, num_records in (("train", 1500), ("test", 297)):
        assert len(ArrayRecordSource(f"{directory}/{split}-*")) == num_records


def test_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(GrainShardError, match=r"^cannot write the digits to .*not empty"):
        digits.write_digits(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_that_cannot_be_made_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("...")
    with pytest.raises(GrainShardError, match=r"cannot write the digits to .*\n  remedy: set XDG_"):
        digits.write_digits(tmp_path / "file" / "digits")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [("sklearn", "scikit-learn"), ("tqdm", "tqdm")])
def test_missing_extra_is_named_with_its_remedy(cache, module, name):
    result = run(cache, "-c", HELP_AND_DEMO_WITHOUT, module)
    assert result.returncode == 1
    assert "--hosts {1,2,4,8}" in result.stdout
    assert result.stderr == (
        f"grain_shard demo: the demo needs {name}, which is not installed."
        ' Remedy: pip install "grain-shard[demo]"\n'
    )


@pytest.mark.parametrize("subcommand", ["demo", "rehearse"])
def test_help_of_a_subcommand_ends_with_an_example(subcommand, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main([subcommand, "-h"])
    assert end.value.code == 0
    assert f"example: python -m grain_shard {subcommand} --hosts" in capsys.readouterr().out


def test_checkpoints_of_another_run_are_refused(tmp_path, capsys):
    (tmp_path / "66").mkdir()
    assert main(["demo", "--distributed", str(tmp_path)]) == 2
    text = f"grain_shard demo: {tmp_path} is not empty. Remedy: pass a new folder.\n"
    assert capsys.readouterr().err == text
