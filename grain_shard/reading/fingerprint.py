"""Fingerprints of pipelines: digests of facts that must be the same when a state is restored.

A fingerprint covers the text, seeds and arguments of each node of the pipeline, the number of
records, and the file names of each source, or its own fingerprint if it has one. Three kinds of
changes go unnoticed:

* Seeds, and some arguments such as a mixture's weights, are private attributes in Grain. If another
  version of Grain keeps one of them elsewhere, its changes are not seen.
* Functions are compared by name only, not by their code.
* Attributes of a transformation's object are not compared: a counter or a cache changes in a run, a
  host's number differs between hosts, and a run may go on with another image size on purpose.

Changes of the records themselves are found by `first_record.py`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from grain_shard.digest import digest
from grain_shard.errors import StateError, shortened
from grain_shard.grain_inside import nodes
from grain_shard.reading.cuts import Progress
from grain_shard.reading.transformation_digest import TransformationDigest
from grain_shard.sources.mix import MixedByRecord
from grain_shard.state_json import UNCHANGED

Fingerprint = dict[str, Any]
WEIGHTS = "weights"  # the field with a mixture's weights: (record, the weights from it on)
TRANSFORMS, SEEDS = "transforms", "seeds"
BATCH_SIZES = "batch_sizes"  # the field with the sizes of a stream's ``.batch`` nodes
_OF_SEEDS = 6  # hex digits of the digest of the seeds, because a state has less than 200 bytes
_MARK = "."  # between the digests of the transformations and of the seeds, in a state

HOW_TO_COUNT_RECORDS = (
    "move every .map and slice before .batch, so that they change records, and leave batch_fn out"
    " of .batch."
)

OTHER_BATCH_SIZE = (
    "restore with the pipeline that saved the state. To change the batch size within a run, use a"
    " grain.MapDataset down to .batch, or grain_shard.feeds."
)

# The place of a function in its file, and the address of an object. Both are removed from texts,
# because they change without the pipeline: by a comment above the function, and in each run.
_PLACE = re.compile(r" @ [^)]*| at 0x[0-9a-f]+")


def records_fingerprint(
    records: grain.MapDataset, after: Sequence[grain.MapDataset], drop_remainder: bool
) -> Fingerprint:
    """Returns the fingerprint of records that are batched.

    It does not depend on the batch size, and is the same on every host.

    Args:
        records: The dataset that is batched.
        after: The nodes that follow the batching, from the last one back.
        drop_remainder: True if records that do not fill a batch are left out.

    Returns:
        Plain JSON: digests of the sources, the seeds and the transformations, and the number of
        records or, for a mixture, its weights.
    """
    mixture = _mixture_in_order(records, after)
    # The text and parameters of each node, from the last one back.
    described = [(_text(node), nodes.parameters(node)) for node in after]
    described.append((f"batch(drop_remainder={drop_remainder})", ()))
    for node in nodes.walk(records):
        # The text of a mixture has its weights, which are a field of their own below.
        text = "mix" if node is mixture else _text(node)
        described.append((text, nodes.parameters(node)))
    # A mixture's length follows from its weights and sources, so the weights replace it.
    size = {"records": _number_of(records)}
    if mixture is not None:
        size = {WEIGHTS: mixture.schedule.weights}
    return {
        **size,
        **pipeline_digests(records, after),
        TRANSFORMS: TransformationDigest.of(described[::-1]),
    }


def _number_of(records: grain.MapDataset) -> int | str:
    return "endless" if len(records) == sys.maxsize else len(records)


def _mixture_in_order(
    records: grain.MapDataset, after: Sequence[grain.MapDataset]
) -> MixedByRecord | None:
    """Returns the mixture whose record i is record i of the batched dataset; None if there is none.

    Args:
        records: The dataset that is batched.
        after: The nodes that follow the batching.
    """
    if any(map(nodes.chooses_batches, after)):
        return None  # a slice or shuffle of batches changes which records a batch number stands for
    while nodes.keeps_indices(records):
        (records,) = records.parents
    return records if isinstance(records, MixedByRecord) else None


def fingerprint_at(fingerprint: Mapping[str, Any], position: Progress | None) -> Fingerprint:
    """Returns the fingerprint of a pipeline for a state at some position.

    Weights of a mixture that begin at the position or later are left out, so that they may be
    changed before the state is restored.

    Args:
        fingerprint: The fingerprint of the pipeline. A fingerprint from a state is returned
            unchanged, because it has a digest in place of the weights.
        position: The position of the state. All weights are kept if it is None or after the first
            epoch.
    """
    weights = fingerprint.get(WEIGHTS)
    if not isinstance(weights, list):
        return dict(fingerprint)
    end = sys.maxsize if position is None or position.epoch else position.record
    used = [pair for pair in weights if pair[0] < end]
    return {**fingerprint, WEIGHTS: digest(used)}


def plain(fingerprint: Mapping[str, Any]) -> Fingerprint:
    """Returns a fingerprint as plain JSON, for a state."""
    return {key: str(v) if isinstance(v, str) else v for key, v in fingerprint.items()}


def packed(fingerprint: Mapping[str, Any]) -> Fingerprint:
    """Returns a fingerprint as short JSON: one field has the digests of transforms and seeds."""
    found = plain(fingerprint)
    seeds = found.pop(SEEDS)
    return {**found, TRANSFORMS: f"{found[TRANSFORMS]}{_MARK}{seeds}"}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `packed` in a state. Returns a copy of any other state."""
    text = state.get(TRANSFORMS)
    if not isinstance(text, str) or _MARK not in text or SEEDS in state:
        return dict(state)
    transforms, _, seeds = text.partition(_MARK)
    return {**state, TRANSFORMS: transforms, SEEDS: seeds}


def pipeline_digests(
    ds: grain.MapDataset | grain.IterDataset, after: Sequence[grain.MapDataset] = ()
) -> dict[str, str]:
    """Returns digests of a pipeline, by the names "source", "seeds" and "transforms".

    The digest of a source is made of its text, its number of records and the names of its files. A
    Hugging Face dataset adds its own fingerprint.

    Args:
        ds: The pipeline.
        after: Nodes that follow it, from the last one back.
    """
    walked = [*after, *nodes.walk(ds)]
    return {
        "source": digest([_source(node) for node in nodes.sources(ds)]),
        SEEDS: digest([nodes.seeds(n) for n in walked])[:_OF_SEEDS],
        TRANSFORMS: TransformationDigest.of(
            [(_text(n), nodes.parameters(n)) for n in walked[::-1]]
        ),
    }


def check_fingerprint(
    state: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    name: str,
    keys: Sequence[str],
    optional: Sequence[str] = (),
    if_data_changed: str = "",
) -> None:
    """Raises an error if a different pipeline saved a state.

    Args:
        state: The state.
        current: The fingerprint of the pipeline that restores the state.
        name: The name of the restoring pipeline in messages, such as "a stream".
        keys: Keys that the state must have besides the fingerprint.
        optional: Fields of the fingerprint that a state may lack.
        if_data_changed: What to do if the data has changed on purpose, for example if it has grown.

    Raises:
        StateError: The state is of another kind, lacks a field, has an unknown field, or differs
            from the fingerprint in a field. The message names the fields.
    """
    # A state without a kind is refused below, because it lacks a field.
    if state.get("kind", current["kind"]) != current["kind"]:
        raise StateError(
            f"the state is of kind {shortened(state['kind'])}, and this is {name}.\n"
            "  remedy: restore with a pipeline of the kind that saved the state."
        )
    missing = [key for key in (*keys, *current) if key not in (*state, *optional)]
    changed = [key for key in current if key in state and state[key] != current[key]]
    # If a field of the fingerprint is missing and another one has changed, the change explains
    # more. But without one of `keys`, it is not such a state at all.
    if missing and (not changed or any(key in missing for key in keys)):
        raise StateError(
            f"the state is not the state of {name}: it lacks {', '.join(map(repr, missing))}."
            f"\n  state:  {shortened(state)}"
            f"\n  remedy: pass set_state() the dict that get_state() of {name} returned."
        )
    if changed:
        lines = [f"  {n}: saved {shortened(state[n])}, now {current[n]!r}" for n in changed]
        # The name of the changed transformation says more than two digests.
        if TRANSFORMS in changed and (change := _change(current[TRANSFORMS], state[TRANSFORMS])):
            lines[changed.index(TRANSFORMS)] = f"  {TRANSFORMS}: {change}"
        raise StateError(
            f"the state was saved by another pipeline: {', '.join(changed)} changed.\n"
            + "\n".join(lines)
            + f"\n  remedy: {_remedy(changed, if_data_changed)}"
        )
    if unknown := sorted(set(state) - {*keys, *current, *optional}):
        raise StateError(
            f"the state of {name} has other fields: {shortened(unknown)}.\n{UNCHANGED}"
        )


def _remedy(changed: Sequence[str], if_data_changed: str) -> str:
    """Returns the remedy for a state that differs from the pipeline in some fields.

    Args:
        changed: The names of these fields.
        if_data_changed: What to do if the data has changed on purpose; "" for nothing.
    """
    remedy = "restore with the pipeline that saved the state."
    if "global_batch_size" in changed:  # random access that counts batches
        remedy = (
            "restore with the batch size of the saved run. A pipeline that makes each batch as a"
            " whole cannot change its batch size during a run. To be able to change it in a new"
            f" run, {HOW_TO_COUNT_RECORDS}"
        )
    elif BATCH_SIZES in changed:  # a stream
        remedy = OTHER_BATCH_SIZE
    elif TRANSFORMS in changed:
        remedy += " All transformations and their options must be the same. If one is added or"
        remedy += " removed, the random seeds of the others change, too."
    if {"records", "source"} & set(changed) and if_data_changed:
        remedy += f" If the data has changed on purpose, {if_data_changed}"
    return remedy


def _change(now: Any, saved: Any) -> str:
    """Returns a sentence about the transformation that changed, or "" if it cannot be found."""
    known = isinstance(now, TransformationDigest) and isinstance(saved, str)
    return now.change_since(saved) if known else ""


def _source(node: Any) -> tuple[Any, ...]:
    paths = getattr(node, "paths", [])
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    names = [os.path.basename(str(path)) for path in paths]
    length = len(node) if isinstance(node, grain.MapDataset) else None
    own = nodes.source_fingerprint(node)
    return _text(node), length, names, *(() if own is None else (own,))


def _text(node: Any) -> str:
    return _PLACE.sub("", nodes.text(node))
