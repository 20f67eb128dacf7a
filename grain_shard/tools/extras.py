"""The optional parts of this package: the use of each part, and the modules that it needs."""

from __future__ import annotations

from importlib.util import find_spec

from grain_shard.errors import GrainShardError

# For each optional part: its modules, and its use.
EXTRAS = {
    "demo": (("sklearn", "tqdm"), "python -m grain_shard demo"),
    "plot": (("matplotlib",), "profile(...).plot()"),
    "plan": (("libtpu",), "plan --topology: the topologies of TPUs"),
    "notebooks": (("jupyterlab", "ipywidgets", "nbclient"), "the notebooks"),
}
_PACKAGES = {"sklearn": "scikit-learn"}  # the package of a module, if their names differ


def missing(modules: tuple[str, ...]) -> list[str]:
    """Returns the modules of the tuple that are not installed."""
    return [module for module in modules if find_spec(module) is None]


def not_installed(use: str, extra: str, modules: list[str], instead: str = "") -> GrainShardError:
    """Returns the error for a function whose modules are not installed.

    Args:
        use: The function in words, as the subject of a sentence: "a timeline".
        extra: The optional part that installs the modules: "plot".
        modules: The modules that are missing.
        instead: Words for another remedy, at the end of the message; "" for none.
    """
    packages = " and ".join(_PACKAGES.get(module, module) for module in modules)
    return GrainShardError(
        f"{use} needs {packages}, which is not installed.\n"
        f'  remedy: pip install "grain-shard[{extra}]"{instead}'
    )
