"""P20: what it costs that hosts agree, with as many as a large slice has.

Each simulated host is a thread of a few processes, with a client of its own of one coordination
service, and runs the project's own code. A few hosts ask that service where streams end; what they
would do between batches, a training step, is left out, so that they wait for each answer. Many ask
their devices, which are missing here: what those are asked is answered at once, by what this host
has said. Real processes are measured by ``python benchmarks/stream_agreement.py --hosts 4``, and
with a real all-reduce, the CPU's, where that is told ``--by devices``.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.measure import Comparison, Goal, Group, Round, Run, alone
from grain_shard.hosts.by_store import ByStore
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.minimum import Way, asks_devices
from grain_shard.hosts.rounds import Rounds, agree
from grain_shard.hosts.series import Series
from grain_shard.tasks import Known

FEW_HOSTS, HOSTS = (4, 8), (16, 256, 1536)
PROCESSES = 4
BATCHES, VOTES = 30, 3  # agreed on in numbers, and in words
BUFFERED = 6  # batches, with the default buffers
TIMEOUT_S = 120.0


class Client:
    """A client of the coordination service that counts what it is asked for."""

    def __init__(self, client: Any):
        self._client, self.calls = client, Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


class Batches:
    """A stage whose buffers are always full."""

    def __init__(self):
        self.taken = 0

    def known(self, wait_s: float = 0.0) -> Any:
        return Known(self.taken + BUFFERED, None)

    def __next__(self) -> Any:
        self.taken += 1
        return self.taken

    def start(self) -> None:
        pass

    stop = close = start


class Devices(Way):
    """In place of those of all hosts: the least is what this host says, as all say the same."""

    is_collective = True

    def least(self, numbers: Sequence[int], begins: Callable[[], None]) -> tuple[int, ...]:
        begins()
        return tuple(numbers)


def run_host(host: int, hosts: int, client: Client, local: Any, meet: Any) -> dict[str, float]:
    """The seconds of each part on one simulated host, and its calls of the store."""
    local.host, local.client = host, client
    rounds = Rounds(range(hosts), TIMEOUT_S, local.series)
    batches = Batches()
    ends = AgreedEnd(
        batches,  # pyright: ignore[reportArgumentType]
        batches,  # pyright: ignore[reportArgumentType]
        rounds,
        Devices() if asks_devices(range(hosts)) else ByStore(rounds),
        remainder="pad",
        same_rows=False,
        padding=lambda: None,
    )
    assert isinstance(local.series, Series)
    ends.start()
    meet()
    start = time.perf_counter()
    rounds.begin("stream")
    next(ends)
    agree(rounds, {"rows": "local", "mesh": {"data": hosts}, "leaves": {"x": "float32[8]"}})
    started_s = time.perf_counter() - start
    client.calls.clear()
    meet()
    start, at_work = time.perf_counter(), time.thread_time()
    for _ in range(BATCHES):
        next(ends)
    a_batch_s = (time.thread_time() - at_work) / BATCHES
    waiting_s = (time.perf_counter() - start) / BATCHES
    calls = sum(client.calls.values())
    meet()
    start = time.perf_counter()
    for _ in range(VOTES):
        ends._vote_in_words()
    in_words_s = (time.perf_counter() - start) / VOTES
    meet()
    ends.close()
    return {
        "started": started_s,
        "a batch": a_batch_s * 1e3,
        "waiting": waiting_s * 1e3,
        "calls": calls / BATCHES,
        "in words": in_words_s * 1e3,
    }


def run_process(address: str, hosts: int, first: int, stop: int) -> None:
    """Runs some of the hosts, each in a thread, and prints the figures of the slowest."""
    from unittest import mock

    import jax
    from jax._src.lib import _jax  # pyright: ignore

    from grain_shard.hosts import rounds

    # Hundreds of threads that ask for the interpreter every 5 ms would cost what hosts do not.
    sys.setswitchinterval(1)
    local = threading.local()
    raw = [_jax.get_distributed_runtime_client(address, host) for host in range(first, stop)]
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
    assert len(results) == stop - first, "a host has failed"
    print(json.dumps({name: max(r[name] for r in results) for name in results[0]}), flush=True)


def simulate(hosts: int) -> dict[str, float]:
    """The figures of the slowest of so many hosts."""
    from jax._src.lib import _jax  # pyright: ignore

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, hosts)
    borders = [hosts * k // PROCESSES for k in range(PROCESSES + 1)]
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
        service.shutdown()
    of_processes = [json.loads(text.splitlines()[-1]) for text in printed]
    return {name: max(p[name] for p in of_processes) for name in of_processes[0]}


def measure(run: Run) -> Iterator[Round]:
    for _ in range(run.rounds(1, 3)):
        yield {
            f"{hosts} {name}": value
            for hosts in FEW_HOSTS + HOSTS
            for name, value in simulate(hosts).items()
        }


def _comparisons() -> Iterable[Comparison]:
    for hosts in FEW_HOSTS + HOSTS:
        few = hosts in FEW_HOSTS
        parts = [
            ("started", "until all have compared their pipelines", "s", Goal("at most", 1)),
            ("a batch", "agreeing on the ends of streams, a batch", "ms", Goal("at most", 5)),
            ("waiting", "the same, were there no steps between", "ms", Goal("at most", 5)),
            (
                "calls",
                "asking the first host's store, a batch",
                "calls",
                None if few else Goal("exactly", 0),
            ),
            ("in words", "a vote in words, as where a host has failed", "ms", None),
        ]
        for name, what, unit, goal in parts:
            if few or name != "waiting":  # devices answer the simulated hosts at once
                key, title = f"{hosts} {name}", f"{hosts:,} hosts: {what}"
                yield alone("P20" if goal else "", title, unit, key, goal)


GROUPS = [
    Group("agreement", "Hosts that agree, simulated", measure, list(_comparisons())),
]
