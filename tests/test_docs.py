"""The documents: their pictures can be made again, and their links lead somewhere."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


RUNNING = [page for page in PAGES if ">>> " in page.read_text()]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_examples_run(page):
    results = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert results.attempted
    assert not results.failed


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_pictures_of_the_contract_can_be_made_again(tmp_path):
    script = ROOT / "docs" / "make_pictures.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=120)
    made = {picture.name for picture in tmp_path.iterdir()}
    assert made == {picture.name for picture in (ROOT / "docs" / "pictures").iterdir()}
    shown = set(re.findall(r"\(pictures/([^)]+)\)", (ROOT / "docs" / "contract.md").read_text()))
    assert shown == made


def test_the_example_of_a_source_behind_http_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/buckets.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "class HttpRecords" in block)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "2000\n"), done.stderr
