"""Builds the documents as a site with a search: into build/site, to be opened from the disk.

    pip install ".[docs]" && python docs/build.py

Sphinx is given build/site_source, which is put together here: the pages of docs/, the README as the
first page, the notebooks as they are with their outputs, the measurements, and a reference that is
written from the public names and the help of the commands. A link between files of the repository
becomes one between pages; what is no page can be downloaded. Any warning is an error.
"""

import enum
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import messages  # noqa: E402

SOURCE, SITE = ROOT / "build" / "site_source", ROOT / "build" / "site"

MODULES = ["checkpoint", "measuring", "placement", "rehearse", "training"]
COMMANDS = ["demo", "plan", "rehearse", "doctor"]

# Files of the repository that are pages beside those of docs/ and notebooks/, and where.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "measured.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}

# Pages that are made of the source: where a link to the file that says it leads to in the site.
MADE = {"docs/messages.py": "messages.md"}

# The navigation. A page of docs/ that is in none of these lists is a warning of Sphinx's.
SECTIONS = {
    "Tutorials": ["tutorials/*", "examples"],
    "How to": [
        "data", "buckets", "saving", "evaluation", "slow_input", "other_machines", "seeing",
        "many_hosts", "faults", "stats", "changing_runs", "mixtures", "microbatches", "meshes",
        "after_batch", "recipes", "coming_from",
    ],
    "Reference": [
        "options", "names", "reference/*", "commands", "troubleshooting", "messages", "limits",
        "changelog",
    ],
    "Explanation": [
        "contract", "streams", "how_rows_are_found", "measured", "benchmarks", "contributing",
    ],
}  # fmt: skip


def pages():
    """Every page of the site: the file of the repository that it is, and its place in the site."""
    found = {ROOT / file: page for file, page in ELSEWHERE.items()}
    found |= {file: file.name for file in sorted((ROOT / "docs").glob("*.md"))}
    return found | {
        file: f"tutorials/{file.name}" for file in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }


def title_of(file):
    """The title of a page that is a file of the repository: its first heading."""
    return re.search(r"^# (.*)$", file.read_text(), re.MULTILINE)[1]


def with_links_of_the_site(text, file, page, places):
    """The text of a page, in which links to files of the repository lead to what the site has.

    A file that is no page is copied to files/ and can be downloaded, or is a picture. A link that
    says no more than the name of a page has that page's title in the site.
    """

    def link(match):
        words = match[1]
        target, hash_, anchor = match[2].partition("#")
        linked = (file.parent / target).resolve()
        if not target or ":" in target or not linked.exists():
            return match[0]
        if linked.is_dir():
            linked = next((f for f in places if f.parent == linked), None)
            if linked is None:
                return match[0]
        if linked in places:
            place = places[linked]
            if Path(words or "").name == linked.name:
                words = title_of(linked)
        else:
            place = f"files/{linked.relative_to(ROOT)}"
            (SOURCE / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, SOURCE / place)
        there = os.path.relpath(place, Path(page).parent)
        return f"{'' if words is None else f'[{words}'}]({there}{hash_}{anchor})"

    text = re.sub(r"\[!\[[^]]*\]\([^)]*colab-badge[^)]*\)\]\([^)]*\)", "", text)  # from elsewhere
    return re.sub(r"(?:\[([^][]*))?\]\(([^)\s]+)\)", link, text)


def public_names():
    """Every public name in full, and the one that describes it: the first for the same thing.

    They are those of a module's `__all__`, or else what it defines and names.md has.
    """
    first, described = {}, {}
    in_order = (ROOT / "docs" / "names.md").read_text()
    for module_name in ["grain_shard", *(f"grain_shard.{module}" for module in MODULES)]:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module_name and f"`{name}`" in in_order
        ]
        for name in sorted(names, key=lambda name: in_order.find(f"`{name}`")):
            full, value = f"{module_name}.{name}", getattr(module, name)
            if not inspect.ismodule(value):
                described[full] = first.setdefault(id(value), full)
    return described


def reference(module_name, described):
    """A page with the docstrings of a module and of its public names, in the order of names.md."""
    module = importlib.import_module(module_name)
    blocks, elsewhere = [f".. automodule:: {module_name}\n"], []
    for full, first in described.items():
        owner, _, name = full.rpartition(".")
        value = getattr(module, name, None)
        if owner != module_name:
            continue
        if first != full:
            elsewhere.append(f"| `{name}` | `{first}` |\n")
        elif inspect.isclass(value):
            # Members of an enum have no docstrings.
            options = "members:\n   :undoc-members" if issubclass(value, enum.Enum) else "members"
            blocks.append(f".. autoclass:: {full}\n   :{options}:\n")
        else:
            blocks.append(f".. autofunction:: {full}\n")
    body = "\n".join(blocks)
    page = f"# `{module_name}`\n\n```{{eval-rst}}\n{body}\n```\n"
    if elsewhere:
        page += "\n## Described elsewhere\n\n| here | is the same as |\n|---|---|\n"
    return page + "".join(elsewhere)


def commands():
    """A page with the help of every command."""
    parts = [
        "# The commands\n",
        "What each command prints with `--help`. `grain-shard` is short for"
        " `python -m grain_shard`. With which codes they end is told under"
        " [Public names](names.md#commands).\n",
    ]
    for command in COMMANDS:
        words = [sys.executable, "-m", "grain_shard", command, "--help"]
        environment = os.environ | {"COLUMNS": "88", "PYTHONPATH": str(ROOT)}
        shown = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        parts.append(f"## {command}\n\n```text\n{shown}```\n")
    return "\n".join(parts)


def navigation():
    """The lists of pages, as Sphinx wants them on the first page."""
    for caption, entries in SECTIONS.items():
        there = [e for e in entries if "*" in e or (SOURCE / f"{e}.md").exists()]
        lines = "\n".join(there)
        yield f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{lines}\n```\n"


def put_together():
    """Writes the folder that Sphinx reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    places = pages()
    leads_to = places | {ROOT / file: page for file, page in MADE.items()}
    for folder in ("tutorials", "reference"):
        (SOURCE / folder).mkdir(parents=True)
    for file, page in places.items():
        (SOURCE / page).write_text(with_links_of_the_site(file.read_text(), file, page, leads_to))
    described = public_names()
    for name in ["grain_shard", *(f"grain_shard.{module}" for module in MODULES)]:
        (SOURCE / "reference" / f"{name}.md").write_text(reference(name, described))
    (SOURCE / "commands.md").write_text(commands())
    (SOURCE / "messages.md").write_text(messages.page())
    with (SOURCE / "index.md").open("a") as index:
        index.writelines(navigation())


def main():
    put_together()
    shutil.rmtree(SITE, ignore_errors=True)
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-c"]
    words += [ROOT / "docs", "-d", ROOT / "build" / "site_cache", SOURCE, SITE]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode == 0:
        print(f"open {SITE / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
