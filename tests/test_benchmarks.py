"""`python -m benchmarks`: that it runs and writes what it says. No time is asserted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.chart import write_chart
from benchmarks.groups import GROUPS
from benchmarks.measure import Comparison, Goal, Group, Run, Skip, interleave, quartiles, results

ROOT = Path(__file__).parent.parent


def test_every_round_runs_all_sides_in_turn_and_the_first_does_not_count():
    ran = []

    def side(name):
        ran.append(name)
        return float(len(ran))

    rounds = list(interleave({"a": lambda: side("a"), "b": lambda: side("b")}, 2))
    assert ran == ["a", "b"] * 3
    assert rounds == [{"a": 3.0, "b": 4.0}, {"a": 5.0, "b": 6.0}]


def comparison(compared, goal, theirs="theirs"):
    return Comparison("P1", "reading", "a peer", "ms", "ours", theirs, compared, goal=goal)


@pytest.mark.parametrize(
    ("compared", "goal", "values", "met"),
    [
        ("ours / theirs", Goal("at most", 2.0), [2.0, 0.5, 1.0], True),  # the median of the pairs
        ("ours / theirs", Goal("at most", 0.9), [2.0, 0.5, 1.0], False),
        ("theirs / ours", Goal("at least", 1.0), [0.5, 2.0, 1.0], True),
        ("ours - theirs", Goal("at least", 0.1), [4.0, -4.0, 0.0], False),
        ("ours", Goal("exactly", 4.0), [8.0, 4.0, 3.0], True),
        ("ours", Goal("exactly", 4.5), [8.0, 4.0, 3.0], False),
        ("ours", None, [8.0, 4.0, 3.0], None),
    ],
)
def test_pairs_of_a_round_are_compared(tmp_path, compared, goal, values, met):
    rounds = [
        {"ours": 8.0, "theirs": 4.0},
        {"ours": 4.0, "theirs": 8.0},
        {"ours": 3.0, "theirs": 3.0},
    ]
    group = Group("reading", lambda run: rounds, [comparison(compared, goal)])
    (result,) = results(group, Run(True, tmp_path))
    assert result.values == values
    assert result.met is met


def test_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_an_absent_peer_is_skipped_with_a_word_and_the_others_are_measured(tmp_path):
    tries = []

    def absent():
        tries.append(1)
        raise Skip("datarax is not installed")

    sides = {"ours": lambda: 1.0, "theirs": lambda: 2.0, "absent": absent}
    group = Group(
        "reading",
        lambda run: interleave(sides, 3),
        [comparison("ours / theirs", None), comparison("ours / theirs", None, theirs="absent")],
    )
    measured, skipped = results(group, Run(True, tmp_path))
    assert measured.values == [0.5] * 3
    assert (skipped.skipped, skipped.values) == ("datarax is not installed", [])
    assert len(tries) == 1


def test_the_picture_has_a_bar_for_ours_and_for_three_others(tmp_path):
    (group,) = (group for group in GROUPS if group.name == "reading")
    rates = {"grain_shard": 4.0, "Grain's guide": 1.0, "Grain tuned": 2.0, "by hand": 3.0}
    rates |= {"datarax": Skip("not installed"), "flax": 1.0, "without a mask": 5.0}
    measured = dataclasses.replace(group, measure=lambda run: [rates])
    picture = tmp_path / "results.png"
    assert write_chart(results(measured, Run(True, tmp_path)), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_measures_a_goal_and_writes_json(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "P5", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["conditions"]["quick"] is True
    assert [row["values"] for row in written["results"]] == [[1.0], [0.5], [0.25]]
    assert all(row["met"] for row in written["results"])
    assert not (tmp_path / "results.png").exists(), "it is a picture of P1 to P3"
    assert "reading whole batches" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["P5", "typo"], "nothing is called ['typo']; names are reading, "),
        ([""], "nothing is called ['']"),
        (["P5", "--write"], "--write is for all of them"),
        (["P5", "--out", "README.md"], "cannot write to --out: "),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    arguments, complaint, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which main sets, and leaves set
    with pytest.raises(SystemExit) as end:
        main(["--quick", *arguments])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert "[1/" not in told
