"""Logs that the training loop has been waiting long for its next batch."""

from __future__ import annotations

from absl import logging

from grain_shard.callers import lines_in_pipelines, loop_line

# A wait is logged once it is this long, and then at most this often. The first read of a bucket,
# and the start of worker processes, take less.
_LONG_S = 60.0


def log_long_wait(waited_s: float) -> None:
    """Logs once a minute which loop waits, and which lines of the pipeline its threads are at.

    The thread of the loop calls this inside ``next``, so that the loop's line is known. That line
    tells a training loop from an evaluation loop.

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
