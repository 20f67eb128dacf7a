"""The line in the log that says that the training loop has waited long for its next batch."""

from __future__ import annotations

from absl import logging

from grain_shard.callers import lines_of_other_threads

# Least seconds of a wait that is logged, and least seconds between two such lines. The first read
# of a bucket, or the start of worker processes, takes less.
_LONG_S = 60.0


def log_long_wait(waited_s: float) -> None:
    """Logs once a minute that the loop waits, and where other threads are in the user's program.

    Args:
        waited_s: The seconds that the loop has waited so far for one batch.
    """
    if waited_s < _LONG_S:
        return
    lines = lines_of_other_threads()
    logging.log_every_n_seconds(
        logging.WARNING,
        "grain_shard: the training loop has waited %.0f s for its next batch. %s",
        _LONG_S,
        waited_s,
        f"Other threads are in your program at {', '.join(lines)}."
        if lines
        else "No other thread of this process is in your program. Check that the workers of"
        " num_workers or of the executor run.",
    )
