"""The errors of this package, as a tree.

::

    GrainShardError
    ├── ShardingError (ValueError)         data, mesh, spec or batch size do not fit together
    ├── StateError (ValueError)            a saved state belongs to another pipeline
    ├── BadRecordsError (RuntimeError)     too many records cannot be read
    └── AgreementError (RuntimeError)      the hosts do not run the same program
        └── HostTimeoutError (TimeoutError)    a host did not answer in time

The message of a `ShardingError` has up to four parts, always in the same order: the leaf's path and
the problem; the leaf's shape, dtype and spec; the mesh axes and sizes; the remedy. A part is left
out if it is unknown, or if it has nothing to do with the error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn


@contextlib.contextmanager
def noting(where: str) -> Iterator[None]:
    """Adds a note to any error raised in the ``with`` block.

    Args:
        where: The place of the error in words, such as "in feed 3"; "" for no note.
    """
    try:
        yield
    except BaseException as error:
        if where:
            error.add_note(f"grain_shard: {where}")
        raise


class GrainShardError(Exception):
    """The root of every error that this package defines.

    Example:
        >>> try:
        ...     raise ShardingError("7 rows do not split into 2 shards.", remedy="use 8 rows.")
        ... except GrainShardError as error:
        ...     print(type(error).__name__)
        ShardingError
    """

    def add_note(self, note: str) -> None:
        """Adds a note, except Grain's note about the stack frames that Grain removes."""
        if "Grain has removed its internal frames" not in note:
            super().add_note(note)


class ShardingError(GrainShardError, ValueError):
    """The data, the mesh, the spec or the batch size do not fit together.

    Args:
        problem: The problem, in one sentence.
        path: The leaf's path in the batch, e.g. ``batch['tokens']``; None if all leaves are meant.
        leaf: The leaf's dtype and shape, e.g. ``int32[256, 1000]``; None if not known yet.
        spec: The leaf's `PartitionSpec`; None if the error has nothing to do with it.
        mesh_axes: (name, size) of every mesh axis.
        remedy: The change that the user can make.

    Example:
        >>> print(ShardingError("7 rows do not split into 2 shards.", path="batch['x']",
        ...                     leaf="float32[7]", mesh_axes=[("data", 2)], remedy="use 8 rows."))
        batch['x']: 7 rows do not split into 2 shards.
          leaf:   float32[7]   mesh: data=2
          remedy: use 8 rows.
    """

    def __init__(
        self,
        problem: str,
        *,
        remedy: str,
        path: str | None = None,
        leaf: str | None = None,
        spec: Any = None,
        mesh_axes: Iterable[tuple[str, int]] = (),
    ):
        self.problem: str = problem
        self.remedy: str = remedy
        self.path: str | None = path
        self.leaf: str | None = leaf
        self.spec: Any = spec
        self.mesh_axes: tuple[tuple[str, int], ...] = tuple(mesh_axes)
        super().__init__(problem)

    def with_mesh(self, mesh_axes: Iterable[tuple[str, int]]) -> ShardingError:
        """Adds the mesh axes to this error if it has none yet, and returns this error."""
        self.mesh_axes = self.mesh_axes or tuple(mesh_axes)
        return self

    def __str__(self) -> str:
        head = f"{self.path}: {self.problem}" if self.path else self.problem
        spec = None if self.spec is None else describe_spec(self.spec)
        facts = {"leaf": self.leaf, "spec": spec, "mesh": describe_mesh(self.mesh_axes)}
        known = "   ".join(f"{name}: {fact}" for name, fact in facts.items() if fact)
        # The first name, such as "leaf:", is two characters shorter than "remedy:" in the next
        # line. Two more spaces after it align the values of the two lines.
        known = [f"  {known.replace(': ', ':   ', 1)}"] if known else []
        return "\n".join([head, *known, f"  remedy: {self.remedy}"])

    def __reduce__(self) -> tuple[Any, ...]:
        # A Grain worker pickles its errors. Unpickling a BaseException calls __init__(*args), which
        # lacks the keyword argument `remedy`.
        return functools.partial(type(self), remedy=self.remedy), self.args, self.__dict__


class StateError(GrainShardError, ValueError):
    """A saved state belongs to another pipeline or dataset, or cannot be read.

    Example:
        >>> import grain, jax
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> def batches(num_records):
        ...     records = grain.MapDataset.range(num_records).map(lambda i: {"x": i})
        ...     return iter(records.batch(8).shard_to(mesh))
        >>> with batches(32) as saved, batches(40) as other:
        ...     try:
        ...         other.set_state(saved.get_state())
        ...     except StateError as error:
        ...         print("records" in str(error))
        True
    """


class BadRecordsError(GrainShardError, RuntimeError):
    """There are more unreadable records than the user allows. The message lists some of them.

    Example:
        >>> issubclass(BadRecordsError, RuntimeError)
        True
    """


@contextlib.contextmanager
def reopening() -> Iterator[None]:
    """Adds a note to an error of a stream that cannot go back to its position."""
    try:
        yield
    except (ShardingError, StateError) as error:
        error.add_note(
            "grain_shard: an interrupt ended the last call of next, which may have lost a batch of"
            " the stream. So the stream has to go back to its position, and cannot."
        )
        raise


class AgreementError(GrainShardError, RuntimeError):
    """The hosts do not run the same program, or another host has failed.

    The message names the host. It also gives the host's error, or the setting that differs.

    Attributes:
        series: The name of the iterator, if all its hosts raise this error; "" otherwise.

    Example:
        >>> issubclass(AgreementError, RuntimeError)
        True
    """

    series: str = ""


class HostTimeoutError(AgreementError, TimeoutError):
    """A host did not answer in time. The message names the host.

    Example:
        >>> issubclass(HostTimeoutError, TimeoutError), issubclass(HostTimeoutError, AgreementError)
        (True, True)
    """


def describe_mesh(mesh_axes: Iterable[tuple[str, int]]) -> str:
    """Returns the axes of a mesh as text, such as ``data=4, model=2``; "" without axes."""
    return ", ".join(f"{name}={size}" for name, size in mesh_axes)


def describe_spec(spec: Any) -> str:
    """Returns a `PartitionSpec` as text, such as ``P('data', None)``."""
    return f"P({', '.join(repr(entry) for entry in spec)})"


def describe_leaf(leaf: Any) -> str:
    """Returns an array as text, such as ``int32[256, 1000]``; for other objects, the class name."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{', '.join(map(str, leaf.shape or ()))}]"
    return type(leaf).__name__


def shortened(value: Any) -> str:
    """Returns the repr of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def text_of(error: BaseException) -> str:
    """Returns the text of an error. If the error's ``__str__`` raises, the text says so."""
    try:
        return str(error)
    except Exception:  # the class is the user's, and its fault must not hide the error
        return "(the text of this error cannot be read)"


def notes_of(error: BaseException) -> list[str]:
    """Returns the notes on an error that are text. A user's class may have added other objects."""
    return [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]


def describe_error(error: BaseException) -> str:
    """Returns the text of an error for other hosts: its class, its message and the notes on it.

    Only notes of this package count. For example, a note says in which feed the error was raised.
    """
    ours = "grain_shard: "
    notes = [note.removeprefix(ours) for note in notes_of(error) if note.startswith(ours)]
    in_notes = f" ({'; '.join(notes)})" if notes else ""
    return f"{type(error).__name__}: {text_of(error)}{in_notes}"


def require_int(name: str, value: Any, minimum: int) -> None:
    """Raises an error if an option is not an integer, or is too small.

    Raises:
        ShardingError: `value` is not an int of at least `minimum`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ShardingError(
            f"{name}={value!r} is not an integer of at least {minimum}.",
            remedy=f"pass {name} as a whole number, {minimum} or more.",
        )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises an error if an option is not one of the allowed words.

    Raises:
        ShardingError: `value` is not in `choices`.
    """
    if not (isinstance(value, str) and value in choices):
        raise ShardingError(
            f"{name}={value!r} is not one of {', '.join(choices)}.",
            remedy=f"pass one of the listed words as {name}.",
        )


def require_steps(name: str, given: Any, remedy: str) -> None:
    """Raises an error if a schedule is not a dict from training steps to values.

    The steps must be integers in ascending order, and the first one must be 0.

    Args:
        name: The name of the schedule in the message, such as "batch sizes".
        given: The schedule.
        remedy: The remedy in the message.

    Raises:
        ShardingError: `given` is not such a dict.
    """
    steps = list(given) if isinstance(given, Mapping) else []
    if not all(type(step) is int for step in steps) or steps[:1] != [0] or steps != sorted(steps):
        raise ShardingError(
            f"{name} must be a dict whose keys are whole numbers in ascending order, and whose"
            f" first key is 0. Got {given!r}.",
            remedy=remedy,
        )


class Raised(NamedTuple):
    """An error that takes the place of a result. StopIteration stands for the end of the data.

    Attributes:
        error: The error.
        traceback: The traceback with which the error is raised each time.
    """

    error: BaseException
    traceback: TracebackType | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Wraps an error that was just caught. A StopIteration becomes a RuntimeError.

        A StopIteration of the user's code would otherwise end the batches without an error.
        """
        if isinstance(error, StopIteration):
            wrapped = RuntimeError(
                "the pipeline raised StopIteration, which looks like the end of the data\n"
                "  remedy: give each next(...) in the source, in a .map or in make_feed a default,"
                " such as next(items, None)."
            )
            wrapped.__cause__ = error
            for note in notes_of(error):  # notes that name the record
                wrapped.add_note(note)
            return cls(wrapped, None)
        return cls(error, error.__traceback__)

    def throw(self) -> NoReturn:
        """Raises the error: the same object every time, except for StopIteration."""
        if isinstance(self.error, StopIteration):
            raise StopIteration
        # Python makes an error's traceback longer with each raise, so it starts from the first one.
        raise self.error.with_traceback(self.traceback)
