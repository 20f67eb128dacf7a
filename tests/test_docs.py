"""The documents: what they show runs, their pictures can be made again, their links lead somewhere.

An example with prompts is a doctest. Any other block of Python runs as it stands, in a process of
its own, unless a comment right above it says why not:

    <!-- not run: a reason -->        it is an outline, or wants a pod
    <!-- needs: pyarrow -->           runs where that is installed

What a block prints is what its last line says in a comment.
"""

import ast
import doctest
import importlib.util
import inspect
import itertools
import re
import textwrap
from pathlib import Path

import pytest
from flax import nnx

import grain_shard
from grain_shard import rehearse
from tests.programs import run

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "grain_shard" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

RUNNING = [page for page in PAGES if ">>> " in page.read_text()]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_examples_run(page):
    flags = doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert results.attempted
    # As the page says, flax's metrics had no mask once: a loss is then wrong.
    metrics_are_masked = "mask" in inspect.signature(nnx.metrics.Average.update).parameters
    assert results.failed == (page.name == "evaluation.md" and not metrics_are_masked)


def printed(code, folder, *arguments):
    """What a program prints, which ends without an error."""
    exit_code, out, err = run(code, folder / "example.py", *arguments)
    assert exit_code == 0, err
    return out


def block_with(word, page):
    """The one block of a page that has a word."""
    (code,) = [code for _, code in BLOCK.findall((ROOT / page).read_text()) if word in code]
    return code


def scripts():
    """Every block that is no doctest and is to run: its page, its needs, and itself."""
    for page in PAGES:
        for number, (note, code) in enumerate(BLOCK.findall(page.read_text())):
            if ">>> " in code or note.startswith("not run: "):
                continue
            needs = note.removeprefix("needs: ").split() if note.startswith("needs: ") else []
            yield pytest.param(code, needs, id=f"{page.name}-{number}")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "needs"), list(scripts()))
def test_blocks_run_as_pasted(code, needs, tmp_path):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    said = re.search(r"  # (.*)$", code.rstrip().splitlines()[-1])
    assert said, "let the last line print something, and say in a comment what it is"
    assert printed(code, tmp_path) == said[1] + "\n"


@pytest.mark.slow
def test_the_page_about_saving_goes_on_where_it_was_stopped(tmp_path):
    _, code = BLOCK.findall((ROOT / "docs/saving.md").read_text())[0]
    stopped = re.sub(
        r"^        state = train_step\(state, batch\)$",
        "        if step == 18:\n            manager.close()\n            raise SystemExit\n\\g<0>",
        code,
        flags=re.MULTILINE,
    )
    assert stopped != code
    assert printed(stopped, tmp_path) == ""
    for _ in range(2):  # from step 10 on; and with nothing left to do
        assert printed(code, tmp_path) == "30 613440.0\n"


@pytest.mark.slow
def test_the_page_about_saving_repeats_an_evaluation_in_which_it_was_stopped(tmp_path):
    code, count = re.subn(
        r"^        for batch in test_ds:",
        "        print(batches.epoch, step)\n"
        "        if batches.epoch == int(sys.argv[1]):\n            raise SystemExit\n\\g<0>",
        "import sys\n" + block_with("test_ds", "docs/saving.md"),
        flags=re.MULTILINE,
    )
    assert count == 1
    assert printed(code, tmp_path, "1") == "0 6\n1 12\n"
    assert printed(code, tmp_path, "-1") == "1 12\n2 18\n18 13752.0\n"
    assert printed(code, tmp_path, "-1") == "18 13752.0\n"


FEEDS = """\
    grain_shard.feeds(
        lambda feed: grain.MapDataset.range(640)[feed.shard_index :: feed.shard_count]
        .seed(42)
        .shuffle()
        .repeat()
        .map(lambda i: {"x": np.float32(i)})
        .to_iter_dataset(),
        num_feeds=4,
    )
    .batch(64)
"""


REPEATED = r"\1.repeat(10000)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "trains_on"),
    [(REPEATED, False), (FEEDS, False), (REPEATED, True)],
    ids=["random access", "feeds", "saves in the background"],
)
def test_the_page_about_saving_is_preempted_on_two_hosts(dataset, trains_on, tmp_path, monkeypatch):
    """A host's whole process group gets SIGTERM, as SLURM does it; then the job starts again."""
    monkeypatch.chdir(tmp_path)
    _, code = BLOCK.findall((ROOT / "docs/saving.md").read_text())[0]
    script = tmp_path / "train.py"
    for line, new in (
        (r"jax\.config\.update\(.*on a pod (jax\.distributed\.initialize\(\))\n", r"\1\n"),
        (r"(    grain\.MapDataset(?:.*\n)*    )\.repeat\(3\)\n", dataset),
        (r"    \.shard_to\(mesh\)\n", "    .shard_to(mesh, num_workers=1)\n"),
        (r"    for step, batch in .*\n", r"    first = step\n\g<0>"),
        (r"        if preempted:\n", "        if preempted or (first and step % 10 == 0):\n"),
        (r"        state = train_step.*\n", r"\g<0>        if step == 7: os.killpg(0, 15)\n"),
    ):
        code, count = re.subn(line, new, code)
        assert count == 1, line
    if trains_on:
        manager = block_with("reached_preemption", "docs/many_hosts.md")
        for line, new in (
            (r"        manager\.wait_until_finished\(\).*\n", ""),
            (r"folder = .*\n", manager + r"\g<0>"),
            (r"ocp\.CheckpointManager\(folder\)", "Manager(folder)"),
        ):
            code, count = re.subn(line, new, code)
            assert count == 1, line
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(code, '    ')}")
    steps = [0]
    for _ in range(2):
        result = rehearse.run_script([str(script)], hosts=2, devices_per_host=2)
        assert result.exit_code == 0, result.summary()
        assert not any("ERROR:absl:grain_shard" in output for output in result.outputs), result
        # The resource tracker may tell of Grain's shared memory after the last line of the script.
        (last,) = {re.findall(r"^\d+ [\d.e+]+$", output, re.M)[-1] for output in result.outputs}
        steps.append(int(last.split()[0]))
    assert 7 < steps[1] < steps[2]
    assert float(last.split()[1]) == steps[2] * sum(range(640)) / 10, "each epoch's records once"


def test_the_first_block_of_the_readme_is_one_that_runs():
    note, _ = BLOCK.findall((ROOT / "README.md").read_text())[0]
    assert note == ""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_text_of_a_link_is_no_path(page):
    texts = re.findall(r"\[([^]\[]+)\]\([^)]+\)", page.read_text())
    assert not [text for text in texts if re.fullmatch(r"[\w/.]+(\.md|/)", text)]


FENCED = re.compile(r"^( *)```(.*)\n(?:.*\n)*?\1```$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language(page):
    """Without one the site colors it as Python, an error message as well."""
    languages = [language for _, language in FENCED.findall(page.read_text())]
    assert "" not in languages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_prose_begins_with_a_number_as_a_list_does(page):
    """The page would show a list where a sentence only happens to be wrapped before its "1."."""
    last = 0
    for above, line in itertools.pairwise(FENCED.sub("", page.read_text()).splitlines()):
        if begins := re.match(r" *(\d+)\. ", line):
            assert not above or int(begins[1]) == last + 1 > 1, line
            last = int(begins[1])


def test_the_pictures_of_the_contract_can_be_made_again(tmp_path):
    (made_here := tmp_path / "pictures").mkdir()
    printed((ROOT / "docs/make_pictures.py").read_text(), tmp_path, str(made_here))
    made = {picture.name for picture in made_here.iterdir()}
    assert made == {picture.name for picture in (ROOT / "docs" / "pictures").iterdir()}
    shown = set(re.findall(r"\(pictures/([^)]+)\)", (ROOT / "docs" / "contract.md").read_text()))
    assert shown == made


def test_the_animation_of_the_readme_is_what_the_library_says():
    from docs.make_flow import PICTURE, draw

    assert draw() == PICTURE.read_text()


def texts(node):
    """Texts in a piece of source code, with `…` for the values that an f-string fills in."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def sources():
    return [ast.parse(path.read_text()) for path in (ROOT / "grain_shard").rglob("*.py")]


def test_troubleshooting_explains_messages_that_the_source_has():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    ours = page[page.index("## A pipeline or its data is refused") :]  # above: JAX, Grain, Python
    said = [text for tree in sources() for text in texts(tree)]
    explained = re.findall(r"^### `([^`]*)`$", ours, re.MULTILINE)
    assert len(explained) == ours.count("\n### ") > 10
    for message in explained:
        parts = [re.escape(part) for part in message.split("…") if part.strip()]
        assert any(re.search(".*".join(parts), text) for text in said), message


def test_every_sharding_error_has_a_remedy():
    nodes = [node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [node for node in nodes if getattr(node.func, "id", "") == "ShardingError"]
    assert len(calls) > 80
    for call in calls:
        named = {keyword.arg for keyword in call.keywords}
        if call.args and isinstance(call.args[0], ast.Constant | ast.JoinedStr):
            assert "remedy" in named or "remedy: " in "".join(texts(call)), ast.unparse(call)


def test_the_site_has_every_page_and_the_reference_every_public_name():
    entries = (ROOT / "docs/index.md").read_text().splitlines()
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= set(entries)
    reference = (ROOT / "docs/reference.md").read_text()
    for name in grain_shard.__all__:
        assert re.search(rf"^   {name}$", reference, re.MULTILINE), name
