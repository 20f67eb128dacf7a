"""An image classifier, with augmentation, evaluation, checkpoints and preemption.

A small convolutional network learns scikit-learn's 1,797 images of digits. On one host, with eight
virtual CPU devices, it takes half a minute:

    python examples/image_classifier.py --checkpoint-dir /tmp/classifier

Run it a second time, and it goes on from its last checkpoint. It saves a checkpoint after each
epoch. It also saves one and stops when it gets SIGTERM, the signal by which a cluster preempts a
job. The same script runs on two hosts of four devices each, with the same losses:

    python -m grain_shard rehearse --hosts 2 --devices-per-host 4 \
        examples/image_classifier.py --distributed --checkpoint-dir /tmp/classifier-2

For images of your own, replace `records` by `grain_shard.ArrayRecordSource("data/train-*")`, and
add a `.map(decode)` that turns each record into a dict of image and label.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for the collectives of 8 devices

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from sklearn.datasets import load_digits

import grain_shard  # noqa: F401, adds .shard_to to Grain's datasets
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave

GLOBAL_BATCH_SIZE = 128  # rows of all hosts together
TEST_IMAGES = 297


def records():
    """Returns a dict for each image: float32[8, 8, 1] from 0 to 1, and the digit that it shows."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    return [
        {"image": image, "label": np.int32(label)}
        for image, label in zip(images, digits.target, strict=True)
    ]


def augment(record, rng):
    """Moves the image by at most one pixel in each direction, and makes it lighter or darker.

    Grain gives each record of each epoch its own random generator. So the result is the same on any
    number of hosts, and after a restart.
    """
    image = np.roll(record["image"], rng.integers(-1, 2, size=2), axis=(0, 1))
    return {**record, "image": image * np.float32(rng.uniform(0.8, 1.2))}


def make_datasets(mesh):
    """Returns the training batches and the test batches: dicts of image, label and valid_mask."""
    everything = records()
    train = (
        grain.MapDataset.source(everything[TEST_IMAGES:])
        .seed(42)
        .shuffle()
        .random_map(augment)
        .batch(GLOBAL_BATCH_SIZE)
        .shard_to(mesh)
    )
    test = grain.MapDataset.source(everything[:TEST_IMAGES]).batch(GLOBAL_BATCH_SIZE).shard_to(mesh)
    return train, test


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.conv_1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv_2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.logits = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, image):
        x = nnx.max_pool(nnx.relu(self.conv_1(image)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv_2(x)), (2, 2), strides=(2, 2))
        return self.logits(x.reshape(x.shape[0], -1))


@nnx.jit
def create():
    """Returns the model and its optimizer, replicated on the mesh."""
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(5e-3, eps=1e-4), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates the model by the mean loss of the batch's valid rows, and returns this loss."""

    def loss_fn(model):
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.sum(losses * batch["valid_mask"]) / jnp.sum(batch["valid_mask"])

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def count_right(model, batch):
    """Returns the number of a batch's valid rows that the model classifies correctly."""
    right = jnp.argmax(model(batch["image"]), axis=-1) == batch["label"]
    return jnp.sum(right & batch["valid_mask"])


def save(checkpoints, step, model, optimizer, epochs):
    state = ocp.args.StandardSave(nnx.state((model, optimizer)))
    items = ocp.args.Composite(state=state, data=CheckpointSave(epochs))
    checkpoints.save(step, args=items)


def train(directory, num_epochs, told_to_stop):
    """Trains from the last checkpoint, if there is one, and saves checkpoints into `directory`.

    Args:
        num_epochs: Number of epochs of the whole run.
        told_to_stop: Function of a step that returns True if the run should save and stop there.

    Returns:
        The step at which training started, and the losses of the steps after it.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train_ds, test_ds = make_datasets(mesh)
    losses = []
    with (
        jax.set_mesh(mesh),
        ocp.CheckpointManager(directory / "checkpoints") as checkpoints,
        train_ds.epochs(num_epochs) as epochs,  # each epoch has another order
    ):
        model, optimizer = create()
        step = start = checkpoints.latest_step() or 0
        if start:
            state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointRestore(epochs))
            nnx.update((model, optimizer), checkpoints.restore(start, args=items).state)
        for batches in epochs:
            for batch in batches:
                losses.append(train_step(model, optimizer, batch))
                step += 1
                if told_to_stop(step):
                    save(checkpoints, step, model, optimizer, epochs)
                    say(f"told to stop: step {step} is saved, start again to go on")
                    return start, [float(loss) for loss in losses]
            save(checkpoints, step, model, optimizer, epochs)
            right = sum(int(count_right(model, batch)) for batch in test_ds)
            say(
                f"epoch {batches.epoch + 1:2} of {num_epochs}, step {step:3}:"
                f" loss {float(losses[-1]):.4f}, {right / TEST_IMAGES:.1%} of the test images right"
            )
        if step == start:
            say(f"the checkpoint of step {step} has all {num_epochs} epochs: nothing is left to do")
    return start, [float(loss) for loss in losses]


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the run (default: 20)")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="shared by all hosts")
    parser.add_argument("--distributed", action="store_true", help="train as one of several hosts")
    args = parser.parse_args()
    if args.distributed:
        # JAX catches a SIGTERM on any host, and then tells all hosts to stop at the same step.
        jax.distributed.initialize()
        told_to_stop = multihost_utils.reached_preemption_sync_point
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        told_to_stop = lambda step: told.is_set()  # noqa: E731
    directory = args.checkpoint_dir.resolve()
    start, losses = train(directory, args.epochs, told_to_stop)
    if jax.process_index() == 0:
        file = directory / "losses.json"
        before = json.loads(file.read_text())[:start] if start else []
        file.write_text(json.dumps(before + losses))


if __name__ == "__main__":
    main()
