"""Records and batches as trees: their leaves, the paths of leaves, and checks of batches.

For JAX a tree is a dict, list, tuple, NamedTuple, OrderedDict, defaultdict, None, and
registered classes. A leaf is an array, a number or text. Any other object is refused, and the error
names its class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf

Batch = Any  # a tree of numpy arrays that share their leading axis
ROOT = "batch"
# The classes of leaves that are arrays of NumPy, numbers or text.
_ARRAYS = np.ndarray, np.generic, int, float, complex, str, bytes
# The most frequent of these classes, and the class of None, which has no leaf.
_FREQUENT = {np.dtype(code).type for code in np.typecodes["All"]}
_FREQUENT |= {np.ndarray, np.memmap, bool, int, float, complex, str, bytes, type(None)}
# Attributes of rows and tables with labels, such as pandas, polars and pyarrow have.
_LABELS = {"iloc", "columns", "column_names"}
MASK_KEY = "valid_mask"  # default key of the mask, which is True for rows that are not padding


def flatten(tree: Any, root: str = ROOT) -> tuple[list[str], list[Any], Any]:
    """Returns the paths, the leaves and the structure of a tree.

    As in JAX, None is a tree without leaves. Each path begins with `root`.

    Raises:
        ShardingError: A dict has keys that cannot be sorted.
    """
    leaves, structure = leaves_of(tree, root)
    paths = [path_of(keys, root) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return paths, leaves, structure


def path_of(keys: Iterable[Any], root: str = ROOT) -> str:
    """Returns JAX's keys of a leaf as text, such as ``batch['image']`` with the root "batch"."""
    return root + jax.tree_util.keystr(tuple(keys))


def leaves_of(
    tree: Any, root: str = ROOT, name: Callable[[], str] = lambda: "the keys"
) -> tuple[list[Any], Any]:
    """Returns the leaves and the structure of a tree, faster than `flatten` with its paths.

    Args:
        tree: The tree.
        root: The first part of the path in a message.
        name: Returns the first words of a message, such as "the keys". Only an error calls it.

    Raises:
        ShardingError: A dict has keys that cannot be sorted.
    """
    try:
        return jax.tree.flatten(tree)
    except ValueError:  # JAX cannot sort the keys of a dict
        pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_mixed_keys)[0]
        for keys, node in pairs:
            if _has_mixed_keys(node):
                raise ShardingError(
                    f"{name()} {', '.join(map(repr, node))} cannot be sorted, and JAX sorts the"
                    " leaves of a dict by key.",
                    path=path_of(keys, root),
                    leaf=describe_leaf(node),
                    remedy="use keys of one type, such as strings.",
                ) from None
        raise


def _has_mixed_keys(node: Any) -> bool:
    return isinstance(node, dict) and len({isinstance(key, str) for key in node}) > 1


def check_record(record: Any, *, is_changed_later: bool) -> None:
    """Checks a record that Grain's own ``.batch`` stacks.

    Args:
        record: The record.
        is_changed_later: True if a function of the user changes the batch afterwards. Lists and
            objects are then allowed, because that function may make arrays of them. Still refused
            is a mapping whose keys NumPy would stack in place of its values.

    Raises:
        ShardingError: A leaf is an object of a class that JAX does not know, or there is a list of
            numbers or text.
    """
    # This comes first, because its error names keys that cannot be sorted.
    paths, leaves, _ = flatten(record)
    if not is_changed_later:
        check_lists(record)
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_changed_later or (_is_mapping(leaf) and np.ndim(leaf)):
            check_leaf(path, leaf)


def check_leaf(path: str, leaf: Any) -> None:
    """Refuses a leaf that is not an array, a number, text, or a sequence of these.

    For JAX, any object of a class that it does not know is a leaf: a set, a table of pandas, a
    dataclass. Each kind of object gets a remedy of its own.

    Raises:
        ShardingError: The leaf is such an object. The message names its class.
    """
    if isinstance(leaf, _ARRAYS):
        return
    name, has = type(leaf).__name__, set(dir(leaf))
    if has & _LABELS:
        problem = f"NumPy takes the values of a {name} without their labels."
        remedy = "call .to_dict() in .map for a dict of named values, or .to_numpy() for an array."
    elif _is_mapping(leaf):
        problem = f"JAX knows no tree of the mapping {name}, so its values would be lost."
        remedy = "turn it into a dict: .map(dict) for a whole record, dict(leaf) for a leaf of it."
    elif _is_array(leaf) or has >= {"__len__", "__getitem__"}:
        return
    elif "__iter__" in has:
        problem = f"NumPy makes no array of the items of the class {name}."
        remedy = (
            "turn it into an array in .map, by np.array(list(leaf)). For a set, whose order differs"
            " between processes, by np.array(sorted(leaf))."
        )
    elif "__dict__" in has:
        problem = f"JAX knows no tree of the class {name} in this process."
        remedy = (
            f"return a dict from .map, such as vars(leaf). Or move {name} from the main script into"
            " a module, which registers it with JAX, for example by"
            " jax.tree_util.register_dataclass. Worker processes and executors do not register the"
            " classes of the main script."
        )
    else:
        problem = f"the class {name} is neither an array, nor a number, nor text."
        remedy = "turn it into a number in .map, or into text by str(leaf), or drop the leaf."
    raise ShardingError(problem, path=path, leaf=name, remedy=remedy)


def _is_mapping(leaf: Any) -> bool:
    looks_like_one = hasattr(leaf, "keys") and hasattr(leaf, "__getitem__")
    return isinstance(leaf, Mapping) or (looks_like_one and not _is_array(leaf))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")


def has_only_arrays(tree: Any) -> bool:
    """Returns True if every leaf is an array of NumPy, a number or text.

    This quick check takes less than a microsecond. It also returns False if a container or a leaf
    is of a rare class.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return type(tree) in _FREQUENT
    return are_arrays(tree) or all(map(has_only_arrays, tree))


def are_arrays(leaves: Iterable[Any]) -> bool:
    """Returns True if all leaves are arrays of NumPy, numbers or text, of frequent classes."""
    return _FREQUENT.issuperset(map(type, leaves))


def array_of(leaf: Any) -> Any:
    """Converts a leaf of another library, such as an image or a tensor, to an array of NumPy.

    Any other leaf is returned unchanged, and so is a leaf that `as_arrays` refuses later.

    Raises:
        Exception: The leaf does not become an array.
    """
    if isinstance(leaf, (*_ARRAYS, Mapping)) or any(hasattr(leaf, name) for name in _LABELS):
        return leaf
    # An image computes its `__array_interface__` when asked, so only the class is asked for it.
    if not (hasattr(type(leaf), "__array_interface__") or hasattr(leaf, "__array__")):
        return leaf
    try:
        array = np.asarray(leaf)
    except TypeError:
        if isinstance(leaf, jax.Array):  # typed PRNG keys
            return leaf
        raise
    return leaf if array.dtype.hasobject else array


def check_lists(tree: Any) -> None:
    """Refuses a list of numbers or text in a record or a batch.

    JAX would make a leaf of each item. A tuple is allowed: its items are meant as fields.

    Raises:
        ShardingError: The tree has such a list.
    """
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_list_of_values)[0]:
        if _is_list_of_values(node):
            remedy = (
                'turn the list into an array: call .with_format("numpy") on a Hugging Face dataset,'
                " or np.array(list) in .map before .batch. If each item is a field of its own, use"
                " a tuple."
            )
            if not keys:  # the whole record is a list, and an array alone would be refused, too
                remedy = (
                    "return a dict of arrays from .map before .batch, such as"
                    ' {"x": np.array(list)}, because only a dict can hold the mask.'
                )
            raise ShardingError(
                f"there is a list of numbers or strings, of length {len(node)}. JAX takes each item"
                " for a leaf, so the batch would hold an array for each item.",
                path=path_of(keys),
                leaf="list",
                remedy=remedy,
            )


def _is_list_of_values(node: Any) -> bool:
    return type(node) is list and bool(node) and all(map(_is_value, node))


def _is_value(item: Any) -> bool:
    if type(item) in (list, tuple):
        return bool(item) and all(map(_is_value, item))
    is_number = isinstance(item, int | float | complex | str | bytes)
    return is_number or getattr(item, "shape", None) == ()


def is_empty(node: Any) -> bool:
    """Returns True for a node without children: None, or an empty dict, list or tuple."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def is_text(leaf: Any) -> bool:
    """Returns True if a leaf is an array of strings, which stays on the host."""
    if not isinstance(leaf, np.ndarray):
        return False
    # NumPy's string dtypes drop NULs at the end of a string. So an array of Python strings, which
    # keeps them, is also text.
    as_objects = leaf.dtype.kind == "O" and any(
        all(isinstance(text, kind) for text in leaf.flat) for kind in (str, bytes)
    )
    return leaf.dtype.kind in "US" or as_objects


def as_arrays(
    paths: Sequence[str], leaves: Iterable[Any], name: Callable[[], str] = lambda: "the leaf"
) -> list[np.ndarray]:
    """Returns the leaves as NumPy arrays, of numbers that JAX can hold or of text.

    Args:
        paths: The paths of the leaves, for messages.
        leaves: The leaves.
        name: Returns the first words of a message, such as "the leaf". Only an error calls it.

    Raises:
        ShardingError: A leaf is not an array, a number or text. Or it is ragged, a masked array, of
            Python objects or PRNG keys, or of another dtype that no device can hold.
    """
    arrays = []
    for path, leaf in zip(paths, leaves, strict=True):
        check_leaf(path, leaf)
        try:
            array = np.asarray(leaf)
        except (ValueError, TypeError):  # for a ragged list (NumPy), or typed PRNG keys (JAX)
            array = np.empty((), object)
        # Name the class of the objects in the array, if it can be named.
        if array.dtype.kind == "O" and (item := _first_leaf(array)) is not None:
            check_leaf(path, item)
        if refusal := _refusal(leaf, array):
            problem, remedy = refusal
            shown = describe_leaf(leaf if array.dtype.kind == "O" else array)
            raise ShardingError(f"{name()} {problem}", path=path, leaf=shown, remedy=remedy)
        arrays.append(array)
    return arrays


def _refusal(leaf: Any, array: np.ndarray) -> tuple[str, str] | None:
    """Returns why no device can hold a leaf, and the remedy; None for text and allowed numbers."""
    if isinstance(leaf, np.ma.MaskedArray):
        return (
            "is a masked array, whose mask would be lost on the devices.",
            "return np.ma.filled(leaf, 0) from .map, and np.ma.getmaskarray(leaf) as another leaf.",
        )
    if array.dtype.kind == "O" and isinstance(leaf, jax.Array):
        return (
            "holds typed PRNG keys of JAX, which NumPy cannot hold.",
            "turn the keys into numbers in .map, with jax.random.key_data, and back into keys in"
            " the training step, with jax.random.wrap_key_data.",
        )
    if is_text(array) or is_numeric(array.dtype):
        return None
    if array.dtype.kind == "O":
        return (
            "holds Python objects, such as None or rows of different lengths.",
            "pad rows to one shape and replace None by a number in .map, or drop the leaf.",
        )
    if array.dtype.isnative:
        remedy = _remedy_of(array.dtype)
    else:
        remedy = 'convert the byte order in .map: .astype(x.dtype.newbyteorder("=")).'
    return f"has a dtype that JAX lacks: {array.dtype}.", remedy


def _first_leaf(objects: np.ndarray) -> Any:
    """Returns the first item of an object array that is a leaf for JAX; None if there is none."""
    return next((item for item in objects.flat if jax.tree_util.all_leaves([item])), None)


def _remedy_of(dtype: np.dtype) -> str:
    if dtype == jax.dtypes.float0:  # the dtype of an integer's gradient
        return "drop the leaf: it holds no values."
    if dtype.names:  # a structured dtype
        return "make a leaf of each field in .map: {name: x[name] for name in x.dtype.names}."
    if dtype.kind == "V":  # raw bytes
        return (
            "say in .map what the bytes are, for example .view(ml_dtypes.bfloat16). A .npy file"
            " does not keep such a dtype."
        )
    if dtype.kind in "mM":
        # Whole seconds fit into 32 bits, which JAX has without further settings.
        return f'convert times in .map by .astype("{dtype.kind}8[s]").astype(np.int64).'
    if dtype.kind == "c":
        return "convert complex numbers in .map by .astype(np.complex64)."
    return "convert numbers in .map by .astype(np.float32), and text by .astype(str)."


@functools.cache
def is_numeric(dtype: np.dtype) -> bool:
    """Returns True if JAX can hold the dtype: booleans and numbers, including ml_dtypes.

    The result is False for a byte order that is not the machine's, for NumPy's long doubles, and
    for text.
    """
    try:
        jax.eval_shape(lambda x: x, np.empty((), dtype))
    except TypeError:
        return False
    # `eval_shape` accepts float0 and NumPy's StringDType, but no accelerator can hold them.
    return dtype != jax.dtypes.float0 and dtype.kind != "T"


@dataclass(frozen=True)
class FlatBatch:
    """A flattened batch: its leaves, and their common number of rows.

    Attributes:
        arrays: The leaves.
        structure: The structure of the tree, as a `PyTreeDef` of JAX.
        rows: Size of the leading axis of every leaf that is not a scalar.
    """

    arrays: list[np.ndarray]
    structure: Any
    rows: int

    @classmethod
    def of(cls, batch: Batch) -> FlatBatch:
        """Flattens a batch.

        Raises:
            ShardingError: A leaf is of a class or dtype that no device can hold, there is a list of
                numbers, two leaves differ in their number of rows, or all leaves are scalars.
        """
        leaves, structure = leaves_of(batch)
        # Most batches are numeric arrays already. For them all slower checks are skipped.
        if not all(type(leaf) is np.ndarray and is_numeric(leaf.dtype) for leaf in leaves):
            check_lists(batch)
            leaves = as_arrays(flatten(batch)[0], leaves)
        sizes = {len(array) for array in leaves if array.ndim}
        if len(sizes) != 1:
            _refuse_sizes(flatten(batch)[0], leaves)
        return cls(leaves, structure, sizes.pop())

    @property
    def tree(self) -> Batch:
        """The batch as a tree of its leaves."""
        return self.structure.unflatten(self.arrays)

    @property
    def paths(self) -> list[str]:
        """Paths of the leaves, such as ``batch['image']``, for messages only: they are slow."""
        return flatten(self.structure.unflatten(range(self.structure.num_leaves)))[0]

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raises a `ShardingError` that shows the first leaf."""
        raise ShardingError(
            problem, path=self.paths[0], leaf=describe_leaf(self.arrays[0]), remedy=remedy
        )


def _refuse_sizes(paths: Sequence[str], arrays: Sequence[np.ndarray]) -> NoReturn:
    """Raises the error for leaves that differ in their number of rows, or are all scalars."""
    sized = [(path, array) for path, array in zip(paths, arrays, strict=True) if array.ndim]
    if not sized:
        raise ShardingError(
            "the batch has no leaf with a leading axis.",
            path=ROOT,
            remedy="call .batch(global_batch_size) before .shard_to. A function of .map after"
            " .batch must return arrays with a row per record.",
        )
    first_path, first = sized[0]
    path, array = next(pair for pair in sized if len(pair[1]) != len(first))
    raise ShardingError(
        f"the leading axis has {len(array)} rows, but {first_path} has {len(first)} rows.",
        path=path,
        leaf=describe_leaf(array),
        remedy="give every leaf one row per record. Only a scalar may belong to the whole batch.",
    )
