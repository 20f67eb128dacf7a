"""Keras 3 on any number of hosts: `fit`, `evaluate` and predictions from a Grain pipeline.

`pip install keras`, and run `python examples/keras_fit.py --checkpoint-dir /tmp/keras`. It saves
after each epoch and every 20 steps. Stop it at any time and start it again, on any number of hosts:
it goes on after the last save, and ends with the same weights, but for rounding if the number of
hosts changes. With other data, another seed, batch size or model it refuses to go on.
"""

import argparse
import os
import pickle
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import grain
import jax
import keras
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import grain_shard

GLOBAL_BATCH_SIZE, EPOCHS = 128, 5  # the batch of all hosts together


# recipe
def keras_mesh():
    return keras.distribution.distribution().device_mesh.backend_mesh


def host_rows(ds):
    ds = ds.shard_to(keras_mesh(), jax.P("batch")).host_rows()
    return ds.map(lambda batch: (batch["x"], batch["y"], batch["valid_mask"]))


# end of recipe


def variables(model):
    """All that training changes: weights, the random state of Dropout, and the optimizer."""
    return [*model.variables, *model.optimizer.variables]


class Save(keras.callbacks.Callback):
    """Saves the run after each epoch and every few steps.

    Args:
        path: The file, which host 0 writes.
        data: The first result of `restore`: a later run finds out if its pipeline is the same.
        step: Number of batches that the run has had, the position in the data.
        every: Number of steps between two saves within an epoch.
    """

    def __init__(self, path, data, step, every):
        super().__init__()
        self.path, self.data, self.step, self.every = path, data, step, every

    def on_epoch_begin(self, epoch, logs=None):
        self.step_before = self.step

    def on_train_batch_end(self, batch, logs=None):
        # The iterations of an optimizer are no such count: with `gradient_accumulation_steps` or a
        # `LossScaleOptimizer`, not every batch makes an update.
        self.step = self.step_before + batch + 1
        if (batch + 1) % self.every == 0:
            self.save()

    def on_epoch_end(self, epoch, logs=None):
        self.save()

    def save(self):
        # With `self.model`, Keras first copies the values of the last step into the variables.
        if jax.process_index() == 0:
            values = [np.asarray(variable.value) for variable in variables(self.model)]
            new = self.path.with_suffix(".new")
            run = {"values": values, "data": self.data, "step": self.step}
            new.write_bytes(pickle.dumps(run))
            new.replace(self.path)  # so that a kill leaves the old file or the new one


def restore(model, ds, path):
    """Restores the last save, if there is one.

    Returns:
        The state of the pipeline after its first batch, and its batch size, in a dict. Each save
        gets it: a later run compares it with its own. And the number of batches before the save.

    Raises:
        grain_shard.StateError: The pipeline is not the one of the save.
        SystemExit: Its batch size is not the same, or the variables of the model or its optimizer
            have other shapes.
    """
    step = 0
    model.optimizer.build(model.trainable_variables)  # it has no variables before
    with iter(ds.shard_to(keras_mesh(), jax.P("batch"))) as batches:
        size = int(next(batches)["valid_mask"].sum())
        data = {"state": batches.get_state(), "batch size": size}
        if path.exists():
            saved = pickle.loads(path.read_bytes())
            try:
                batches.set_state(saved["data"]["state"])
                next(batches)  # compares the records with those of the save
            except grain_shard.StateError as error:
                error.add_note(f"{path} is of another pipeline. For a new run, move it away.")
                raise
            if (old := saved["data"]["batch size"]) != size:
                sys.exit(f"{path} is of a run with batches of {old}, and not of {size}")
            shapes = [variable.shape for variable in variables(model)]
            if shapes != [value.shape for value in saved["values"]]:
                sys.exit(f"{path} is of a run with another model or optimizer")
            for variable, value in zip(variables(model), saved["values"], strict=True):
                variable.assign(value)
            step = saved["step"]
    return data, step


def train(model, ds, test_ds, folder, epochs, save_every=20):
    """Trains on from the last save in a folder, which may have been made within an epoch.

    Each dataset is a `grain.MapDataset` and ends in `.batch(GLOBAL_BATCH_SIZE)`, without `.repeat`.
    An epoch is a pass of `ds`. All hosts must see the folder. Returns the number of steps so far.
    """
    if len(ds) > 2**32:
        sys.exit("the dataset ends in .repeat: leave it out, because an epoch is a pass of it")
    path = folder / "run.pickle"
    save = Save(path, *restore(model, ds.repeat(), path), save_every)

    def fit(first_epoch, last_epoch, num_steps):
        model.fit(
            host_rows(ds.repeat()[save.step :]),
            shuffle=False,  # the pipeline has shuffled. With True, Keras warns that it does not
            steps_per_epoch=num_steps,
            initial_epoch=first_epoch,
            epochs=last_epoch,
            validation_data=host_rows(test_ds),
            validation_steps=len(test_ds),  # without it, Keras warns that the data has ended
            callbacks=[save],  # as the last one, so that it saves the changes of the others
            verbose=2 if jax.process_index() == 0 else 0,
        )

    epoch, steps_done = divmod(save.step, len(ds))
    if steps_done:  # the rest of the epoch
        fit(epoch, epoch + 1, len(ds) - steps_done)
        epoch += 1
    if epoch < epochs:
        fit(epoch, epochs, len(ds))
    return save.step


def predict(model, ds):
    """Returns the predictions for all records of a dataset, without padding, on every host."""
    of_batches = []
    for batch in ds.shard_to(keras_mesh(), jax.P("batch")):
        # Without training=False, layers such as RandomFlip would change the rows.
        values = model(batch["x"], training=False), batch["valid_mask"]
        rows, mask = process_allgather(values, tiled=True)
        of_batches.append(rows[mask])
    return np.concatenate(of_batches)


def make_model():
    hidden, dropout = keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.1)
    model = keras.Sequential([keras.Input((4,)), hidden, dropout, keras.layers.Dense(4)])
    # The mask is the weight of a row. By default, the loss would divide by padding, too.
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    # `evaluate` gives each batch the same weight in `loss`, and each record in a weighted metric.
    exact_loss = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="exact_loss")
    model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=[exact_loss, "accuracy"])
    return model


def make_datasets():
    def augment(record, rng):
        return record | {"x": record["x"] + np.float32(rng.normal(scale=0.1, size=4))}

    xs = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    records = grain.MapDataset.source(xs).map(lambda x: {"x": x, "y": x.argmax()})
    train_ds = records[:4500].seed(42).shuffle().random_map(augment)
    return train_ds.batch(GLOBAL_BATCH_SIZE), records[4500:].batch(GLOBAL_BATCH_SIZE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="a folder")
    parser.add_argument("--distributed", action="store_true", help="train as one of several hosts")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    if args.distributed:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator
        os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for collectives of 8 devices
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)  # before the model is made
    keras.utils.set_random_seed(0)  # or each host would begin with other weights
    model, (train_ds, test_ds) = make_model(), make_datasets()
    step = train(model, train_ds, test_ds, args.checkpoint_dir, args.epochs)
    steps = {"steps": len(test_ds), "verbose": 0, "return_dict": True}
    evaluated = model.evaluate(host_rows(test_ds), **steps)
    labels = predict(model, test_ds).argmax(axis=1)
    if jax.process_index() == 0:
        print({name: round(value, 4) for name, value in evaluated.items()})
        print(f"{len(labels)} predictions, step {step}")


if __name__ == "__main__":
    main()
