"""What must not change between saving a state and restoring it, in a few short words.

The walk down a pipeline uses what Grain shows of it: each node's text, its length, the paths of a
source. Seeds and weights have no public place; where they can't be seen, a change goes unnoticed.
So does one inside a function (its name is all that is compared) or inside the records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain

from grain_shard.digest import digest
from grain_shard.errors import StateError
from grain_shard.grain_inside import nodes

Fingerprint = dict[str, Any]

# Where a function stands in its file, and where an object stands in memory, say nothing of what
# it does: a comment above it, or another run, changes them.
_PLACE = re.compile(r" @ [^)]*| at 0x[0-9a-f]+")


@runtime_checkable
class ChangesLater(Protocol):
    """A dataset of ours whose text says from which record on something holds.

    What holds from a later record on than that at which a state stands may be changed before the
    state is restored.
    """

    def text_before(self, record: int) -> str:
        """Its text, as far as it says anything of the records before this one."""
        ...


def fingerprint(ds: grain.MapDataset) -> Fingerprint:
    """The fingerprint of a random-access dataset of batches: the same on every host.

    Args:
        ds: What stands above the stages of this package.

    Returns:
        Records above ``.batch``, the batch size (both None if they can't be seen), and a digest
        each of the sources (names of the files and their records), the seeds and the
        transformations. Plain JSON.
    """
    node = nodes.batch_node(ds)
    return {
        "records": len(node.records) if node else None,
        "global_batch_size": node.global_batch_size if node else None,
        **pipeline_digests(ds),
    }


def fields_before(ds: grain.MapDataset, batch: int) -> Fingerprint:
    """The fields of the fingerprint that are others if what follows a batch may still change.

    Args:
        ds: As for `fingerprint`.
        batch: A state stands before this batch.

    Returns:
        Nothing for most pipelines, of which everything is fixed from the start. If the records
        that are batched are those of a dataset that `ChangesLater`, and the batch is in the first
        epoch: "transforms" with its text up to there, and "records" without the number of them,
        which follows from the rest of that text.
    """
    node = nodes.batch_node(ds)
    record = node.first_record(batch) if node else None
    if node is None or record is None:
        return {}
    changing: Any = node.records
    while nodes.keeps_indices(changing):
        (changing,) = changing.parents
    if not isinstance(changing, ChangesLater):
        return {}
    texts = [changing.text_before(record) if n is changing else _text(n) for n in _walk(ds)]
    parameters = [nodes.parameters(n) for n in _walk(ds)]
    return {"records": None, "transforms": digest(list(zip(texts, parameters, strict=True)))}


def pipeline_digests(ds: grain.MapDataset | grain.IterDataset) -> dict[str, str]:
    """A digest each of a dataset's sources, seeds and transformations."""
    walked = list(_walk(ds))
    sources = [
        (_text(n), _length(n), [os.path.basename(str(p)) for p in _paths(n)])
        for n in walked
        if not n.parents
    ]
    return {
        "source": digest(sources),
        "seeds": digest([nodes.seeds(n) for n in walked]),
        "transforms": digest([(_text(n), nodes.parameters(n)) for n in walked]),
    }


def check_fingerprint(
    state: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    kind: str = "a random-access pipeline",
    keys: Sequence[str] = ("batch",),
) -> None:
    """Refuses a state that was saved by something else.

    Args:
        state: The state.
        current: The fingerprint of what is to go on from it.
        kind: What that is, for messages.
        keys: What the state has besides the fingerprint.

    Raises:
        StateError: A field of the fingerprint is missing or differs; the message names each.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is a dict, not {state!r}.\n  remedy: pass what get_state() gave."
        )
    missing = [name for name in (*keys, *current) if name not in state]
    if missing:
        raise StateError(
            f"this is no state of {kind}: it lacks"
            f" {', '.join(map(repr, missing))}."
            f"\n  state:  {dict(state)}\n  remedy: pass what get_state() of such an iterator gave."
        )
    changed = [name for name in current if state[name] != current[name]]
    if changed:
        lines = [f"  {n}: saved {state[n]!r}, now {current[n]!r}" for n in changed]
        raise StateError(
            f"the state was saved by another pipeline: {', '.join(changed)} changed.\n"
            + "\n".join(lines)
            + "\n  remedy: restore with the pipeline that saved it. If the change is meant, and the"
            " batches are to go on from the same index, put the new values into the state."
        )


def _walk(ds: Any) -> Iterator[Any]:
    yield ds
    for parent in ds.parents:
        yield from _walk(parent)


def _length(node: Any) -> int | None:
    return len(node) if isinstance(node, grain.MapDataset) else None


def _text(node: Any) -> str:
    return _PLACE.sub("", str(node))


def _paths(node: Any) -> list[Any]:
    paths = getattr(node, "paths", [])
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
