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


def require(extra: str, use: str, instead: str = "") -> None:
    """Raises an error if the modules of an optional part are not installed.

    Args:
        extra: The optional part, such as "plot".
        use: The function that needs it in words, as the subject of a sentence: "a timeline".
        instead: Words for another remedy, at the end of the message; "" for none.

    Raises:
        GrainShardError: A module of this part is not installed.
    """
    if lacking := missing(EXTRAS[extra][0]):
        packages = " and ".join(_PACKAGES.get(module, module) for module in lacking)
        raise GrainShardError(
            f"{use} needs {packages}, which is not installed.\n"
            f'  remedy: pip install "grain-shard[{extra}]"{instead}'
        )
