"""P20: the cost of the agreement between hosts, for as many hosts as a large slice has.

The hosts are simulated by the threads of a few processes. Each host has its own client of one
coordination service, and runs the code of grain_shard. One process has only the service and the
first host, so its processor time is that of the first host. Times by the clock are less certain,
because all hosts share the processors of one machine.
``python benchmarks/stream_agreement.py --hosts 4`` measures real processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.measure import Comparison, Goal, Group, Round, Run, alone
from grain_shard.hosts.compare import compare
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds
from grain_shard.hosts.series import Series
from grain_shard.threads.results import Known

HOSTS = (16, 256, 1536)
PROCESSES = 4  # processes for all hosts after the first
VOTES = 10
BUFFERED = 6  # batches that wait in the default buffers
# A host votes when half of its buffered batches are new. The other half is left for the training
# steps that run during the vote.
STEPS_A_VOTE = BUFFERED / 2
TIMEOUT_S = 120.0
_PATIENCE_S = 1000  # heartbeat timeout; long, because many clients share a processor
# Goals by the number of hosts, in ms: the processor time of the first host, and the shortest
# training step that hides a vote.
PROCESSOR_MS = {16: 10, 256: 50, 1536: 300}
STEP_MS = {16: 10, 256: 40, 1536: 300}


class Client:
    """A client of the coordination service that counts the calls of its methods, by name."""

    def __init__(self, client: Any):
        self._client, self.calls = client, Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


class Batches:
    """A stand-in for a stage of a pipeline whose buffers are always full."""

    taken = 0

    def known(self) -> Known:
        return Known(self.taken + BUFFERED, None)

    def wait_for(self, has_come: Callable[[], bool]) -> bool:
        assert has_come()
        return True


def run_host(host: int, hosts: int, client: Client, local: Any, meet: Any) -> dict[str, float]:
    """Runs one simulated host, and returns its figures.

    Args:
        host: Index of the host.
        hosts: Number of hosts.
        client: The host's client of the service.
        local: The variables of the host's thread, through which grain_shard finds the host.
        meet: Function that waits until all hosts have called it.

    Returns:
        "started": seconds of the first comparison. Per vote: "vote" (ms by the clock), "processor"
        (ms of the process), "calls" (calls of the store). "step": ms of the shortest training step
        that hides a vote.
    """
    local.host, local.client = host, client
    assert isinstance(local.series, Series)
    rounds, batches = Rounds(range(hosts), TIMEOUT_S, local.series), Batches()
    ends = AgreedEnd(
        batches,  # pyright: ignore[reportArgumentType]
        batches,  # pyright: ignore[reportArgumentType]
        rounds,
        remainder="pad",
        same_rows=False,
        padding=lambda before: None,
        require_voters=lambda missing: None,
    )
    votes = ends._votes
    meet()
    start = time.perf_counter()
    rounds.begin("stream")
    rounds.put("start", {"rows": "local", "mesh": {"data": hosts}, "leaves": {"x": "float32[8]"}})
    rounds.verdict("start", compare)
    started_s = time.perf_counter() - start
    client.calls.clear()
    meet()
    start, at_work = time.perf_counter(), time.process_time()
    while votes.number < VOTES:
        next(votes)
        batches.taken = votes.handed_out = votes.agreed
    vote_s = (time.perf_counter() - start) / VOTES
    calls = sum(client.calls.values())
    meet()  # until here the first host answers the other hosts
    processor_s = (time.process_time() - at_work) / VOTES
    return {
        "started": started_s,
        "vote": vote_s * 1e3,
        "step": vote_s * 1e3 / STEPS_A_VOTE,
        "processor": processor_s * 1e3,
        "calls": calls / VOTES,
    }


def run_process(address: str, hosts: int, first: int, stop: int) -> None:
    """Runs the hosts `first` to `stop` - 1, each in a thread, and prints the largest figures.

    The process of host 0 also runs the coordination service.
    """
    from unittest import mock

    import jax
    from jax._src.lib import _jax  # pyright: ignore

    from grain_shard.hosts import rounds

    # By default each waiting thread asks for the interpreter every 5 ms. With hundreds of threads
    # that would take time that real hosts do not need.
    sys.setswitchinterval(1)
    service = None
    if first == 0:
        service = _jax.get_distributed_runtime_service(address, hosts, _PATIENCE_S)
    local = threading.local()
    raw = [
        _jax.get_distributed_runtime_client(address, host, heartbeat_timeout=_PATIENCE_S)
        for host in range(first, stop)
    ]
    results: list[dict[str, float]] = []

    def run(host: int) -> None:
        raw[host - first].connect()
        local.series = Series()
        local.series.made_at, numbers = "benchmark", iter(range(100))

        def meet() -> None:
            raw[host - first].wait_at_barrier(f"meet-{next(numbers)}", int(TIMEOUT_S * 1000))

        # The number of a dataset is a counter of the process. Here one process has many hosts, so
        # the number is set.
        local.series._dataset = 0
        try:
            results.append(run_host(host, hosts, Client(raw[host - first]), local, meet))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other hosts would wait for this one until their timeout
        raw[host - first].shutdown()  # waits for all other hosts

    with (
        mock.patch.object(rounds, "runtime_client", side_effect=lambda: local.client),
        mock.patch.object(jax, "process_index", side_effect=lambda: local.host),
    ):
        threads = [threading.Thread(target=run, args=(host,)) for host in range(first, stop)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if service is not None:
        service.shutdown()
    assert len(results) == stop - first, "a host has failed"
    print(json.dumps({name: max(r[name] for r in results) for name in results[0]}), flush=True)


def simulate(hosts: int) -> dict[str, float]:
    """Returns the largest figures of all hosts, except "processor", which is of the first host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    borders = [0, *(1 + (hosts - 1) * k // PROCESSES for k in range(PROCESSES + 1))]
    call = "from benchmarks.agreement import run_process; run_process({!r}, {}, {}, {})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", call.format(address, hosts, first, stop)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, stop in itertools.pairwise(borders)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                raise ConnectionError("a simulated host failed")
            time.sleep(0.05)
        printed = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    of_first, *of_others = [json.loads(text.splitlines()[-1]) for text in printed]
    slowest = {name: max(p[name] for p in (of_first, *of_others)) for name in of_first}
    return {**slowest, "processor": of_first["processor"]}


def _measured(hosts: int) -> dict[str, float]:
    """Simulates the hosts, up to three times, because gRPC sometimes drops one of the connections.

    It did so in 4 of 17 runs, with hundreds of clients in a process, whatever grain_shard did.
    """
    for _ in range(2):
        with contextlib.suppress(ConnectionError):
            return simulate(hosts)
    return simulate(hosts)


def measure(run: Run) -> Iterator[Round]:
    for _ in range(run.rounds(1, 3)):
        yield {
            f"{hosts} {name}": value for hosts in HOSTS for name, value in _measured(hosts).items()
        }


def _comparisons() -> Iterable[Comparison]:
    for hosts in HOSTS:
        parts = [
            ("started", "until all have compared their pipelines", "s", Goal("at most", 1)),
            (
                "processor",
                "processor time of the first host, a vote",
                "ms",
                Goal("at most", PROCESSOR_MS[hosts]),
            ),
            ("step", "the shortest step that hides a vote", "ms", Goal("at most", STEP_MS[hosts])),
            ("vote", "a vote by the clock, all on one machine", "ms", None),
            ("calls", "calls of the store, a vote, most of a host", "calls", None),
        ]
        for name, what, unit, goal in parts:
            key, title = f"{hosts} {name}", f"{hosts:,} hosts: {what}"
            yield alone("P20" if goal else "", title, unit, key, goal)


GROUPS = [
    Group("agreement", "Hosts that agree, simulated", measure, list(_comparisons())),
]
