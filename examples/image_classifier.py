"""An image classifier to copy: augmentation, evaluation, checkpoints and preemption.

`python examples/image_classifier.py` learns scikit-learn's images of digits, on 8 virtual devices
if there is no accelerator. It stops halfway, goes on, and checks six promises. With a folder for
checkpoints it stops at SIGTERM, and resumes. Your images are an `ArrayRecordSource("train-*")`.
"""

import argparse
import os
import signal
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from sklearn.datasets import load_digits

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave

GLOBAL_BATCH_SIZE, EPOCHS = 128, 10  # the batch of all hosts together


def augment(record, rng):
    """Makes an image lighter or darker. A record has the same `rng` on any number of hosts."""
    return record | {"image": record["image"] * np.float32(rng.uniform(0.8, 1.2))}


def make_datasets(mesh):
    """Returns batches of 1,497 images to train and 300 to test: image, label, index, valid_mask."""
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16).reshape(-1, 8, 8, 1)
    records = [{"image": images[i], "label": labels[i], "index": i} for i in range(len(images))]
    train, test = grain_shard.split(records, [1497, 300], seed=0)  # the same in each epoch
    train = train.seed(42).shuffle().random_map(augment).batch(GLOBAL_BATCH_SIZE)
    return train.shard_to(mesh), test.batch(GLOBAL_BATCH_SIZE).shard_to(mesh)


@nnx.jit  # under jit the model and its optimizer are made on every device of the mesh
def create():
    first, second = (nnx.Conv(n, 32, (3, 3), rngs=nnx.Rngs(n)) for n in (1, 32))
    layers = first, nnx.silu, second, nnx.silu, jax.vmap(jnp.ravel)
    model = nnx.Sequential(*layers, nnx.Linear(8 * 8 * 32, 10, rngs=nnx.Rngs(0)))
    return model, nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(where=batch["valid_mask"])  # of the valid rows of all hosts

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def eval_step(model, batch):
    right = model(batch["image"]).argmax(axis=-1) == batch["label"]
    return jnp.array([right, right | True]).sum(axis=1, where=batch["valid_mask"])  # right, and all


def train(train_ds, test_ds, directory, told_to_stop):
    """Trains from the last checkpoint on. Returns two counts of test images: right, and all."""
    log = print if jax.process_index() == 0 else str
    with ocp.CheckpointManager(directory) as manager, train_ds.epochs(EPOCHS) as epochs:
        model, optimizer = create()
        if step := manager.latest_step() or 0:
            state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointRestore(epochs))
            nnx.update((model, optimizer), manager.restore(step, args=items).state)
        for batches in epochs:  # each epoch has another order
            for batch in batches:
                loss, step = train_step(model, optimizer, batch), step + 1
                if stop := told_to_stop(step):
                    break
            state = ocp.args.StandardSave(nnx.state((model, optimizer)))
            manager.save(step, args=ocp.args.Composite(state=state, data=CheckpointSave(epochs)))
            manager.wait_until_finished()  # before told_to_stop asks JAX: docs/many_hosts.md
            log(f"step {step:3}: loss {loss:.4f}, saved{', told to stop' if stop else ''}")
            if stop:
                return None
        right, images = np.asarray(sum(eval_step(model, batch) for batch in test_ds))
        log(f"step {step:3}: {right} of {images} test images are classified correctly")
        return right, images


def check(train_ds, test_ds, directory):
    """Trains with a stop halfway, prints six promises, and returns True if all are kept."""
    compiled, stop_at = [], EPOCHS * len(train_ds) // 2 + 4
    listen = jax.monitoring.register_event_duration_secs_listener
    listen(lambda event, _, **of: "backend_compile" in event and compiled.append(of))
    where = f"{jax.device_count()} {'virtual ' * (jax.default_backend() == 'cpu')}devices"
    print(f"This check stops the run at step {stop_at}, and starts it again.\nBatches on {where}:")
    grain_shard.show(train_ds)
    checked = grain_shard.check(train_ds, seconds=4, apart_from=test_ds)  # or it raises
    train(train_ds, test_ds, directory, lambda step: step == stop_at)
    right, images = train(train_ds, test_ds, directory, lambda step: False)
    trains, evals = (str(compiled).count(f"jit({step})") for step in ("train_step", "eval_step"))
    with ocp.CheckpointManager(directory) as manager, train_ds.epochs(EPOCHS) as epochs:
        whole = [jax.device_get(batch) for batches in epochs for batch in batches]
        manager.restore(stop_at, args=ocp.args.Composite(data=CheckpointRestore(epochs)))
        rest = [jax.device_get(batch) for batches in epochs for batch in batches]
    seen = np.concatenate([batch["index"][batch["valid_mask"]] for batch in whole[:stop_at] + rest])
    once = all(len(set(epoch)) == len(epoch) == 1497 for epoch in np.array_split(seen, EPOCHS))
    rest, after = (jax.tree.map(np.ndarray.tobytes, part) for part in (rest, whole[stop_at:]))
    promises = {
        "any threads, meshes and hosts get the same batches, and no test image": not checked.error,
        f"{right / images:.1%} of the test images are right, 97 % wanted": right / images >= 0.97,
        f"{images} of 300 test images are counted": images == 300,
        f"compilations: {trains} of train_step, {evals} of eval_step": trains == evals == 1,
        f"{len(rest)} batches after the restore are those of one run, bit for bit": rest == after,
        f"{EPOCHS} epochs, with a stop, have each of 1,497 images once": once,
    }
    print("The promises:")
    for promise, kept in promises.items():
        print(f"  {'ok' if kept else 'FAILED'}: {promise}")
    return all(promises.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint-dir", required="--distributed" in sys.argv, help="a folder")
    parser.add_argument("--distributed", action="store_true", help="train as one of several hosts")
    args = parser.parse_args()
    if args.distributed:
        jax.distributed.initialize()
        told_to_stop = multihost_utils.reached_preemption_sync_point  # SIGTERM on any host
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for collectives of 8 devices
        signals, told_to_stop = [], lambda step: bool(signals)
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as scratch:
        datasets = make_datasets(mesh)
        if not args.checkpoint_dir:
            sys.exit(not check(*datasets, scratch))
        train(*datasets, os.path.abspath(args.checkpoint_dir), told_to_stop)


if __name__ == "__main__":
    main()
