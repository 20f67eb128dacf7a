"""P20: the cost of the agreement between hosts, with as many as a large slice has.

Each simulated host is a thread of a few processes, with a client of its own of one coordination
service, and runs the project's own code. A process by itself has the service and the first host, so
that its processor time is that of the first host. The clock is less sure than that: all hosts share
the processors of one machine. Real processes are measured by
``python benchmarks/stream_agreement.py --hosts 4``.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.measure import Comparison, Goal, Group, Round, Run, alone
from grain_shard.hosts.compare import compare
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds
from grain_shard.hosts.series import Series
from grain_shard.tasks import Known

HOSTS = (16, 256, 1536)
PROCESSES = 4  # besides that of the first host
VOTES = 10
BUFFERED = 6  # batches, with the default buffers
# A host votes when as many batches are new as are left, so that many steps hide a vote.
STEPS_A_VOTE = BUFFERED / 2
TIMEOUT_S = 120.0
_PATIENCE_S = 1000  # of the service, with clients that get little of a processor
# Goals by the number of hosts: processor time of the first host, and the shortest step, in ms.
PROCESSOR_MS = {16: 10, 256: 50, 1536: 300}
STEP_MS = {16: 10, 256: 40, 1536: 300}


class Client:
    """A client of the coordination service that counts what it is asked for."""

    def __init__(self, client: Any):
        self._client, self.calls = client, Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


class Batches:
    """A stage whose buffers are always full."""

    taken = 0

    def known(self) -> Known:
        return Known(self.taken + BUFFERED, None)

    def wait_for(self, has_come: Callable[[], bool], wait_s: float) -> bool:
        assert has_come()
        return True


def run_host(host: int, hosts: int, client: Client, local: Any, meet: Any) -> dict[str, float]:
    """Returns the time of each part on one simulated host, and its calls of the store."""
    local.host, local.client = host, client
    assert isinstance(local.series, Series)
    rounds, batches = Rounds(range(hosts), TIMEOUT_S, local.series), Batches()
    ends = AgreedEnd(
        batches,  # pyright: ignore[reportArgumentType]
        batches,  # pyright: ignore[reportArgumentType]
        rounds,
        remainder="pad",
        same_rows=False,
        padding=lambda: None,
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
    meet()  # the first host answers the others up to here
    processor_s = (time.process_time() - at_work) / VOTES
    return {
        "started": started_s,
        "vote": vote_s * 1e3,
        "step": vote_s * 1e3 / STEPS_A_VOTE,
        "processor": processor_s * 1e3,
        "calls": calls / VOTES,
    }


def run_process(address: str, hosts: int, first: int, stop: int) -> None:
    """Runs some of the hosts, each in a thread, and prints the figures of the slowest."""
    from unittest import mock

    import jax
    from jax._src.lib import _jax  # pyright: ignore

    from grain_shard.hosts import rounds

    # Hundreds of threads that ask for the interpreter every 5 ms would cost what hosts do not.
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
        local.series.place, numbers = "benchmark", iter(range(100))

        def meet() -> None:
            raw[host - first].wait_at_barrier(f"meet-{next(numbers)}", int(TIMEOUT_S * 1000))

        # The number of the dataset is a counter of the process, and these are hosts of one process.
        local.series._dataset = 0
        results.append(run_host(host, hosts, Client(raw[host - first]), local, meet))
        raw[host - first].shutdown()  # which waits for all others

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
    """Returns the figures of the slowest of the hosts, but the processor time of the first."""
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
        printed = [process.communicate(timeout=4 * TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    of_first, *of_others = [json.loads(text.splitlines()[-1]) for text in printed]
    slowest = {name: max(p[name] for p in (of_first, *of_others)) for name in of_first}
    return {**slowest, "processor": of_first["processor"]}


def measure(run: Run) -> Iterator[Round]:
    for _ in range(run.rounds(1, 3)):
        yield {
            f"{hosts} {name}": value for hosts in HOSTS for name, value in simulate(hosts).items()
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
