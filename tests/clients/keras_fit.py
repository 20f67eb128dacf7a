# /// script
# requires-python = "==3.13.*"
# dependencies = ["keras==3.15.1", "jax==0.12.0.1", "jaxlib==0.12.0.1"]
# ///
"""Keras 3 with the JAX backend, by the functions of `examples/keras_fit.py`, and by its script."""

import re
from pathlib import Path

import grain
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from examples import keras_fit as example  # before Keras: it sets the backend
from tests.clients import checking

import keras  # isort: skip

X = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
EPOCHS = 2  # of five full batches, and ten rows


def records(count):
    def record(i, rng):
        x = X[i] + rng.normal(scale=0.01, size=4).astype(np.float32)
        return {"x": x, "y": x.sum(keepdims=True)}

    return grain.MapDataset.range(count).seed(1).shuffle().random_map(record).batch(16)


def own_rows(ds):
    return ds.map(lambda batch: (batch["x"], batch["y"])).to_iter_dataset()


def valid_rows(arrays):
    """The global rows of a batch, without padding: Keras's own input has none."""
    x, y, *mask = (process_allgather(array, tiled=True) for array in arrays)
    return {"x": x[mask[0]], "y": y[mask[0]]} if mask else {"x": x, "y": y}


class Preempted(Exception):
    """Ends a run after its step `Run.stop`, as if the process were killed."""


class Noted(keras.Sequential):
    """A model that tells the job of each step."""

    job = None

    def make_train_function(self, force=False):
        super().make_train_function(force)
        step = self.train_function

        def noted(state, batches):
            if len(self.job.batches) == self.job.stop < checking.STEPS:
                raise Preempted
            batch = next(batches)
            self.job.batch(valid_rows(batch))
            # Without the metrics of the batches before. The mask weights a metric, but not the
            # mean of losses.
            *variables, metrics = state
            state = (*variables, jax.tree.map(lambda total: 0 * total, metrics))
            logs, state = step(state, iter([batch]))
            self.job.loss(logs["mse"])
            return logs, state

        self.train_function = noted


def make_model(job):
    keras.utils.set_random_seed(0)
    # One mask for all rows, so that rows of padding change no random number.
    dropout = keras.layers.Dropout(0.2, noise_shape=(1, 8))
    hidden = keras.layers.Dense(8, activation="tanh")
    model = Noted([keras.Input((4,)), hidden, dropout, keras.layers.Dense(1)])
    model.job = job
    model.compile(
        keras.optimizers.Adam(0.05),
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        weighted_metrics=["mse"],
    )
    return model


def run(job):
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    model, ds, test_ds = make_model(job), records(len(X)), records(40)
    if job.ours:
        try:
            example.train(model, ds, test_ds, job.checkpoints, EPOCHS, save_every=3)
        except Preempted:
            return
    else:
        model.fit(own_rows(ds.repeat()), steps_per_epoch=len(ds), epochs=EPOCHS)
    job.weights += [float(w) for weights in model.get_weights() for w in np.ravel(weights)]
    for _ in range(2):
        rows = example.host_rows(test_ds) if job.ours else own_rows(test_ds)
        metrics = model.evaluate(rows, steps=len(test_ds), return_dict=True, verbose=0)
        predictions = example.predict(model, test_ds) if job.ours else model.predict(rows)
        assert predictions.shape == (40, 1)
        values = [metrics["mse"], *job.weights, *np.ravel(predictions)]
        job.evaluations.append([f"{value:.3f}" for value in values])


def check_script(check, rehearsed, folder):
    """The whole script: continued on 1 host; with fewer updates than batches; what it refuses."""

    def run(script, hosts, epochs, checkpoints):
        words = [str(script), "--distributed", "--checkpoint-dir", str(folder / checkpoints)]
        return rehearsed([*words, "--epochs", str(epochs)], hosts)

    def changed(name, pattern, replacement):
        code, count = re.subn(pattern, replacement, Path(example.__file__).read_text())
        assert count == 1
        (folder / name).write_text(code)
        return folder / name

    for hosts, epochs in ((2, 1), (1, 2)):
        done = run(example.__file__, hosts, epochs, "script")
        last = done.outputs[0].strip().splitlines()[-1]
        wanted = f"500 predictions, step {36 * epochs}"
        check(f"the script on {hosts}", done.exit_code == 0 and last == wanted, last)
    # An update every five batches, and an epoch has 36: the stop is between two updates.
    accumulated = changed("accumulated.py", r"(?<=Adam\(0\.01)", ", gradient_accumulation_steps=5")
    ends = {}
    for epochs, checkpoints in ((1, "stopped"), (2, "stopped"), (2, "in one go")):
        done = run(accumulated, 1, epochs, checkpoints)
        ends[checkpoints] = done.outputs[0].strip().splitlines()[-2:]  # metrics; the step
    same = ends["stopped"] == ends["in one go"] and ends["stopped"][-1].endswith(" step 72")
    check("gradients accumulated over batches", same, ends)
    for name, pattern, replacement, refusal in (
        (
            "batch_size.py",
            r"(?<=EPOCHS = )128",
            "64",
            "is of a run with batches of 128, and not of 64",
        ),
        ("seed.py", r"(?<=\.seed\()42", "7", "the state was saved by another pipeline: seeds"),
        ("data.py", r"(?<=default_rng\()0", "1", "the source has changed since the state was"),
        ("repeat.py", r"(?<=augment\))", ".repeat()", "the dataset ends in .repeat: leave it out"),
    ):
        done = run(changed(name, pattern, replacement), 1, 3, "script")
        check(f"{name} is refused", done.exit_code == 1 and refusal in done.outputs[0])
    done = run(changed("seeds.py", r"(?<=\.seed\()42", "jax.process_index()"), 2, 1, "unlike")
    refused = all(re.search(r"seeds: .* on host 0; .* on host 1", out) for out in done.outputs)
    check("unlike seeds are refused", done.exit_code == 1 and refused)


if __name__ == "__main__":
    # Step 6 is the end of an epoch, and step 9 is within one.
    resumed = ((1, 2, 9), (2, 1, 6))
    checking.main(run, off_own=1e-6, resumed=resumed, also=check_script)
