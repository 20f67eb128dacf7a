"""docs/recipes.md shows the very lines that `python -m tests.clients` runs."""

import re

import pytest

from tests.clients.__main__ import (
    CHEAPEST,
    CLIENTS,
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


@pytest.mark.parametrize("name", CLIENTS)
def test_a_recipe_is_at_most_25_lines_and_its_packages_are_pinned(name):
    assert len(re.findall(r"^.*\S.*$", recipe(name), re.MULTILINE)) <= 25
    for pins in ("lowest", "newest"):
        together, alone = requirements(name, pins)
        assert [r for r in together + alone if "==" in r]


def test_a_line_of_a_run_takes_the_place_of_the_one_before_it():
    page = "<!-- the last runs -->\n```text\nb newest, 2025: old\na newest, 2025: kept\n```\n"
    assert with_results(page, {"b newest": "b newest, 2026: new"}).splitlines()[2:4] == [
        "a newest, 2025: kept",
        "b newest, 2026: new",
    ]
