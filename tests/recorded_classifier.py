"""The image classifier of `examples/` with more options, and a file of the loss of every step."""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

import jax
from jax.experimental import multihost_utils


def main():
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import image_classifier as example

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--sigterm-at", type=int, help="the step in which the last host is preempted"
    )
    ours, sys.argv[1:] = parser.parse_known_args()
    losses, train_step = [], example.train_step
    asked, reached_preemption_sync_point = [], multihost_utils.reached_preemption_sync_point

    def recorded_step(*args):
        losses.append(train_step(*args))
        if len(losses) == ours.sigterm_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses[-1]

    def recorded_question(step):
        asked.append(step)
        if threading.current_thread() is threading.main_thread():
            saves = [thread for thread in threading.enumerate() if thread.name == "save_finalize"]
            assert not saves, "a save that goes on will ask about its own step"
        return reached_preemption_sync_point(step)

    multihost_utils.reached_preemption_sync_point = recorded_question
    example.EPOCHS, example.train_step = ours.epochs, recorded_step
    example.main()
    # JAX takes the last number for the newest step: after a lower one, hosts stop at unlike steps.
    assert asked == sorted(asked), asked
    if jax.process_index() == 0:
        file = Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1], "losses.json")
        before = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps(before + [float(loss) for loss in losses]))


if __name__ == "__main__":
    main()
