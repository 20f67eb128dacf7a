"""The site, as `sphinx-build` makes it: its search, its reference and its style."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytestmark = [pytest.mark.slow, pytest.mark.long]

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", DOCS, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def index(site):
    """What the search looks in: searchindex.js, which calls a function with this JSON."""
    (found,) = re.findall(r"^Search\.setIndex\((.*)\)$", (site / "searchindex.js").read_text())
    return json.loads(found)


# The most that a title, the name of an object, or a word of the text can score in searchtools.js.
OTHER_RESULTS = 15 + 11


@pytest.mark.parametrize(
    ("word", "page"),
    {
        "checkpoint": "saving",
        "resume": "saving",
        "seed": "changing_runs",
        "padding": "contract",
        "OOM": "troubleshooting",
        "webdataset": "coming_from",
        "parquet": "data",
        "mask": "evaluation",
        "epoch": "changing_runs",
        "shuffle": "changing_runs",
        "multi-host": "many_hosts",
        "TPU": "many_hosts",
        "SLURM": "many_hosts",
        "prefetch": "options",
        "workers": "other_machines",
        "state": "saving",
        "mixture": "mixtures",
        "packing": "streams",
        "evaluation": "evaluation",
        "thread": "contract",
        "lock": "contract",
        "thread safe": "contract",
        "nnx": "examples/README",
        "partitioning": "examples/README",
        "model axis": "examples/README",
        "Dataset": "data",
        "checkpoint orbax": "saving",
        "validation": "evaluation",
        "multi host": "many_hosts",
        "two hosts": "many_hosts",
        "shuffle seed": "changing_runs",
        "Keras": "recipes",
        "fit": "recipes",
        "model.fit": "recipes",
        "steps_per_epoch": "recipes",
        "validation_data": "recipes",
        "set_random_seed": "recipes",
        "keras predict": "recipes",
        "restart": "saving",
        "numpy arrays": "data",
        "num_workers": "other_machines",
        "set_mesh": "options",
        "PartitionSpec": "options",
        "collate_fn": "coming_from",
        "DistributedSampler": "coming_from",
        "incarnation": "troubleshooting",
        "hang": "troubleshooting",
        "orbax": "saving",
        "simulate hosts": "many_hosts",
    }.items(),
)
def test_the_search_shows_the_right_page_first(word, page, index):
    word, scores = word.lower(), []
    for entry, places in index["indexentries"].items():
        if word in entry and len(word) >= len(entry) / 2:
            score = round(100 * len(word) / len(entry))
            scores += [(score, index["docnames"][file]) for file, _, is_main in places if is_main]
    best, found = max(scores)
    assert found == page
    assert best > OTHER_RESULTS
    assert [other for score, other in scores if score == best] == [page]


def test_the_reference_has_types_and_defaults(site):
    page = re.sub(r"<[^>]+>", "", (site / "api" / "grain_shard.shard_to.html").read_text())
    for shown in (
        "mask_key='valid_mask'",
        "device_buffer_size=2",
        "on_bad_record='error'",
        "mask_key (str | None)",
        "cpu_buffer_size (int | None)",
    ):
        assert shown in re.sub(r"\s+", " ", page), shown


def test_code_has_a_button_that_copies_it(site):
    page = (site / "saving.html").read_text()
    for name in ("clipboard.min.js", "copybutton.js"):
        assert name in page
        assert (site / "_static" / name).exists()
    assert "button.copybtn { opacity" in (site / "_static" / "site.css").read_text()


def test_a_dark_page_inverts_drawings_and_no_photograph(site):
    style = (site / "_static" / "site.css").read_text()
    spared = set(re.findall(r'article img:not\(\[src\$="(\.\w+)"\]\) { filter: invert', style))
    pictures = (site / "_images").iterdir()
    assert spared == {file.suffix for file in pictures if file.read_bytes().startswith(b"\xff\xd8")}
