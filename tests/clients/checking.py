"""What every client does, in its own environment: its runs on 1 and 2 hosts, and their comparison.

A client is a function ``train(run)``: it trains a tiny model with the client's own trainer, tells
`Run.step` of each batch, saves to `Run.checkpoints` when it stops after `Run.stop` steps, and goes
on from what lies there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STEPS, STOP = 12, 6
STREAMS = "streams on 1 host", "streams on 2 hosts"


@dataclasses.dataclass
class Run:
    """One run of the client's trainer, on each of its hosts.

    Attributes:
        data: A folder with the client's data.
        checkpoints: A folder for its checkpoints, which a run before this one may have filled.
        ours: Whether the batches come from us; if not, from the client's own input.
        stop: The number of steps after which the run saves and ends.
        hosts: The number of hosts.
        feeds: The number of feeds, for a client whose input is cut into them.
        weights: The model's weights after the last step, if the client notes them.
    """

    data: Path
    checkpoints: Path
    ours: bool
    stop: int
    hosts: int
    feeds: int
    batches: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[list[str]] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)
    passes: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)

    def batch(self, batch: Any) -> None:
        """Notes the batch that the trainer was given: a digest of its global rows."""
        self.batches.append(digest(batch))

    def loss(self, loss: Any) -> None:
        """Notes the loss of a step."""
        self.losses.append(float(loss))

    def step(self, batch: Any, loss: Any) -> None:
        """Notes a batch and its loss."""
        self.batch(batch)
        self.loss(loss)

    def evaluation(self, batches: Iterable[Any]) -> None:
        """Notes the batches of one evaluation."""
        self.evaluations.append([digest(batch) for batch in batches])

    def resumes(self, name: str, make: Callable[[], Any]) -> None:
        """Notes passes over a stream: one without a stop, others with a stop and a restore.

        Args:
            name: The name of the stream.
            make: Makes its dataset, with a new loader at each call.
        """
        from jax.experimental import multihost_utils

        with iter(make()) as batches:
            passes = [[digest(batch) for batch in batches]]
        for stop in (0, 1, 3):
            folder = self.checkpoints / f"{name} {stop}"
            folder.mkdir(exist_ok=True)
            with iter(make()) as batches:
                before = [digest(batch) for batch in itertools.islice(batches, stop)]
                batches.write_state(folder)
            multihost_utils.sync_global_devices("written by all hosts")
            with iter(make()) as batches:
                batches.read_state(folder)
                passes.append(before + [digest(batch) for batch in batches])
        self.passes[name] = passes


def digest(batch: Any) -> str:
    """A digest of the global batch, without our mask: the same on any number of hosts."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path)
        if "valid_mask" in name:
            continue
        whole = leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            whole = multihost_utils.process_allgather(leaf, tiled=True)
        rows = np.ascontiguousarray(whole)
        sha.update(f"{name} {rows.dtype} {rows.shape}".encode() + rows.tobytes())
    return sha.hexdigest()[:16]


def main(
    train: Callable[[Run], None],
    make_data: Callable[[Path], None] = lambda folder: None,
    *,
    resumed: Iterable[tuple[int, int, int]] = ((1, 2, STOP), (2, 1, STOP)),
    own: bool = True,
    one_feed: bool = False,
    off_own: float = 0.0,
    also: Callable[[Checks, Callable, Path], None] = lambda check, rehearsed, folder: None,
    streams: Callable[[Run], None] | None = None,
) -> None:
    """The ``__main__`` of a client's file: checks the client, or is one of its runs.

    Args:
        train: Trains on each host of a run.
        make_data: Writes the data, once.
        resumed: The hosts of a run that stops, the hosts of the run that goes on, and the step
            after which the first one stops.
        own: Whether the client's own input gives the same batches at each run on 1 host.
        one_feed: Whether ours has the rows of the client's own input if it has one feed only.
        off_own: How much a loss may differ from that with the client's own input, as a part of it.
            Where that has short batches, and ours padding, a mean adds the rows in another order.
        also: Makes further checks. It gets a function that rehearses a command on some hosts, and
            a folder.
        streams: Calls `Run.resumes` with streams that only as many hosts as before can resume.
    """
    if len(sys.argv) > 1:
        words = json.loads(sys.argv[1])
        _run(streams if streams and words["job"] in STREAMS else train, make_data, words)
    else:
        module = f"tests.clients.{Path(sys.modules['__main__'].__file__).stem}"
        sys.exit(_check(module, tuple(resumed), own, one_feed, off_own, also, bool(streams)))


def _run(train, make_data, words) -> None:
    if words["job"] == "data":
        make_data(Path(words["data"]))
        return
    import jax

    jax.distributed.initialize()
    run = Run(
        Path(words["data"]),
        Path(words["checkpoints"]),
        words["ours"],
        words["stop"],
        jax.process_count(),
        words["feeds"],
    )
    train(run)
    if jax.process_index() == 0:
        kept = ("batches", "losses", "evaluations", "weights", "passes")
        found = {name: getattr(run, name) for name in kept}
        Path(words["found"]).write_text(json.dumps(found))


class Checks:
    """The names of checks that held, and of those that failed."""

    def __init__(self):
        self.held: list[str] = []
        self.failed: list[str] = []

    def __call__(self, name: str, condition: bool, why: str = "") -> None:
        if condition:
            self.held.append(name)
        else:
            self.failed.append(name)
            print(f"FAILED: {name} {why}", file=sys.stderr)


def _check(
    module: str, resumed, own: bool, one_feed: bool, off_own: float, also, streams: bool
) -> int:
    from grain_shard import rehearse

    started, check = time.monotonic(), Checks()
    ends = started + float(os.environ["CLIENT_TIMEOUT_S"])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="client-")))
        (folder / "data").mkdir()

        def rehearsed(command, hosts):
            return rehearse.run_script(
                command,
                hosts=hosts,
                devices_per_host=2 // hosts,
                timeout_s=max(ends - time.monotonic(), 1),
                echo=sys.stderr,
            )

        def run(job, hosts=1, **words):
            words = {"job": job, "data": str(folder / "data")} | words
            words["found"] = str(folder / f"{job}.json")
            done = rehearsed(["-m", module, json.dumps(words, default=str)], hosts)
            check.failed += [f"{job} ended badly"] * (done.exit_code != 0)
            if job == "data" or done.exit_code != 0:
                return None
            print(f"-- {job}: {time.monotonic() - started:.0f} s", file=sys.stderr)
            return json.loads(Path(words["found"]).read_text())

        def train(job, hosts, *, ours=True, stop=STEPS, checkpoints=None, feeds=4):
            checkpoints = checkpoints or folder / f"checkpoints {job}"
            checkpoints.mkdir(exist_ok=True)
            return run(job, hosts, ours=ours, stop=stop, checkpoints=checkpoints, feeds=feeds)

        def same(what, found, expected, key, tolerance=0.0):
            if not found or not expected:
                return
            a, b = found[key], expected[key]
            if key not in ("losses", "weights"):
                check(what, a == b and bool(a), f"{a} for {b}")
                return
            off = max((abs(x - y) / abs(y) for x, y in zip(a, b, strict=False)), default=9.0)
            check(what, len(a) == len(b) and off <= tolerance, f"{a} for {b}")

        run("data")
        one = not check.failed and train("1 host", 1)
        if one:
            check("12 steps", len(one["losses"]) == len(one["batches"]) == STEPS)
            check("losses fall", min(one["losses"][-3:]) < one["losses"][0])
        if one and own:
            its = train("its own input", 1, ours=False)
            alike = train("ours in one feed", 1, feeds=1) if one_feed else one
            same("same rows as its own", alike, its, "batches")
            same("same losses as its own", alike, its, "losses", off_own)
            if its and its["evaluations"]:
                same("same evaluation as its own", alike, its, "evaluations")
        if one:
            two = train("2 hosts", 2)
            same("2 hosts have the rows of 1", two, one, "batches")
            same("and its losses", two, one, "losses", 1e-4)
        for job, found in (("1 host", one), ("2 hosts", one and two)):
            if found and found["evaluations"]:
                passes = found["evaluations"]
                check(f"evaluated twice alike on {job}", passes[0] == passes[1] != [])
        for hosts, job in enumerate(STREAMS if streams else (), 1):
            for name, passes in (train(job, hosts) or {"passes": {}})["passes"].items():
                is_same = passes == [passes[0]] * 4 and len(passes[0]) > 3
                check(f"{name} resumed on as many hosts, {hosts}", is_same, str(passes))
        for first, then, stop in resumed if one else ():
            checkpoints = folder / f"checkpoints {first} to {then}"
            name = f"saved on {first}, resumed on {then}"
            job = f"saved on {first}, for {then}"
            before = train(job, first, stop=stop, checkpoints=checkpoints)
            after = before and train(name, then, checkpoints=checkpoints)
            if after:
                both = {key: before[key] + after[key] for key in ("batches", "losses")}
                same(f"{name}: rows", both, one, "batches")
                same(f"{name}: losses", both, one, "losses", 1e-4)
                if one["weights"]:
                    same(f"{name}: weights", after, one, "weights", 1e-3)
        also(check, rehearsed, folder)
    packages = os.environ["CLIENT_PACKAGES"].split()
    versions = [f"python {platform.python_version()}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in packages]
    line = f"{', '.join(versions)}: {len(check.held)} checks held"
    if check.failed:
        line += f", {len(check.failed)} FAILED: {'; '.join(check.failed)}"
    else:
        line += f" ({', '.join(check.held)})"
    print(f"{line}; {time.monotonic() - started:.0f} s", flush=True)
    return bool(check.failed)
