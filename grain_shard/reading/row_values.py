"""The values of a row, in a form that two readings of one record are compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.errors import describe_leaf
from grain_shard.trees import ROOT, as_arrays, flatten, is_text, path_of

# Most characters of a value in a message, and of a text in place of it, such as an error.
_SHOWN, _SHOWN_WORDS = 60, 200


class Lost(str):
    """The reason why there is no row: the record cannot be read, or is masked."""

    __slots__ = ()


# The leaves of one row, by path. A path to a tuple or a list has its class as text. If there is no
# row, the only entry is the reason, as `Lost`.
Leaves = dict[str, np.ndarray | str]


class Row(NamedTuple):
    """A row that one thread read alone.

    Attributes:
        leaves: Copies of its leaves, by path.
        bits: What `bits_of` returns for the row, to compare other readings of it fast.
    """

    leaves: Leaves
    bits: list[Any]

    @classmethod
    def of(cls, row: Any) -> Row:
        return cls(leaves_of_row(row), bits_of(row))

    @classmethod
    def lost(cls, why: str) -> Row:
        return cls({ROOT: Lost(why)}, [])


NO_ROW = Row.lost("no row")


class Difference(NamedTuple):
    """A leaf that two readings of one record gave with different values.

    Attributes:
        record: Index of the record in the dataset of the sample.
        path: Path of the leaf.
        got: The value that the pipeline's threads, worker or executor gave, as in `Leaves`; None if
            it has no such leaf.
        alone: The value that one thread got that read alone; None if it has no such leaf.
    """

    record: int
    path: str
    got: np.ndarray | str | None
    alone: np.ndarray | str | None


def leaves_of_row(row: Any) -> Leaves:
    """Returns copies of the leaves of a row, and the names of its containers, by path."""
    paths, leaves, _ = flatten(row)
    # A subclass of str may have another `__str__`, which NumPy would take.
    texts = [str.__str__(leaf) if isinstance(leaf, str) else leaf for leaf in leaves]
    arrays = as_arrays(paths, texts)
    values = {path: np.array(array) for path, array in zip(paths, arrays, strict=True)}
    return {**values, **containers(row)}


def containers(tree: Any, path: str = ROOT) -> dict[str, str]:
    """Returns the class of each container in a tree, by path. Any mapping at the root is a dict."""
    below = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if below and not below[0][0]:  # the tree is a leaf
        return {}
    is_batch = path == ROOT and isinstance(tree, Mapping)  # the mask makes a dict of it
    found = {path: f"a {dict.__name__ if is_batch else type(tree).__name__}"}
    for keys, node in below:
        found |= containers(node, path_of(keys, path))
    return found


def is_lost(leaves: Leaves) -> bool:
    """Returns True if a record has no row, because it cannot be read or is masked."""
    return isinstance(leaves.get(ROOT), Lost)


def differences(record: int, got: Leaves, alone: Leaves) -> Iterator[Difference]:
    """Yields the leaves that only one of two readings has, or that have other bits."""
    if is_lost(got) and is_lost(alone):
        return
    for path in sorted(alone | got):  # a container comes before its leaves
        other, value = got.get(path), alone.get(path)
        if isinstance(other, np.ndarray) and isinstance(value, np.ndarray):
            is_same = same_values(other, value)
        else:
            is_same = isinstance(other, str) and other == value
        if not is_same:
            yield Difference(record, path, other, value)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if two arrays have the same dtype, shape and bits, or the same text."""
    if is_text(a) or is_text(b):  # NumPy's text has a width, which is no part of the value
        return a.tolist() == b.tolist()
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def bits_of(row: Any) -> list[Any]:
    """Returns the structure of a row and the bytes of its leaves, which compare fast."""
    leaves, structure = jax.tree.flatten(row)
    arrays = np.ndarray | np.generic
    return [structure, *(x.tobytes() if isinstance(x, arrays) else x for x in leaves)]


def num_bytes(row: Row) -> int:
    """Returns the bytes of the arrays of a row."""
    return sum(leaf.nbytes for leaf in row.leaves.values() if isinstance(leaf, np.ndarray))


def shown(value: np.ndarray | str | None) -> str:
    """Returns the first numbers of an array as text of at most 60 characters."""
    if value is None:
        return "no such leaf"
    if isinstance(value, str):
        return value[:_SHOWN_WORDS]
    text = np.array2string(value, threshold=8, edgeitems=2, separator=", ")
    return " ".join(text.split())[:_SHOWN]


def shown_apart(one: np.ndarray | str | None, other: np.ndarray | str | None) -> tuple[str, str]:
    """Returns two values that differ as two texts that differ.

    If their first values are the same, the texts are their dtypes and shapes, or the first values
    that differ. Values that only have other bits, such as two NaNs, are shown as bytes.
    """
    texts = shown(one), shown(other)
    if texts[0] != texts[1] or not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return texts
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return describe_leaf(one), describe_leaf(other)
    pairs = zip(map(_bits, one.flat), map(_bits, other.flat), strict=True)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    at = [int(i) for i in np.unravel_index(first, one.shape)]
    values = [str(x.flat[first])[:_SHOWN] for x in (one, other)]
    if values[0] == values[1]:
        values = [repr(_bits(x.flat[first]))[:_SHOWN_WORDS] for x in (one, other)]
    return f"{values[0]} at {at}", f"{values[1]} at {at}"


def _bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.generic) else value
