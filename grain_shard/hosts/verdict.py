"""`Verdict`: the conclusion of a round, from the answers of all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Says how all hosts of a round go on: with a value, or by raising the same error.

    At most one attribute is set. If none is set, the hosts go on without a value.

    Example:
        >>> Verdict.from_json(Verdict(agreed=2).to_json())
        Verdict(agreed=2, error='', changed='', silent=())

    Attributes:
        agreed: The value to go on with, as JSON, such as the number of batches to hand out.
        error: The message of an `AgreementError`.
        changed: The message of a `StateError`: the source has changed since the state was saved.
        silent: The hosts that did not answer in time, which is a `HostTimeoutError`.
    """

    agreed: Any = None
    error: str = ""
    changed: str = ""
    silent: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as the JSON that is posted to all hosts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, posted: Mapping[str, Any]) -> Verdict:
        """Returns the verdict that `to_json` turned into JSON."""
        return cls(**{**posted, "silent": tuple(posted["silent"])})
