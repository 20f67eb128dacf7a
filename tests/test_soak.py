"""`python -m benchmarks.soak`: some of its cases, and that it finds what is wrong and goes on."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.soak import cases, compare, pipelines
from benchmarks.soak.__main__ import soak
from benchmarks.soak.worker import Outcome, Worker
from grain_shard import BatchLayout

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SEED = 0
KIND_OF = {number: cases.draw(SEED, number)[0] for number in range(60)}


def of_kind(kind, count):
    """The numbers of the first cases of a kind."""
    return [number for number, its_kind in KIND_OF.items() if its_kind == kind][:count]


def test_a_case_follows_from_its_seed_and_number():
    for number in range(20):
        kind, case = cases.draw(SEED, number)
        assert (kind, repr(case)) == (KIND_OF[number], repr(cases.draw(SEED, number)[1]))
        assert repr(case) != repr(cases.draw(SEED + 1, number)[1])


@pytest.mark.filterwarnings("ignore:.* is a slice of records that come in another")
@pytest.mark.filterwarnings("ignore:this host holds .* shards, but reads every row")
@pytest.mark.filterwarnings("ignore:a batch has rows of padding and no mask")
@pytest.mark.parametrize(
    "number", [*of_kind("pipelines", 8), *of_kind("feeds", 4), *of_kind("faults", 4)]
)
def test_cases_in_one_process(number, tmp_path):
    _, case = cases.draw(SEED, number)
    assert case.run(tmp_path)


def test_a_library_that_gives_a_host_other_rows_is_found_out(tmp_path, monkeypatch):
    drawn = (cases.draw(SEED, number)[1] for number in of_kind("pipelines", 30))
    case = next(case for case in drawn if case.hosts > 1)
    rows = BatchLayout.rows
    monkeypatch.setattr(BatchLayout, "rows", lambda *args: rows(*args)[::-1])
    with pytest.raises(compare.Difference, match=r"(?s)batch .* is\n.*and should be\n"):
        case.run(tmp_path)


def test_a_case_that_fails_is_written_down_and_the_soak_goes_on(tmp_path, monkeypatch, capsys):
    def run(seed, number, limit_s):
        failure = "batch 3 is missing" if number == 1 else None
        return Outcome(Counter(batches=1), failure, "what was printed\n", 0.5)

    worker = SimpleNamespace(run=run, end=lambda: None)
    monkeypatch.setattr("benchmarks.soak.__main__.Worker", lambda log: worker)
    assert soak(SEED, range(3), deadline=float("inf"), out=tmp_path) == 1
    (file,) = tmp_path.iterdir()
    told = file.read_text()
    assert told.startswith("--seed 0 --case 1\n")
    assert repr(cases.draw(SEED, 1)[1]) in told
    assert "batch 3 is missing" in told
    assert told.endswith("what was printed\n")
    printed = capsys.readouterr().out
    assert "seed 0: 3 cases, 1 failed" in printed
    assert "batches: 3" in printed
    assert printed.endswith("failed: --seed 0 --case 1\n")
    assert soak(SEED, [0], deadline=float("inf"), out=tmp_path) == 0


@pytest.mark.slow
@pytest.mark.spawn
def test_a_case_that_hangs_is_ended_and_the_next_one_runs(tmp_path):
    worker, (number,) = Worker(tmp_path / "printed"), of_kind("pipelines", 1)
    try:
        assert worker.run(SEED, number, limit_s=0).failure.startswith("it took longer than 0 s")
        outcome = worker.run(SEED, number, limit_s=pipelines.Pipelines.limit_s)
        assert outcome.failure is None, outcome
    finally:
        worker.end()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [*of_kind("kill chains", 1), *of_kind("failing hosts", 1)])
def test_the_command_runs_a_case_on_real_processes(number, tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--seed", str(SEED), "--case", str(number)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    found = "".join(path.read_text() for path in tmp_path.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr + found
    assert f"{KIND_OF[number]}: ok" in done.stdout
