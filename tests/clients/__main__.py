"""``python -m tests.clients NAME...``: makes a client's environment, and checks it there."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import fnmatch
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "recipes.md"
RUNS = FOLDER / "last_runs.txt"
CLIENTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if path.read_text().startswith("# /// script")
)
# The two that cost least, which CI runs.
CHEAPEST = ["orbax_v1", "substrax_datarax"]
RECIPE = re.compile(r"^# recipe\n(.*?)^# end of recipe\n", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"(<!-- not run: the recipe of (\S+) -->\n```python\n)(.*?)(```)", re.DOTALL)


def metadata(name: str) -> dict:
    """The head of a client's file: PEP 723, and our own table ``[tool.clients]``.

    ``requires-python`` is ``==3.12.*``. ``dependencies`` are the newest pins, the client's own
    first. The table may have ``lowest``, pins in the place of those of the same packages, and
    ``lowest-python``, the Python to go with them; ``no-deps``, packages that are installed without
    the packages that they ask for; ``sources``, a package whose source archive is unpacked, too;
    and ``note``, a word for the printed line.
    """
    lines = itertools.takewhile(
        lambda line: line != "# ///", (FOLDER / f"{name}.py").read_text().splitlines()[1:]
    )
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


def ours_of(head: dict) -> dict:
    """The table ``[tool.clients]``."""
    return head.get("tool", {}).get("clients", {})


def recipe(path: str) -> str:
    """The lines that a user copies of a client's file, or of an example that a client runs."""
    parts = RECIPE.findall((ROOT / path).read_text())
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n" * bool(parts)


def with_recipes(page: str) -> str:
    """The page with each recipe as it stands in its file."""
    return SHOWN.sub(lambda found: found[1] + recipe(found[2]) + found[4], page)


def with_results(lines: str, results: dict[str, str]) -> str:
    """The lines of the last runs, with new lines in the place of older ones.

    Args:
        lines: The lines so far.
        results: New lines by their first words, which name the client and its pins.
    """
    # Without the names of the checks, which docs/recipes.md gives once.
    short = {begin: re.sub(r" held \(.*?\)", " held", line) for begin, line in results.items()}
    old = {re.split(r",|:", line)[0]: line for line in lines.splitlines()}
    return "".join(f"{line}\n" for _, line in sorted((old | short).items()))


def package_of(requirement: str) -> str:
    """The name of the package that a requirement asks for."""
    return re.split(r"[\[<>=!~ ;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def requirements(name: str, pins: str) -> tuple[list[str], list[str]]:
    """What pip installs with all that it asks for, and what it installs alone."""
    head = metadata(name)
    ours = ours_of(head)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    chosen = {package_of(r): r for r in project + head["dependencies"]}
    if pins == "lowest":
        chosen |= {package_of(r): r for r in ours.get("lowest", [])}
    alone = {package_of(r): chosen.pop(package_of(r), r) for r in ours.get("no-deps", [])}
    return sorted(chosen.values()), sorted(alone.values())


def python_for(wanted: str) -> str:
    """An interpreter of the version ``==3.12.*``."""
    version = wanted.removeprefix("==").removesuffix(".*")
    if fnmatch.fnmatch(platform.python_version(), version + ".*"):
        return sys.executable
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}") if not of_pyenv else str(of_pyenv[-1])
    if found is None:
        raise LookupError(f"this machine has no Python {version}")
    return found


def folder_of(name: str, pins: str) -> Path:
    """Where the client's virtual environment is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grain_shard_clients")
    return cache / f"{name}-{pins}"


def is_made(name: str, pins: str) -> bool:
    """Whether that environment has what the client requires now."""
    stamp = folder_of(name, pins) / "requirements.json"
    return stamp.exists() and json.loads(stamp.read_text()) == list(requirements(name, pins))


def environment(name: str, pins: str) -> Path:
    """The Python of the client's virtual environment, made anew where its requirements changed."""
    folder = folder_of(name, pins)
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made(name, pins):
            wanted = requirements(name, pins)
            head = metadata(name)
            version = head["requires-python"]
            if pins == "lowest":
                version = ours_of(head).get("lowest-python", version)
            made_by = python_for(version)
            subprocess.run([made_by, "-m", "venv", "--clear", folder], check=True)
            pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            for packages, options in zip(wanted, ([], ["--no-deps"]), strict=True):
                if packages:
                    subprocess.run([*pip, *options, *packages], check=True, stdout=sys.stderr)
            if sources := ours_of(head).get("sources"):
                get = [python, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", ":all:"]
                subprocess.run([*get, "-d", folder / "sources", sources], check=True)
                for archive in (folder / "sources").glob("*.tar.gz"):
                    shutil.unpack_archive(archive, folder / "sources", filter="data")
            (folder / "requirements.json").write_text(json.dumps(wanted))
    return python


def contained(command: list) -> list:
    """The command in a namespace of processes of its own, where the system allows one.

    What the client leaves behind then ends with it, and it reaches no other process of the machine.
    """
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    unshare.append("--kill-child")
    allowed = (
        shutil.which("unshare")
        and not subprocess.run([*unshare, "true"], capture_output=True).returncode
    )
    return [*unshare, *command] if allowed else command


def check(name: str, pins: str, timeout_s: float) -> tuple[bool, str]:
    """Runs a client's checks; whether all held, and the line that says so."""
    python = environment(name, pins)
    packages = [package_of(metadata(name)["dependencies"][0]), "jax", "grain", "orbax-checkpoint"]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "CLIENT_SOURCES": str(python.parents[1] / "sources"),
        "CLIENT_PACKAGES": " ".join(dict.fromkeys(packages)),
        "CLIENT_TIMEOUT_S": str(timeout_s),
    }
    command = contained([str(python), "-m", f"tests.clients.{name}"])
    try:
        # The run that is not done in time ends first, and says where its hosts stand.
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s + 60,
        )
        line = (done.stdout.strip().splitlines() or [f"ended with exit code {done.returncode}"])[-1]
        held = done.returncode == 0
    except subprocess.TimeoutExpired:
        line, held = f"FAILED: not done within {timeout_s:g} s", False
    note = ours_of(metadata(name)).get("note")
    today = datetime.date.today().isoformat()
    return held, f"{name} {pins}, {today}: {line}" + (f" [{note}]" if note else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--cheapest", action="store_true", help="those that CI runs")
    pins = ("lowest", "newest", "both")
    parser.add_argument("--pins", choices=pins, default="newest", help="of the packages")
    parser.add_argument("--timeout", type=float, default=1500, metavar="S", help="of a client")
    write = f"write the recipes into docs/recipes.md, and the results into {RUNS.name}"
    parser.add_argument("--write", action="store_true", help=write)
    parser.add_argument("--python", metavar="NAME", help="print the client's Python, and end")
    args = parser.parse_args()
    if args.python:
        print(environment(args.python, args.pins))
        return 0
    names = args.names + args.cheapest * CHEAPEST if not args.all else CLIENTS
    if unknown := set(names) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    all_held = True
    if args.write:
        PAGE.write_text(with_recipes(PAGE.read_text()))
    for name in names:
        for chosen in ("lowest", "newest") if args.pins == "both" else (args.pins,):
            try:
                held, line = check(name, chosen, args.timeout)
            except (LookupError, subprocess.CalledProcessError) as error:
                # CI runs on machines without this Python, too. There the other client is left.
                print(f"{name} {chosen}: not run: {error}", flush=True)
                all_held &= args.cheapest and isinstance(error, LookupError)
                continue
            print(line, flush=True)
            all_held &= held
            if args.write:  # now: the next client may take half an hour
                RUNS.write_text(with_results(RUNS.read_text(), {f"{name} {chosen}": line}))
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
