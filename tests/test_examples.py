"""The scripts of `examples/`: the same losses on one host and on several, also if stopped."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grain_shard import rehearse
from tests.conftest import HOSTS_S
from tests.programs import without_grains_warning

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXAMPLES = Path(__file__).parents[1] / "examples"
CLASSIFIER = EXAMPLES / "image_classifier.py"
RECORDED_CLASSIFIER = Path(__file__).with_name("recorded_classifier.py")
LANGUAGE_MODEL = EXAMPLES / "language_model.py"
TOKEN_FILE = EXAMPLES / "token_file.py"
CHANGING_RUN = EXAMPLES / "changing_run.py"
MODEL_AXIS = EXAMPLES / "model_axis.py"


def losses_in(folder):
    return json.loads((folder / "losses.json").read_text())


def run_here(script, folder, *options):
    """Runs a script as one plain process; what it printed."""
    command = [sys.executable, script, *map(str, options), "--checkpoint-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on(hosts, script, folder, *options):
    """Rehearses a script on so many hosts, with eight devices in all; what host 0 printed."""
    words = [script, *map(str, options), "--distributed", "--checkpoint-dir", folder]
    sizes = {"hosts": hosts, "devices_per_host": 8 // hosts}
    done = rehearse.run_script(words, **sizes, timeout_s=HOSTS_S, echo=sys.stdout)
    assert done.exit_code == 0
    return done.outputs[0]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    """Ten million tokens: the bytes of a text, again and again."""
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    text = np.frombuffer(LANGUAGE_MODEL.read_bytes(), np.uint8).astype(np.uint16)
    np.resize(text, 10_000_000).tofile(path)
    return path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of each script on one host, in one go."""

    @functools.cache
    def losses_of(script, *options):
        folder = tmp_path_factory.mktemp(script.stem)
        run_here(script, folder, *options)
        return losses_in(folder)

    return losses_of


@pytest.mark.parametrize(
    ("script", "reads_tokens", "option", "part", "whole", "num_losses"),
    [
        (RECORDED_CLASSIFIER, False, "--epochs", 1, 3, 36),
        (LANGUAGE_MODEL, False, "--steps", 7, 12, 12),
        (TOKEN_FILE, True, "--steps", 7, 12, 12),
    ],
    ids=["image_classifier", "language_model", "token_file"],
)
def test_on_2_hosts_and_continued_on_1_the_losses_are_those_of_1_without_a_stop(
    uninterrupted, token_file, tmp_path, script, reads_tokens, option, part, whole, num_losses
):
    data = (token_file,) if reads_tokens else ()
    expected = uninterrupted(script, *data, option, whole)
    assert len(expected) == num_losses
    assert expected[-1] < expected[0] - 0.5, "it learns"

    run_on(2, script, tmp_path, *data, option, part)
    before = losses_in(tmp_path)
    run_here(script, tmp_path, option, whole, *data)
    continued = losses_in(tmp_path)
    assert 0 < len(before) < len(continued)
    assert continued[: len(before)] == before
    np.testing.assert_allclose(continued, expected, rtol=1e-3)

    run_here(script, tmp_path, *data, option, whole)  # nothing is left to do
    assert losses_in(tmp_path) == continued


STOPPED = """
import sys
sys.path.insert(0, {examples!r})
import language_model as example
example.SAVE_EVERY, train_step, steps = 2, example.train_step, iter(range(5))
def until_stopped(*args):
    if next(steps, None) is None:
        sys.exit(7)
    return train_step(*args)
example.train_step = until_stopped
example.main(example.make_parser(example.__doc__).parse_args())
"""


def test_a_language_model_that_was_stopped_between_two_checkpoints_goes_on(uninterrupted, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED.format(examples=str(EXAMPLES)))
    command = [sys.executable, tmp_path / "stopped.py", "--checkpoint-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "checkpoints" / "4").is_dir(), "5 steps were made"

    for last_step in (12, 3):  # the second run has nothing to do
        run_here(LANGUAGE_MODEL, tmp_path, "--steps", last_step)
        expected = uninterrupted(LANGUAGE_MODEL, "--steps", 12)
        np.testing.assert_allclose(losses_in(tmp_path), expected, rtol=1e-3)


PROMISES = r"""
The promises:
  ok: any threads, meshes and hosts get the same batches, and no test image
  ok: 9\d\.\d% of the test images are right, 97 % wanted
  ok: 300 of 300 test images are counted
  ok: compilations: 1 of train_step, 1 of eval_step
  ok: 56 batches after the restore are those of one run, bit for bit
  ok: 10 epochs, with a stop, have each of 1,497 images once
$"""


def test_the_classifier_alone_stops_goes_on_and_keeps_six_promises():
    done = subprocess.run([sys.executable, CLASSIFIER], capture_output=True, text=True, timeout=300)
    assert (done.returncode, without_grains_warning(done.stderr)) == (0, "")
    assert re.search(PROMISES, done.stdout), done.stdout
    first, second, _, table, *_ = done.stdout.splitlines()
    assert first == "This check stops the run at step 64, and starts it again."
    assert second == "Batches on 8 virtual devices:"
    assert table.startswith("  dataset ")
    (stopped,) = re.findall(r"^step  64: loss .*, told to stop$", done.stdout, re.MULTILINE)
    assert done.stdout.index("step  60: ") < done.stdout.index(stopped)


BROKEN = """
import random, sys, types
sys.path.insert(0, {examples!r})
import image_classifier as example
example.EPOCHS = 1
example.augment = lambda record, rng: record | {{"image": record["image"] * random.random()}}
if {unchecked}:
    example.grain_shard.check = lambda *args, **options: types.SimpleNamespace(error=None)
example.main()
"""


def broken(folder, *, unchecked):
    """Runs the classifier with random numbers that Grain does not know, for one epoch."""
    code = BROKEN.format(examples=str(EXAMPLES), unchecked=unchecked)
    (folder / "broken.py").write_text(code)
    command = [sys.executable, folder / "broken.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_classifier_is_refused_by_check_if_its_records_are_random(tmp_path):
    done = broken(tmp_path, unchecked=False)
    assert done.returncode == 1
    assert "each time for one thread that read alone" in done.stderr


def test_the_classifier_says_which_promises_are_broken(tmp_path):
    """One epoch is too few, and the random numbers are lost at a restart."""
    done = broken(tmp_path, unchecked=True)
    assert done.returncode == 1
    verdicts = re.findall(r"^  (ok|FAILED): ", done.stdout, re.MULTILINE)
    assert verdicts == ["ok", "FAILED", "ok", "ok", "FAILED", "ok"], done.stdout


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_classifier_saves_and_leaves_if_a_host_is_told_to_stop(uninterrupted, tmp_path, hosts):
    words = RECORDED_CLASSIFIER, tmp_path, "--sigterm-at", 17, "--epochs", 20
    output = run_here(*words) if hosts == 1 else run_on(hosts, *words)
    (step,) = map(int, re.findall(r"step +(\d+): loss .*, saved, told to stop", output))
    # The run has 20 epochs of 12 steps. JAX looks for the signal once a second: many steps.
    assert 17 <= step < 240
    assert len(losses_in(tmp_path)) == step

    epochs = max(3, step // 12 + 1)
    run_here(RECORDED_CLASSIFIER, tmp_path, "--epochs", epochs)
    losses = losses_in(tmp_path)
    assert len(losses) == 12 * epochs
    expected = uninterrupted(RECORDED_CLASSIFIER, "--epochs", 3)
    np.testing.assert_allclose(losses[:36], expected, rtol=1e-3)


def test_a_run_that_changes_has_the_losses_of_one_that_does_not(tmp_path):
    """On 4 hosts and then on 2; the mixture changes in batch 7, and batch 9 is twice as large."""
    pytest.importorskip("matplotlib")

    def losses_on(hosts, name, *options):
        run_on(hosts, CHANGING_RUN, tmp_path / name, *options)
        return losses_in(tmp_path / name)

    uninterrupted = losses_on(1, "uninterrupted", "--steps", 10)
    assert uninterrupted[-1] < uninterrupted[0] - 1, "it learns"
    first = losses_on(4, "changing", "--steps", 5)
    assert len(first) == 5
    picture = tmp_path / "losses.png"
    against = ("--picture", picture, "--against", tmp_path)
    both = losses_on(2, "changing", "--steps", 10, *against)
    assert both[:5] == first
    np.testing.assert_allclose(both, uninterrupted, rtol=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_axis_has_the_losses_of_one_host_on_two_with_explicit_axes_and_goes_on(tmp_path):
    def losses_of(output):
        assert "kernel of the first layer: P(None, 'model')" in output
        return [float(loss) for loss in re.findall(r"^step .*: loss (.*)$", output, re.MULTILINE)]

    def on_two_hosts(folder):
        words = [MODEL_AXIS, "--distributed", "--explicit", "--checkpoint-dir", folder]
        done = rehearse.run_script(words, hosts=2, devices_per_host=4, timeout_s=HOSTS_S)
        assert done.exit_code == 0, done.outputs
        return [losses_of(output) for output in done.outputs]

    command = [sys.executable, MODEL_AXIS, "--checkpoint-dir", tmp_path / "one"]
    here = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert here.returncode == 0, here.stderr
    expected = losses_of(here.stdout)
    assert len(expected) == 4
    assert expected[-1] < expected[0] / 4, "it learns"
    np.testing.assert_allclose(on_two_hosts(tmp_path / "two"), [expected] * 2, rtol=1e-3)
    shutil.rmtree(tmp_path / "one" / "160")
    np.testing.assert_allclose(on_two_hosts(tmp_path / "one"), [expected[3:]] * 2, rtol=1e-3)


@pytest.mark.parametrize(("script", "lines"), [(CLASSIFIER, 150), (LANGUAGE_MODEL, 200)])
def test_each_is_one_file_that_can_be_read_at_a_sitting(script, lines):
    assert len(script.read_text().splitlines()) <= lines
