"""A host that fails in mid-epoch ends all, and each of them says which host it was.

The hosts are plain processes: a script without a word about failures, and no launcher that would
end the others. Every step has a collective, in which they would wait for the one that is gone.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
import traceback

import grain
import jax
import numpy as np
import pytest
from absl import logging

import grain_shard
from grain_shard import rehearse
from grain_shard.hosts import blocked
from grain_shard.tools.rehearse import host_process
from tests.conftest import HOSTS_S, eventually
from tests.on_hosts import data_mesh

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS = range(4)
NOWHERE = -1
SCRIPT = """
import code
import contextlib
import pathlib
import sys
import time
import grain, grain_shard, jax, numpy as np
import orbax.checkpoint as ocp
from grain_shard.checkpoint import CheckpointSave
from grain_shard.iteration.iterator import state_writer

HANGS, SAVED_AHEAD = "hangs in its source", "saved after an extra next"
kind, first_bad_batch = sys.argv[1], int(sys.argv[2])
leaver = 0 if kind.endswith("sys.exit(3) on host 0") else 2
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.distributed.initialize()
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
shards = grain_shard.ShardByMesh(mesh)

def load(record):
    source_fails = kind in ("random access", "stream", "feeds", HANGS)
    if source_fails and jax.process_index() == 2 and 0 <= 16 * first_bad_batch <= record:
        if kind == HANGS:
            time.sleep(600)  # the host is ended before
        raise OSError("the bucket is gone")
    return {"x": np.full(4, record, np.float32)}

records = grain.MapDataset.range(16 * 40).map(load)

def stream(ds, shard_index, shard_count):
    return ds[shard_index::shard_count].to_iter_dataset().filter(lambda record: True)

if kind.startswith("stream"):
    own = stream(records, shards.shard_index, shards.shard_count)
    ds = own.batch(16 // shards.shard_count).shard_to(mesh, rows="local")
elif kind == "feeds":
    def make_feed(options):
        return stream(records, options.shard_index, options.shard_count)
    ds = grain_shard.feeds(make_feed, num_feeds=4).batch(16).shard_to(mesh)
else:
    ds = records.batch(16).shard_to(mesh, timeout_s=10 if kind == HANGS else 60)

step = jax.jit(lambda batch: batch["x"].sum())

def train(batches):
    for count, batch in enumerate(batches):
        loss = float(step(batch))
        if jax.process_index() == leaver and count == first_bad_batch:
            if kind.startswith("the loop"):
                raise OSError("the bucket is gone")
            if "is left by break" in kind:
                break
            if "is left by sys.exit" in kind:
                sys.exit(3 if "sys.exit(3)" in kind else 0)
        if kind == "all stop, and one ends first" and count == 5:
            # The others work on until they know that the process of host 2 ends.
            known = batches._run.group._alarm._ended
            while jax.process_index() != 2 and 2 not in known:
                time.sleep(0.1)
            break
        if kind.startswith("all stop after an error that") and count == 5:
            # As IPython does, this prints an error of a cell, and keeps it in sys.last_value.
            code.InteractiveInterpreter().runcode("raise OSError('of a cell')")
            break
        if kind == "all stop after a save" and count == 5:
            folder = pathlib.Path(__file__).parent / "saved"
            folder.mkdir(exist_ok=True)
            state_writer(batches)(folder)
            if jax.process_index() == 0:
                time.sleep(8)  # its files are slow: meanwhile the others end
            break
        if kind == SAVED_AHEAD and count == 5:
            with ocp.CheckpointManager(pathlib.Path(__file__).parent / "checkpoints") as manager:
                model = ocp.args.StandardSave({"w": np.ones(4)})
                data = CheckpointSave(batches)
                manager.save(count, args=ocp.args.Composite(model=model, data=data))
    print("trained to", loss)

if kind == "the loop, in with":
    with iter(ds) as batches:
        train(batches)
elif kind == "the loop, handled on host 0" and jax.process_index() == 0:
    with contextlib.suppress(Exception):
        train(iter(ds))
else:
    batches = iter(ds)
    if kind == SAVED_AHEAD and jax.process_index() == 2:
        next(batches)
    train(batches)
"""
KINDS = ["random access", "stream", "feeds"]
LOOPS = ["the loop", "the loop, in with", "the loop, handled on host 0"]
# How a process ends while the others go on, and what all of them say of it.
LEAVES = {
    "it is left by break": "the process of host 2 ended after batch 21 of 40, and host",
    "it is left by sys.exit(0)": "the process of host 2 ended after batch 21 of 40, and host",
    "it is left by sys.exit(3) on host 0": "the process of host 0 ended after batch 21 of 40, and",
    "stream is left by break": "the process of host 2 ended after batch 21, and host",
    "hangs in its source": "data of its next batch (timeout_s=10), and the other hosts wait for",
}
SAVED_AHEAD = "saved after an extra next"
AT_PROMPT = "all stop after an error that is old, at a prompt"
STOPS = [
    "all stop, and one ends first",
    "all stop after an error that is old",
    AT_PROMPT,
    "all stop after a save",
]
TRACEBACK = "Traceback (most recent call last)"
TYPED = "typed.py"  # the input of the processes, which only a prompt reads


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The file of the script, beside what is typed at a prompt."""
    script = tmp_path_factory.mktemp("plain") / "train.py"
    script.write_text(SCRIPT)
    script.with_name(TYPED).write_text("raise OSError('of a prompt')\n")
    return script


@pytest.fixture(scope="module")
def runs(script):
    """Of each kind of pipeline, what the hosts printed, and their exit codes.

    Host 2 fails in its batch 20, or nowhere. Several kinds run at the same time: they mostly wait.
    """

    def of_kinds(first_bad_batch, kinds):
        with contextlib.ExitStack() as cleanup:
            started = {kind: start(script, kind, first_bad_batch, cleanup) for kind in kinds}
            outputs = {
                k: [p.communicate(timeout=HOSTS_S)[0] for p in ps] for k, ps in started.items()
            }
            return {
                kind: (outputs[kind], [p.returncode for p in ps]) for kind, ps in started.items()
            }

    return functools.cache(of_kinds)


def start(script, kind, first_bad_batch, cleanup):
    """Starts the processes of all hosts, which `cleanup` ends."""
    port, processes = cleanup.enter_context(host_process.reserved_port()), []
    prompt = ["-i"] * (kind == AT_PROMPT)
    for host in HOSTS:
        process = subprocess.Popen(
            [sys.executable, *prompt, str(script), kind, str(first_bad_batch)],
            env=os.environ | host_process.host_environment(host, len(HOSTS), 2, port),
            stdin=cleanup.enter_context(script.with_name(TYPED).open()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cleanup.enter_context(process)
        cleanup.callback(process.kill)
        processes.append(process)
    return processes


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_whose_iterator_raises_ends_all_and_each_names_it(runs, kind):
    outputs, codes = runs(20, tuple(KINDS))[kind]
    for host, output in zip(HOSTS, outputs, strict=True):
        assert "host 2 failed" in output or host == 2, output
        assert "OSError: the bucket is gone" in output, output
        assert "trained" not in output
        assert output.count(TRACEBACK) <= 1
    if kind == "random access":
        # All four records that host 2 reads of batch 20 fail; which is met first, its threads say.
        named = {re.search(r"record (\d+) of the dataset", output)[1] for output in outputs}
        assert len(named) == 1
        assert named <= {"328", "329", "330", "331"}
    assert 0 not in codes, codes


@pytest.mark.parametrize("kind", LOOPS)
def test_an_error_of_the_loop_ends_all_and_each_names_it_with_the_batch(runs, kind):
    outputs, codes = runs(20, tuple(LOOPS))[kind]
    said = "the process of host 2 ended after batch 21 of 40 (OSError: the bucket is gone), and"
    for output in outputs:
        assert said in output, output
        assert "trained" not in output
        assert output.count(TRACEBACK) <= 1
    assert 0 not in codes, codes


@pytest.mark.parametrize("kind", LEAVES)
def test_a_host_that_ends_or_hangs_while_the_others_go_on_ends_all_and_is_named(runs, kind):
    outputs, codes = runs(20, tuple(LEAVES))[kind]
    for output in outputs:
        assert LEAVES[kind] in output, "\n----\n".join(outputs)
    assert 0 not in codes, codes


def test_a_save_of_hosts_at_different_batches_is_one_error_on_each(runs):
    outputs, codes = runs(20, (SAVED_AHEAD,))[SAVED_AHEAD]
    for output in outputs:
        assert output.count(TRACEBACK) == 1, output
        assert "AgreementError: the hosts are not at the same batch" in output
    assert 0 not in codes, codes


@pytest.mark.parametrize(
    ("kind", "together"),
    # A process that ended after as many batches as a host was handed does not stop this host, also
    # if `sys.last_value` has an error that something has handled.
    [*((kind, KINDS) for kind in KINDS), *((kind, STOPS) for kind in STOPS)],
)
def test_hosts_that_end_in_good_order_end_nobody_else(runs, kind, together):
    outputs, codes = runs(NOWHERE, tuple(together))[kind]
    assert codes == [0] * len(HOSTS), outputs
    assert all("trained to" in output and "failed" not in output for output in outputs)
    assert not any("ended after batch" in output for output in outputs), outputs
    assert all(("OSError: of a cell" in output) == ("is old" in kind) for output in outputs)
    assert all(("OSError: of a prompt" in output) == (kind == AT_PROMPT) for output in outputs)


# On hosts that handle what is raised.


def records_that_fail_on_host_1_from(record, meanwhile=lambda: None):
    """The records; host 0 calls a function when it reads one that fails on host 1."""

    def load(i):
        if i >= record:
            if jax.process_index() == 1:
                raise OSError("the bucket is gone")
            meanwhile()
        return {"x": np.full(4, i, np.float32)}

    return grain.MapDataset.range(16 * 8).map(load)


def what_they_raise():
    """The errors of two iterators, as they are printed, and what a third one sums up.

    When host 1 fails, host 0 is in the loop of the first one, and inside ``next`` of the second.
    """
    found, iterators = [], []

    def hear_of_the_failure():
        eventually(lambda: iterators and iterators[-1]._run.group._alarm._failure is not None)

    def nothing():
        pass

    for first_bad, in_loop, in_next in (
        (16 * 3, hear_of_the_failure, nothing),
        (16 * 5, nothing, hear_of_the_failure),
        (10**6, nothing, nothing),
    ):
        records, total = records_that_fail_on_host_1_from(first_bad, in_next), 0.0
        with iter(records.batch(16).shard_to(data_mesh(), cpu_buffer_size=1)) as batches:
            iterators.append(batches)
            try:
                # No collective, so that the other host comes to its iterator.
                for batch in batches:
                    total += sum(float(s.data.sum()) for s in batch["x"].addressable_shards)
                    if jax.process_index() == 0:
                        in_loop()
                found.append(total)
            except (OSError, grain_shard.AgreementError) as error:
                found.append(traceback.format_exc())
                with pytest.raises(type(error)):  # and again
                    next(batches)
        iterators.clear()
    return found


def test_a_loop_that_handles_the_failure_can_go_on_with_another_iterator():
    heard, failed = rehearse.run(what_they_raise, hosts=2, devices_per_host=2)
    for text in heard[:2]:
        assert "AgreementError: host 1 failed" in text
        assert "OSError: the bucket is gone" in text
        assert "During handling" not in text, "what ended the wait for host 1 is not told"
    assert all("\nOSError: the bucket is gone" in text for text in failed[:2])
    assert heard[2] + failed[2] == sum(4.0 * i for i in range(16 * 8))


def what_a_loop_that_stands_still_lives_through():
    """Host 0 stands still, as in a collective, when host 1 has failed; it is told to stay."""
    os.environ["GRAIN_SHARD_END_PROCESS"] = "0"
    blocked._STILL_S = 0.5
    lines, logged = [], threading.Event()

    def keep(line):
        lines.append(line.getMessage())
        if "has not moved" in lines[-1]:
            logged.set()
        return True

    logging.get_absl_logger().addFilter(keep)
    records = records_that_fail_on_host_1_from(16 * 3)
    with iter(records.batch(16).shard_to(data_mesh())) as batches:
        next(batches)
        if jax.process_index() == 0:
            logged.wait()
        with pytest.raises((OSError, grain_shard.AgreementError)):
            list(batches)
    return [line for line in lines if "host 1 failed" in line or "has not moved" in line]


def test_a_process_that_is_told_to_stay_does_not_end_and_says_where_it_stands():
    stood_still, failed = rehearse.run(
        what_a_loop_that_stands_still_lives_through, hosts=2, devices_per_host=2, timeout_s=HOSTS_S
    )
    assert failed == []
    (heard, line) = stood_still
    assert "host 1 failed" in heard
    assert "would end, but GRAIN_SHARD_END_PROCESS=0 keeps it" in line
