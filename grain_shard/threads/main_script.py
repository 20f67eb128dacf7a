"""Refuses a main script that would call ``jax.distributed.initialize()`` in each worker process.

Python imports the main script in each process that it starts by ``spawn``. If the import calls
``initialize``, the worker joins the job in place of its host, and JAX ends all hosts.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from grain_shard.errors import ShardingError

# The remedy for a loop that each worker would begin, too.
GUARD = (
    'put the loop of the main script under `if __name__ == "__main__":`, because each worker'
    " imports that script."
)
# Names that tell the main process from a worker.
_OF_GUARDS = {"__name__", "parent_process", "current_process"}


def refuse_repeated_initialize() -> None:
    """Raises an error if a worker process that imports the main script would join the hosts.

    Calls in other modules that the script imports are not found.

    Raises:
        ShardingError: The main script calls ``jax.distributed.initialize()`` when it is imported.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or jax.process_count() == 1:
        return
    line = 0
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # then nothing is known
        line = line_of_initialize(Path(path).read_text())
    if line:
        raise ShardingError(
            "num_workers starts processes that import the main script, and the import would call"
            f" jax.distributed.initialize() again (line {line} of {path}).",
            remedy='call it under `if __name__ == "__main__":`, as the loop.',
        )


def line_of_initialize(script: str) -> int:
    r"""Returns the line at which a script calls ``distributed.initialize`` when it is imported.

    Example:
        >>> line_of_initialize("import jax\njax.distributed.initialize()")
        2
        >>> line_of_initialize("def main(): jax.distributed.initialize()\nif several: main()")
        2
        >>> line_of_initialize("if __name__ == '__main__': jax.distributed.initialize()")
        0

    Args:
        script: The source of the script.

    Returns:
        The number of the line; 0 without such a call.
    """
    tree = ast.parse(script)
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.FunctionDef)}
    for call in _calls_at_import(tree):
        inner = bodies.get(ast.unparse(call.func), [])
        if any(map(_initializes, [call, *(c for node in inner for c in _calls_at_import(node))])):
            return call.lineno
    return 0


def _initializes(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("distributed.initialize")


def _calls_at_import(node: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls that run when a node runs, without the bodies of functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return
    if isinstance(node, ast.If):
        parts = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.test)}
        if parts & _OF_GUARDS:
            return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls_at_import(child)
