"""`TransformationDigest`: a digest of transformations that shows which one has changed."""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
from collections.abc import Sequence
from typing import Any

# A digest has `_OF_ALL` characters for all transformations together, and then one for each of the
# first `_MOST_NODES`. A character has six bits. A longer digest would not fit in the 200 bytes of a
# state.
_OF_ALL, _MOST_NODES = 4, 8
# Grain's name for the node of a transformation, such as "MapMapDataset(transform=decode)".
_NODE = re.compile(r"(?P<kind>\w+?)(Map|Iter)Dataset\b(\(transform=(?P<function>.*)\))?")
# Methods whose nodes have another name in Grain.
_METHODS = {"with_options": "seed", "mixed": "mix", "prefetch": "to_iter_dataset"}


class TransformationDigest(str):
    """The digest of a pipeline's transformations, with their names.

    Attributes:
        names: The names of the transformations, from the source on.
    """

    names: list[str]

    @classmethod
    def of(cls, described: Sequence[tuple[str, Any]]) -> TransformationDigest:
        """Returns the digest of transformations: the text and arguments of each, source first."""
        nodes = "".join(_characters(node, 1) for node in described[:_MOST_NODES])
        digest = cls(_characters(described, _OF_ALL) + nodes)
        digest.names = [_name(text) for text, _ in described]
        return digest

    def change_since(self, saved: str) -> str:
        """Returns a sentence about the first transformation that differs from a saved pipeline.

        Example:
            >>> source, shuffle = ("RangeMapDataset", ()), ("ShuffleMapDataset", ())
            >>> decode = ("MapMapDataset(transform=decode)", ())
            >>> saved = TransformationDigest.of([source, shuffle])
            >>> TransformationDigest.of([source, shuffle, decode]).change_since(saved)
            '.map (decode) after .shuffle was added'

        Args:
            saved: The digest of the saved pipeline.

        Returns:
            The sentence; "" if the digests do not show the transformation.
        """
        before, after = saved[_OF_ALL:], self[_OF_ALL:]  # a character for each transformation
        for change, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after).get_opcodes():
            now = " and ".join(self.names[j1:j2])
            where = f" after {self.names[j1 - 1]}" if j1 else ""
            if change == "insert":
                return f"{now}{where} was added"
            if change == "delete":
                if i2 - i1 == 1:
                    return f"a transformation{where} was removed"
                return f"{i2 - i1} transformations{where} were removed"
            if change == "replace":
                return f"{now}{where} has other arguments, or was another transformation"
        return ""


def _characters(value: Any, count: int) -> str:
    """Returns a digest of the repr of a value, with `count` characters."""
    return base64.urlsafe_b64encode(hashlib.sha256(repr(value).encode()).digest())[:count].decode()


def _name(text: str) -> str:
    """Returns the name of a transformation as users write it, such as ``.map (decode)``."""
    node = _NODE.match(text)
    if node is None:
        return f".{text.split('(')[0]}" if text.startswith(("batch(", "mix", "split")) else text
    method = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node["kind"].lstrip("_")).lower()
    if method in ("source", "range"):
        return "the source"
    function = "" if node["function"] is None else f" ({node['function']})"
    return f".{_METHODS.get(method, method)}{function}"
