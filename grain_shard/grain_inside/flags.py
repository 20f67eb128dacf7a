"""`mark_flags_as_parsed`: without it, Grain starts no worker process in a plain script."""

from __future__ import annotations

from absl import flags


def mark_flags_as_parsed() -> None:
    """Lets Grain start workers in a program that never parsed absl's flags (grain#1355).

    Only ``absl.app.run`` parses the flags. A plain script, a notebook or pytest never calls it, and
    Grain would then fail with ``UnparsedFlagAccessError``.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
