"""`python -m benchmarks`: that it runs and writes what it says. No time is asserted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import reading
from benchmarks.__main__ import main
from benchmarks.agreement import STEPS_A_VOTE, VOTES, simulate
from benchmarks.chart import write_chart
from benchmarks.figures import figure
from benchmarks.groups import GROUPS
from benchmarks.measure import (
    Comparison,
    Goal,
    Group,
    Run,
    Skip,
    alone,
    has_failed,
    interleave,
    results,
)
from benchmarks.page import write_page
from benchmarks.report import print_tables
from benchmarks.saved import read_json, write_json
from tests.conftest import HOSTS_S

ROOT = Path(__file__).parent.parent
NAMED = {group.name: group for group in GROUPS}


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
    group = Group("reading", "Reading", lambda run: rounds, [comparison(compared, goal)])
    (result,) = results(group, Run(True, tmp_path))
    assert result.values == values
    assert result.met is met


def test_p1_is_printed_whatever_a_peer_raises(tmp_path, monkeypatch, capsys):
    tries = []

    def broken(paths, decode, size):
        tries.append(1)
        raise ValueError("no indexed access\nand more")

    def missing(paths, decode, size):
        raise Skip("flax is not installed")

    monkeypatch.setattr(reading, "RECORDS", 2 * reading.GLOBAL_BATCH_SIZE)
    monkeypatch.setattr(Run, "rounds", lambda run, quick, full: 1)
    monkeypatch.setitem(reading.PIPELINES, "datarax", broken)
    monkeypatch.setitem(reading.PIPELINES, "flax", missing)
    measured = results(NAMED["reading"], Run(True, tmp_path))
    assert len(tries) == 1, "it is not run again"
    empty = {result.comparison.theirs: result.skipped for result in measured if not result.values}
    assert empty == {
        "datarax": "datarax failed: ValueError: no indexed access",
        "flax": "flax is not installed",
    }
    assert not any(has_failed(NAMED["reading"], result) for result in measured)
    print_tables([(NAMED["reading"], measured)])
    shown = capsys.readouterr().out
    for word in ("P1", "P2", "P3", "P8", "datarax failed:"):
        assert f"  {word} " in shown


def test_a_side_of_ours_that_fails_is_a_failure(tmp_path):
    def broken():
        raise ValueError

    sides = {"ours": broken, "theirs": lambda: 1.0}
    for measure in (lambda run: interleave(sides, 1), lambda run: broken()):
        group = Group("reading", "Reading", measure, [comparison("ours / theirs", None)])
        (result,) = results(group, Run(True, tmp_path))
        assert has_failed(group, result)


def test_no_two_groups_have_one_title_and_no_two_rows_of_a_group_the_same_words():
    assert len({group.title for group in GROUPS}) == len(GROUPS)
    for group in GROUPS:
        words = {(c.what, c.against) for c in group.comparisons}
        assert len(words) == len(group.comparisons), group.name


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (4.1324, "x", "4.13x"),
        (0.0697, "x", "0.0697x"),
        (70073.4, "records/s", "70,073 records/s"),
        (0.00991, "s", "9.91 ms"),
        (0.00731, "ms", "7.31 us"),
        (0.00000731, "s", "7.31 us"),
        (0.215, "ms", "0.215 ms"),
        (0.0, "s", "0 s"),
        (1.0, "files", "1 file"),
        (2.0, "files", "2 files"),
        (1.0, "processes", "1 process"),
        (1.0, "ms", "1 ms"),
    ],
)
def test_a_figure_is_written_in_a_unit_that_suits_it(value, unit, written):
    assert figure(value, unit) == written


TWO_ROUNDS = [
    {"ours": 4.0, "theirs": 2.0, "other": Skip("it is not installed"), "files": 1.0},
    {"ours": 8.0, "theirs": 2.0, "other": Skip("it is not installed"), "files": 1.0},
]
SUBJECT = Group(
    "subject",
    "What is measured",
    lambda run: TWO_ROUNDS,
    [
        comparison("ours / theirs", Goal("at least", 4.0)),
        dataclasses.replace(comparison("ours / theirs", None, theirs="other"), against="another"),
        alone("P2", "files", "files", "files", Goal("at most", 2)),
    ],
)
MEASURED = results(SUBJECT, Run(True, Path()))
CONDITIONS = {
    "date": "2026-01-01 00:00 UTC",
    "machine": "a machine",
    "cpus": 2,
    "load before": 0.5,
    "python": "3.12",
    "versions": {"grain": "1"},
    "quick": True,
}


SECTION = """\
## What is measured

| # | goal met? | what | against | measured | goal | ours | theirs |
|---|---|---|---|---|---|---|---|
| P1 | missed | reading | a peer | 3x (2.5 to 3.5) | at least 4x | 6 ms | 2 ms |
| P1 | - | reading | another | it is not installed | - | - | - |

| # | goal met? | what | measured | goal |
|---|---|---|---|---|
| P2 | met | files | 1 file (1 to 1) | at most 2 files |
"""


def test_the_page_has_a_section_for_each_group_also_from_what_a_run_has_saved(tmp_path):
    other = dataclasses.replace(SUBJECT, name="other", title="What else is measured")
    measured = [(SUBJECT, MEASURED), (other, MEASURED)]
    write_page(measured, CONDITIONS, tmp_path / "RESULTS.md")
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith("# Results\n")
    assert page.endswith(f"\n{SECTION}\n{SECTION.replace('What is', 'What else is')}")
    assert "\n2 of 4 goals are met. " in page
    write_json(measured, CONDITIONS, tmp_path / "results.json")
    conditions, again = read_json(tmp_path / "results.json", [SUBJECT, other])
    write_page(again, conditions, tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == page


@pytest.mark.parametrize(
    "change", [{"what": "sorting"}, {"against": "another peer"}, {"compared": "ours - theirs"}]
)
def test_results_of_other_comparisons_are_refused(tmp_path, change):
    saved = tmp_path / "saved.json"
    write_json([(SUBJECT, MEASURED)], CONDITIONS, saved)
    others = [dataclasses.replace(SUBJECT.comparisons[0], **change)]
    with pytest.raises(ValueError, match=r"saved\.json has no result of subject, .*; measure all"):
        read_json(saved, [dataclasses.replace(SUBJECT, comparisons=others)])


def test_the_committed_page_has_every_group_and_number():
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert headings == [group.title for group in GROUPS]
    for number in {c.number for group in GROUPS for c in group.comparisons if c.number}:
        assert f"\n| {number} |" in page, number


def test_the_picture_has_a_bar_for_each_of_three_others(tmp_path):
    rates = {"grain_shard": 4.0, "Grain's guide": 1.0, "Grain tuned": 2.0, "by hand": 3.0}
    rates |= {"datarax": Skip("not installed"), "flax": 1.0, "without a mask": 5.0}
    group = dataclasses.replace(NAMED["reading"], measure=lambda run: [rates])
    picture = tmp_path / "results.png"
    assert write_chart([(group, results(group, Run(True, tmp_path)))], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not write_chart([(SUBJECT, MEASURED)], picture)


@pytest.mark.slow
@pytest.mark.long
def test_the_command_measures_a_goal_and_writes_json(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "P5", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HOSTS_S)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["conditions"]["quick"] is True
    assert [row["values"] for row in written["results"]] == [[1.0], [0.5], [0.25]]
    assert all(row["met"] for row in written["results"])
    assert not (tmp_path / "results.png").exists(), "it is a picture of P1 to P3"
    assert "reading whole batches" in done.stdout


@pytest.mark.long
def test_hosts_that_vote_are_simulated():
    figures = simulate(8)
    assert set(figures) == {"started", "vote", "step", "processor", "calls"}
    assert figures["step"] == pytest.approx(figures["vote"] / STEPS_A_VOTE)
    # The first host puts its answer and the verdict, gets all answers, and deletes them, and in all
    # votes but the first it deletes the last verdict.
    assert figures["calls"] >= 5 - 1 / VOTES


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["P5", "typo"], "nothing is called ['typo']; names are reading, "),
        ([""], "nothing is called ['']"),
        (["P5", "--write"], "--write is for all of them"),
        (["P5", "--again", "results.json"], "--again is for all of them"),
        (["P5", "--out", "README.md"], "cannot write to --out: "),
        (["--again", "nowhere.json"], "--again: [Errno 2]"),
        (["--again", "README.md"], "--again: Expecting value"),
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
