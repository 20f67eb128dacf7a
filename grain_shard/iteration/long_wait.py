"""The line in the log that says that the training loop has waited long for its next batch."""

from __future__ import annotations

from absl import logging

from grain_shard.callers import lines_in_pipelines, loop_line

# Least seconds of a wait that is logged, and least seconds between two such lines. The first read
# of a bucket, or the start of worker processes, takes less.
_LONG_S = 60.0


def log_long_wait(waited_s: float) -> None:
    """Logs once a minute which loop waits, and where the functions of pipelines are.

    The thread of the loop calls this inside ``next``, so that its line is known. The line tells a
    loop over training data from a loop over evaluation data.

    Args:
        waited_s: The seconds that the loop has waited so far for one batch.
    """
    if waited_s < _LONG_S:
        return
    lines = lines_in_pipelines()
    logging.log_every_n_seconds(
        logging.WARNING,
        "grain_shard: the training loop at %s has waited %.0f s for its next batch. %s",
        _LONG_S,
        loop_line(),
        waited_s,
        f"Threads that make batches are at {', '.join(lines)}."
        if lines
        else "No thread of this process makes one. If the pipeline has num_workers or an executor,"
        " check that the workers run.",
    )
