"""The committed notebooks as they are read: alike, with outputs, with links that lead somewhere.

That they run is tested by running them: `python notebooks/run.py`.
"""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path, kind):
    """The cells of a kind, and the source of each."""
    found = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]
    return found, ["".join(cell["source"]) for cell in found]


def test_they_are_numbered():
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    assert numbers == [f"{number:02d}" for number in range(1, len(NOTEBOOKS) + 1)]
    for number, path in enumerate(NOTEBOOKS, 1):
        assert cells(path, "markdown")[1][0].startswith(f"# {number}. ")


def test_they_begin_with_the_same_installation_and_devices():
    (first,) = {cells(path, "code")[1][0] for path in NOTEBOOKS}
    assert "%pip install" in first
    assert "jax_num_cpu_devices" in first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_says_at_its_end_how_to_go_on(path):
    last = "".join(json.loads(path.read_text())["cells"][-1]["source"])
    following = NOTEBOOKS[NOTEBOOKS.index(path) + 1 :][:1]
    assert all(f"]({after.name})" in last for after in following)
    assert "](" in last


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)\s#]+)", "\n".join(cells(path, "markdown")[1]))
    for target in targets:
        assert "OWNER" not in target
        assert target.startswith("https://") or (FOLDER / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_without_errors_or_warnings(path):
    found, _ = cells(path, "code")
    assert all(cell["execution_count"] for cell in found), "python notebooks/run.py --write"
    outputs = [output for cell in found for output in cell["outputs"]]
    assert outputs
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_picture_says_in_words_what_it_shows(path):
    for cell, source in zip(*cells(path, "code"), strict=True):
        kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
        if any(kind.startswith("image/") for kind in kinds):
            assert cell["metadata"].get("mystnb", {}).get("image", {}).get("alt"), source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_line_of_an_output_is_cut_at_the_side_of_a_page(path):
    for cell in cells(path, "code")[0]:
        for output in cell["outputs"]:
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            assert max(map(len, text.splitlines()), default=0) <= 100, text
