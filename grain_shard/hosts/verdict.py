"""`Verdict`: what the first host of a round concludes from the answers of all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What all hosts of a round do next: they go on, or all of them raise the same error.

    At most one attribute is set. Without any, the hosts go on.

    Example:
        >>> Verdict.from_json(Verdict(agreed=2).to_json())
        Verdict(agreed=2, error='', changed='', silent=())

    Attributes:
        agreed: What the hosts go on with, such as the number of batches to hand out, as JSON.
        error: The message of an `AgreementError`.
        changed: The message of a `StateError`: the source has changed since the state was saved.
        silent: The hosts that did not answer in time, which is a `HostTimeoutError`.
    """

    agreed: Any = None
    error: str = ""
    changed: str = ""
    silent: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as JSON, in which the first host posts it to all hosts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, posted: Mapping[str, Any]) -> Verdict:
        """Returns the verdict that `to_json` has turned into JSON."""
        return cls(**{**posted, "silent": tuple(posted["silent"])})
