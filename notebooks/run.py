"""Runs the notebooks from clean: each with a kernel of its own, as a copy in a new folder.

    python notebooks/run.py              # all of them; the first cell that raises ends it
    python notebooks/run.py 02 05        # those whose names start with these
    python notebooks/run.py --write      # and puts the new outputs into the committed files

A notebook leaves nothing behind: no file in its folder or in the temporary one, and no thread of
grain_shard's. What is written has no warning and no path of the machine that it ran on.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

FOLDER = Path(__file__).resolve().parent
CELL_TIMEOUT_S = 300

# Runs as a last cell, which is taken off again.
NO_THREAD_IS_LEFT = """
import gc, threading
gc.collect()
left = [t for t in threading.enumerate() if t.name.startswith("grain-shard")]
for thread in left:
    thread.join(timeout=60)  # that of an iterator which was just let go of ends by itself
    assert not thread.is_alive(), f"close their iterators: {left}"
"""


def run(path: Path) -> nbformat.NotebookNode:
    """Executes a notebook in a new folder.

    Raises:
        CellExecutionError: A cell raised; the error shows it with its traceback.
        RuntimeError: The notebook left files behind.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(NO_THREAD_IS_LEFT))
    with tempfile.TemporaryDirectory(prefix="notebook-") as scratch:
        working, temporary = Path(scratch, "working"), Path(scratch, "temporary")
        working.mkdir()
        temporary.mkdir()
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            startup_timeout=CELL_TIMEOUT_S,  # of the kernel; a minute if it is not said
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(working)}},
        )
        beside = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
        client.execute(env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": beside})
        if left := [str(file.relative_to(scratch)) for file in Path(scratch).glob("*/*")]:
            raise RuntimeError(f"{path.name} left files behind: {', '.join(left)}")
    notebook.cells.pop()
    # What one cell prints arrives in a number of pieces that differs from run to run.
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def noise(notebook: nbformat.NotebookNode) -> list[str]:
    """What no committed notebook should show: warnings, and paths of this machine."""
    here = {str(FOLDER.parent), str(Path.home()), sys.prefix, tempfile.gettempdir()}
    found = []
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                found.append(f"cell {number} writes to stderr: {output.text}")
            shown = {k: v for k, v in output.get("data", {}).items() if k.startswith("text/")}
            text = "\n".join([output.get("text", ""), *shown.values()])
            found += [f"cell {number} shows the path {path}" for path in here if path + "/" in text]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="how their names start (default: all)")
    parser.add_argument(
        "--write", action="store_true", help="write the outputs into the committed files"
    )
    args = parser.parse_args(argv)
    paths = sorted(
        path for path in FOLDER.glob("*.ipynb") if path.name.startswith(tuple(args.names or [""]))
    )
    if not paths:
        parser.error(f"no notebook's name starts with {' or '.join(args.names)}")
    for path in paths:
        began = time.perf_counter()
        try:
            notebook = run(path)
        except (CellExecutionError, RuntimeError, TimeoutError) as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        if args.write:
            if found := noise(notebook):
                print(f"{path.name} is not written:", *found, sep="\n  ", file=sys.stderr)
                return 1
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
