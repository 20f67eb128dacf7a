# /// script
# requires-python = "==3.13.*"
# dependencies = ["keras==3.15.1", "jax==0.12.0.1", "jaxlib==0.12.0.1"]
# ///
"""Keras 3 with the JAX backend: `fit`, `evaluate` and `predict` on a `keras.distribution`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import grain
import jax
import keras
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from grain_shard import PadToDivisible, ShardBatch, ShardingTree, ValidateBatchSize
from tests.clients import checking

X = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
STEPS_PER_EPOCH = 6  # five full batches, and ten rows
TEST_ROWS = 40


# recipe
def host_rows(ds, first_step=0):  # this host's rows; Keras itself places them
    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    layout = ShardingTree.of(mesh, jax.P("batch")).layout()
    size = layout.divisor
    for stage in (ValidateBatchSize(size), PadToDivisible(size), ShardBatch(layout)):
        ds = ds.pipe(stage)
    ds = ds[first_step:].map(lambda batch: (batch["x"], batch["y"], batch["valid_mask"]))
    return ds.to_iter_dataset(grain.ReadOptions(num_threads=8, prefetch_buffer_size=8))


def train(model, ds, folder, steps_per_epoch, last_epoch):
    model.optimizer.build(model.trainable_variables)
    if (folder / "0.weights.h5").exists():
        model.load_weights(folder / "0.weights.h5")
    first_step = int(model.optimizer.iterations)
    path = folder / f"{jax.process_index()}.weights.h5"
    model.fit(
        host_rows(ds, first_step),
        steps_per_epoch=steps_per_epoch,
        initial_epoch=first_step // steps_per_epoch,
        epochs=last_epoch,
        callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=True)],
    )


# end of recipe


def records(count):
    def record(i, rng):
        x = X[i] + rng.normal(scale=0.01, size=4).astype(np.float32)
        return {"x": x, "y": x.sum(keepdims=True)}

    return grain.MapDataset.range(count).seed(1).shuffle().random_map(record)


def own_rows(ds):
    return ds.map(lambda batch: (batch["x"], batch["y"])).to_iter_dataset()


def valid_rows(arrays):
    """The global rows of a batch, without padding: Keras's own input has none."""
    x, y, *mask = (process_allgather(array, tiled=True) for array in arrays)
    return {"x": x[mask[0]], "y": y[mask[0]]} if mask else {"x": x, "y": y}


class Noted(keras.Sequential):
    """A model that tells the job of each step."""

    job = None

    def make_train_function(self, force=False):
        super().make_train_function(force)
        step = self.train_function

        def noted(state, batches):
            batch = next(batches)
            self.job.batch(valid_rows(batch))
            logs, state = step(state, iter([batch]))
            # The mean of the epoch so far. The mask weights a metric, but not the mean of losses.
            self.job.loss(logs["mse"])
            return logs, state

        self.train_function = noted


def make_model(job):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    model = Noted([keras.Input((4,)), *layers])
    model.job = job
    model.compile(
        keras.optimizers.Adam(0.05),
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        weighted_metrics=["mse"],
    )
    return model


def predictions(model, ds, job):
    """The model's predictions for the rows of a dataset, without padding."""
    if not job.ours:
        return model.predict(own_rows(ds), verbose=0)
    if job.hosts == 1:
        return model.predict(host_rows(ds), verbose=0)[:TEST_ROWS]
    of_batches = []
    for batch in ds.shard_to(keras.distribution.distribution().device_mesh.backend_mesh):
        values = model(batch["x"]), batch["valid_mask"]
        rows, mask = (process_allgather(value, tiled=True) for value in values)
        of_batches.append(rows[mask])
    return np.concatenate(of_batches)


def run(job):
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    model = make_model(job)
    ds = records(len(X)).batch(16).repeat()
    epochs = job.stop // STEPS_PER_EPOCH
    if job.ours:
        train(model, ds, job.checkpoints, STEPS_PER_EPOCH, epochs)
    else:
        model.fit(own_rows(ds), steps_per_epoch=STEPS_PER_EPOCH, epochs=epochs)
    test = records(TEST_ROWS).batch(16)
    for _ in range(2):
        rows = host_rows(test) if job.ours else own_rows(test)
        metrics = model.evaluate(rows, return_dict=True, verbose=0)
        values = [metrics["mse"], *map(np.asarray, model.get_weights())]
        values = np.concatenate([np.ravel(v) for v in [*values, predictions(model, test, job)]])
        job.evaluations.append([f"{value:.3f}" for value in values])


if __name__ == "__main__":
    checking.main(run, off_own=1e-6)
