"""`Settings`: the options of `shard_to`, as one value."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from grain_shard.errors import ShardingError, require_int
from grain_shard.reading.faults import FaultRules
from grain_shard.reading.from_iterable import Rows
from grain_shard.sharding.sharding_tree import ShardingTree


@dataclass(frozen=True)
class Settings:
    """The options with which `shard_to` ends a pipeline.

    A new option is a field of this class and an argument of `shard_to`.

    Attributes:
        shardings: The sharding of each leaf of a batch.
        cpu_buffer_size: The maximum number of batches in host memory, ready or being made.
        device_buffer_size: The maximum number of batches that wait on the devices or are on their
            way there.
        num_threads: Number of threads that read a `MapDataset`, or run feeds, side by side. None
            adapts the number while the pipeline runs. For a stream, the limit for the threads of
            its ``.to_iter_dataset``.
        num_workers: Number of Grain worker processes, which make the batches of a `MapDataset` or
            run this host's feeds. 0 uses threads of this process.
        executor: Makes the batches of a `MapDataset` in other processes, at most `cpu_buffer_size`
            batches at a time. None makes them in this process.
        rows: The rows that a stream yields on each of several hosts: "global" for the same whole
            batches, "local" for the host's own rows. None takes the argument `rows` of
            `from_iterable`. On several hosts one of the two arguments must be given.
        timeout_s: Longest time that one host waits for another, in seconds.
        fault_rules: The rules for failed reads.
    """

    shardings: ShardingTree
    cpu_buffer_size: int = 4
    device_buffer_size: int = 2
    num_threads: int | None = None
    num_workers: int = 0
    executor: Executor | None = None
    rows: Rows | None = None
    timeout_s: float = 60.0
    fault_rules: FaultRules = FaultRules()  # noqa: RUF009 (it is frozen)

    def __post_init__(self) -> None:
        require_int("cpu_buffer_size", self.cpu_buffer_size, 1)
        require_int("device_buffer_size", self.device_buffer_size, 1)
        require_int("num_workers", self.num_workers, 0)
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1)
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ShardingError(
                f"timeout_s={self.timeout_s!r} is not a positive number of seconds.",
                remedy="pass timeout_s as the most seconds that one host may wait for another.",
            )
        is_class = isinstance(self.executor, type)  # not an object of the class
        if self.executor is not None and (is_class or not hasattr(self.executor, "submit")):
            raise ShardingError(
                f"executor={self.executor!r} is not a concurrent.futures.Executor.",
                remedy="pass an Executor object, for example client.get_executor() of Dask.",
            )
        if self.executor is not None and self.num_workers:
            raise ShardingError(
                "executor and num_workers are both given, but only one of them can make batches.",
                remedy="leave out num_workers: the executor has workers of its own.",
            )
        if not isinstance(self.shardings, ShardingTree):
            raise ShardingError(
                f"shardings is a {type(self.shardings).__name__}, not a ShardingTree.",
                remedy="pass ShardingTree.of(mesh, spec).",
            )
