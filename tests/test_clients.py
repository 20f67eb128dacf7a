"""docs/recipes.md shows the very lines that `python -m tests.clients` runs."""

import re
import subprocess
import sys

import pytest

from tests.clients import __main__ as command
from tests.clients.__main__ import (
    CHEAPEST,
    CLIENTS,
    FOLDER,
    PAGE,
    SHOWN,
    recipe,
    requirements,
    with_recipes,
    with_results,
)


def test_the_page_shows_the_recipes_as_they_run():
    page = PAGE.read_text()
    assert with_recipes(page) == page, "python -m tests.clients --write mends it"
    assert set(CHEAPEST) <= set(CLIENTS)
    assert [found[2] for found in SHOWN.finditer(page)], "there are some"


def test_the_table_of_one_line_changes_shows_code_that_runs():
    code = (FOLDER / "one_line_changes.py").read_text()
    _, table = PAGE.read_text().split("| library | with padding in a batch |\n")
    rows = re.findall(r"^\| ([^|`]*) \| `([^`]*)`", table.split("\n\n")[0], re.MULTILINE)
    assert [name for name, _ in rows] == ["Equinox, NNX", "NumPyro", "BlackJAX", "clu"]
    assert not [shown for _, shown in rows if shown not in code]


@pytest.mark.parametrize("path", [found[2] for found in SHOWN.finditer(PAGE.read_text())])
def test_a_recipe_is_at_most_25_lines(path):
    assert 0 < len(re.findall(r"^.*\S.*$", recipe(path), re.MULTILINE)) <= 25


@pytest.mark.parametrize("name", CLIENTS)
def test_the_packages_of_a_client_are_pinned(name):
    for pins in ("lowest", "newest"):
        together, alone = requirements(name, pins)
        assert [r for r in together + alone if "==" in r]


def test_a_line_of_a_run_takes_the_place_of_the_one_before_it():
    lines = "b newest, 2025: old\na newest, 2025: kept\n"
    new = {"b newest": "b newest, 2026: new"}
    assert with_results(lines, new) == "a newest, 2025: kept\nb newest, 2026: new\n"


def test_a_client_that_cannot_be_installed_leaves_the_others(tmp_path, monkeypatch, capsys):
    runs = tmp_path / "last_runs.txt"
    runs.touch()

    def check(name, pins, timeout_s):
        if name == "gemma":
            raise subprocess.CalledProcessError(1, "pip install")
        return True, f"{name} {pins}, today: 13 checks held"

    monkeypatch.setattr(command, "check", check)
    monkeypatch.setattr(command, "RUNS", runs)
    monkeypatch.setattr(sys, "argv", ["clients", "gemma", "tunix", "--write"])
    assert command.main() == 1
    refused, held = capsys.readouterr().out.splitlines()
    assert refused.startswith("gemma newest: not run: Command 'pip install' returned")
    assert held in runs.read_text()
