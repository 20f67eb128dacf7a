"""`check`: the acceptance test of a user's pipeline, before a pod is paid for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from grain_shard.errors import ShardingError, describe_error, describe_mesh, require_int
from grain_shard.hosts.state_files import FEEDS, STREAM
from grain_shard.iteration.sharded_dataset import ShardedDataset, sharded
from grain_shard.sharding.layout import BatchLayout
from grain_shard.threads.pickling import pickled
from grain_shard.threads.worker_processes import refuse_in_worker
from grain_shard.tools.checking.apart import Unknown, apart
from grain_shard.tools.checking.comparison import (
    Comparison,
    Difference,
    Reference,
    difference_of_records,
    leaves_of,
    rows_in,
)
from grain_shard.tools.checking.records import (
    RANDOM,
    REUSED,
    THREADS,
    UNSAFE,
    Level,
    Records,
    WrongRecord,
    levels,
)
from grain_shard.tools.checking.result import Checked, Line
from grain_shard.tools.checking.variants import (
    of_host,
    on_mesh,
    other_meshes,
    read_alone,
    with_options,
)

# Numbers of hosts that are simulated.
_HOSTS = 2, 4
# The readings of all sources and functions share this part of `seconds` equally. Each takes at most
# this many seconds.
_RECORDS_SHARE, _RECORDS_S = 1 / 12, 4.0
# With fewer seconds left no worker process is started, because its imports take some seconds.
_PROCESS_S = 10.0
_PICKLED_BYTES = 2**30  # the most bytes of a pipeline to send to a worker process

# The remedies.
_NOT_RANDOM = (
    "let records depend on their index alone, and return a new array for each. For random values"
    " use .seed(s) and .random_map(f), and only the generator that f gets. Use no time, counter,"
    " cache or random module."
)
_NEW_ARRAYS = "return a new array for each record, such as self.buffer.copy()."
_OF_RACES = (
    "the source, or the function, is not safe for several threads: hold a threading.Lock() around"
    " its reads, read with os.pread, or keep a file for each thread in a threading.local(). Or pass"
    " num_threads=1, or num_workers=n if the source opens its files in each worker process."
)
_OF_WORLDS = (
    "find what differs there: a flag, an environment variable, the working directory, a file"
    " that was replaced, a global variable that the main script sets, or hash() of a str."
    " Give it to the source or the function as an argument."
)
_IN_ANY_THREAD = (
    "do not let records depend on a threading.local() or on a setting of one thread: give its value"
    " to the source or the function as an argument."
)
_ON_ITS_OWN = (
    "let a record depend on its index alone, and not on the records that were read before it, or"
    " that are read with it. A .map after .batch must give each row the same values in any batch."
)
_RESTORES = (
    "keep no position outside of the pipeline's state: no counter or cache in a function of .map,"
    " and a complete get_state and set_state in an iterator of your own."
)


def check(ds: Any, batches: int = 20, *, seconds: float = 60.0, apart_from: Any = None) -> Checked:
    """Proves that all readers of a pipeline get the same batches: its acceptance test.

    One thread of this process reads some batches alone: the first ones and, with random access,
    some in the middle and the last ones. Some records of each source and each function are read
    twice by one thread, and then many times by 16 threads. So an error can name the source or
    function that is random, is not safe for threads, or returns one array for several records.
    Finally the same batches are read in other ways, and every bit must be the same:

    * a second time by one thread, and the first batch by the thread that calls this function
    * by the pipeline's own threads, workers or executor, by 16 threads, and by a worker process
    * after a restore in the middle, of a state that was text in between
    * on meshes of other sizes, and as 2 and 4 hosts

    The check also proves that all records have one shape and dtype. A proof that does not apply to
    the pipeline says why.

    The check reads in one process, which starts a worker process. So a script has to call it under
    ``if __name__ == "__main__":``.

    Example:
        >>> import grain, jax
        >>> import grain_shard
        >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        >>> records = grain.MapDataset.range(6).map(lambda i: {"x": i}).to_iter_dataset()
        >>> checked = check(records.filter(lambda record: True).batch(4).shard_to(mesh))
        >>> [line.found for line in checked.lines if line.name == "2 hosts"]
        ['ok']

    Args:
        ds: The dataset that `shard_to` returned.
        batches: The maximum number of batches to read. Fewer are read if they have more than 1 GiB
            together.
        seconds: Seconds after which no further batch is read. A proof for which time ran out says
            how many batches it compared.
        apart_from: A dataset with held-out records, before or after ``.shard_to``: no record may be
            in both within three epochs. Records are compared by their index in the source, by their
            files, or by their contents.

    Returns:
        The proofs, one line each. It prints as a table, also in a notebook.

    Raises:
        ShardingError: A proof failed. The error names the first difference, by record and leaf,
            and its remedy. Or an argument is not valid, or the mesh has devices of other processes.
        Exception: Any error of the pipeline while one thread reads it alone.
    """
    checked = run_checks(ds, batches, seconds, apart_from)
    if checked.error is not None:
        raise checked.error
    return checked


def run_checks(ds: Any, batches: int, seconds: float, apart_from: Any) -> Checked:
    """Makes the proofs of `check` up to the first one that fails, and returns them."""
    require_int("batches", batches, 1)
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ShardingError(
            f"seconds={seconds!r} is not a positive number.",
            remedy="pass the most seconds that the check may take.",
        )
    refuse_in_worker()
    pipeline = sharded(ds)
    if pipeline is None:
        raise ShardingError(
            f"check got a {type(ds).__name__}, which is not a pipeline with a mesh.",
            remedy="check the dataset that .shard_to(mesh) returned.",
        )
    if pipeline.layout.num_hosts > 1:
        raise ShardingError(
            f"the mesh has devices of {pipeline.layout.num_hosts} hosts, and check reads in one"
            " process.",
            mesh_axes=pipeline.shardings.mesh_axes,
            remedy="check the pipeline in a job of one process, with a mesh of its devices. Run"
            " python -m grain_shard rehearse for several hosts.",
        )
    lines: list[Line] = []
    for line in _Check(pipeline, batches, seconds).lines(apart_from):
        lines.append(line)
        if line.error is not None:  # later proofs most likely fail for the same reason
            break
    return Checked(tuple(lines))


class _Check:
    """The proofs for one dataset: each reads its batches in another way, and compares them."""

    def __init__(self, ds: ShardedDataset, batches: int, seconds: float):
        self._ds, self._seconds = ds, seconds
        self._batches, self._until = batches, time.monotonic() + seconds
        self._levels = levels(ds)

    @functools.cached_property
    def _reference(self) -> Reference:
        """The batches as one thread alone reads them."""
        # All proofs together take about as long as ten such readings.
        until = time.monotonic() + self._seconds / 10
        return Reference(read_alone(self._ds), self._batches, until)

    def lines(self, apart_from: Any) -> Iterator[Line]:
        """Makes one proof after the other, and yields the line of each."""
        if apart_from is not None:
            yield self._apart(apart_from)
        ds, reference = self._ds, self._reference
        yield self._shapes()
        yield self._of_records()
        yield self._proof(
            "read twice, by one thread",
            _NOT_RANDOM,
            lambda comparison: comparison.read(read_alone(ds)),
        )
        own_threads = "does not apply: each feed is read by its own threads"
        yield self._proof(
            "the first batch, in this thread",
            _IN_ANY_THREAD,
            lambda comparison: comparison.add(0, leaves_of(ds.host.first())),  # read by this thread
            why_not=own_threads if ds.host.kind == FEEDS else "",
        )
        has_threads = any(level.by_several for level in self._levels)
        remedy = _OF_RACES if has_threads else _OF_WORLDS
        yield self._proof(self._own_way(), remedy, lambda comparison: comparison.read(ds))
        yield self._proof(
            f"{THREADS} threads",
            _OF_RACES,
            lambda comparison: comparison.read(with_options(ds, num_threads=THREADS)),
            why_not="" if has_threads else "does not apply: one thread at a time reads the records",
        )
        halves = reference.restores()
        yield self._proof(
            "a restore, through JSON",
            _RESTORES,
            lambda comparison: comparison.read(read_alone(ds), halves),
            why_not="" if halves else "does not apply: an iterator of the stream has no state",
        )
        meshes = other_meshes(ds, reference.batch_rows)
        for mesh in meshes:
            yield self._proof(
                f"mesh {describe_mesh(mesh.mesh_axes)}",
                _ON_ITS_OWN,
                lambda comparison, mesh=mesh: comparison.read(on_mesh(ds, mesh)),
            )
        if not meshes:
            count = jax.local_device_count()
            why_not = f"not checked: no other number of this host's devices ({count}) fits a batch"
            yield Line("another mesh", why_not=why_not)
        for hosts in _HOSTS:
            yield self._proof(
                f"{hosts} hosts",
                _ON_ITS_OWN,
                lambda comparison, hosts=hosts: self._read_as_hosts(comparison, hosts),
                why_not=self._why_no_hosts(hosts),
            )
        yield self._proof(
            "a worker process",
            _OF_WORLDS,
            lambda comparison: comparison.read(with_options(ds, num_workers=1, executor=None)),
            why_not=self._why_no_worker(),
            share=1,
        )

    def _proof(
        self,
        name: str,
        remedy: str,
        read: Callable[[Comparison], object],
        *,
        why_not: str = "",
        share: float = 0.5,
    ) -> Line:
        """Proves that the batches, read in another way, are the same as for one thread alone.

        Args:
            name: The way to read.
            remedy: The change to make if a batch differs.
            read: A function that reads the batches and gives them to a `Comparison`.
            why_not: The reason why this way is left out; "" if it is not.
            share: The part of the seconds left that the proof may take.
        """
        try:
            self._ds.host.require_new_pass()
        except ShardingError as error:
            why_not = f"does not apply: {error.problem}"
        if (left_s := self._until - time.monotonic()) < 0:
            why_not = f"not checked: the {self._seconds:g} s ran out"
        if why_not:
            return Line(name, why_not=why_not)
        comparison = Comparison(self._reference, time.monotonic() + share * left_s)
        error = None
        try:
            read(comparison)
            if comparison.found is not None:
                error = self._error_of_batch(name, remedy, comparison.step, comparison.found)
        except Exception as raised:
            error = self._error_raised(name, remedy, raised)
        return Line(name, str(comparison), error=error)

    def _own_way(self) -> str:
        """Returns a name for the way in which the pipeline itself reads."""
        settings = self._ds.settings
        if settings.executor is not None:
            return f"the pipeline's {type(settings.executor).__name__}"
        if settings.num_workers:
            return f"the pipeline's worker processes ({settings.num_workers})"
        if self._ds.host.kind == STREAM:
            return "the pipeline's buffers"
        count = settings.num_threads
        return "the pipeline's threads" + ("" if count is None else f" ({count})")

    def _error_raised(self, name: str, remedy: str, error: Exception) -> ShardingError:
        """Returns the error for a proof that got an error in place of a batch."""
        if isinstance(error, ShardingError):  # it names the leaf, and has a remedy of its own
            error.problem = f"{name}: {error.problem}"
            return error.with_mesh(self._ds.shardings.mesh_axes)
        problem = f"{name}: {describe_error(error)} One thread that read alone got no error."
        raised = self._error(problem, f"fix this error. If it gives no reason, {remedy}")
        raised.__cause__ = error
        return raised

    def _error_of_batch(
        self, name: str, remedy: str, step: int, found: Difference
    ) -> ShardingError:
        row = self._reference.name(step, found.row)
        problem = f"{name}: {row} was {found.got}. One thread that read alone got {found.alone}."
        if remedy is not _NOT_RANDOM and self._is_random():
            remedy = _NOT_RANDOM
        return self._error(problem, remedy, found)

    def _error(self, problem: str, remedy: str, found: Difference | None = None) -> ShardingError:
        path, leaf = (None, None) if found is None else (found.path, found.leaf)
        mesh_axes = self._ds.shardings.mesh_axes
        return ShardingError(problem, remedy=remedy, path=path, leaf=leaf, mesh_axes=mesh_axes)

    def _is_random(self) -> bool:
        """Returns True if one thread that reads alone gets other batches than before."""
        again = Comparison(self._reference, time.monotonic() + self._seconds / 10)
        try:
            again.read(read_alone(self._ds))
        except Exception:  # one thread alone has read these batches before without an error
            return True
        return again.found is not None

    def _why_no_hosts(self, hosts: int) -> str:
        """Returns why the rows of `hosts` hosts are not read; "" if they are."""
        if self._ds.settings.rows == "local":
            return "does not apply: each host reads its own slice"
        rows = self._reference.batch_rows
        return f"not checked: {rows} rows do not split into {hosts} parts" if rows % hosts else ""

    def _why_no_worker(self) -> str:
        """Returns why no worker process is started; "" if one is."""
        if self._ds.settings.num_workers:
            return "does not apply: the pipeline reads in worker processes"
        if self._ds.host.kind == STREAM:
            return "does not apply: a stream has no num_workers"
        if self._until - time.monotonic() < _PROCESS_S:
            return f"not checked: fewer than {_PROCESS_S:g} s were left to start it"
        try:
            pickled(self._ds.parents[0], _PICKLED_BYTES)
        except ShardingError as error:
            return f"not checked: {error.problem}"
        return ""

    def _read_as_hosts(self, comparison: Comparison, hosts: int) -> None:
        """Reads the rows of each of `hosts` hosts, one host after the other."""
        for host in range(hosts):
            layout = BatchLayout(hosts, (host,), (("data", hosts),), hosts, hosts)
            if not comparison.read_host(of_host(read_alone(self._ds), layout).host, layout):
                break

    def _apart(self, other: Any) -> Line:
        try:
            here, there, error = apart(self._ds, other, self._until)
        except Unknown as why:
            return Line("apart", why_not=f"not checked: {why}")
        return Line("apart", f"{here:,} and {there:,} records", error=error)

    def _of_records(self) -> Line:
        name, count = "each source and function", 0
        seconds = min(_RECORDS_S, self._seconds * _RECORDS_SHARE / max(1, len(self._levels)))
        for level in self._levels:
            records = Records(level.ds, seconds)
            wrong = records.wrong_record(by_several=level.by_several)
            count += records.count
            if wrong is not None:
                error = self._error_of_record(level, wrong)
                return Line(name, f"{count:,} records", error=error)
        if not count:
            return Line(name, why_not="does not apply: no record can be read by its index")
        return Line(name, f"{len(self._levels)} of them, {count:,} records")

    def _error_of_record(self, level: Level, wrong: WrongRecord) -> ShardingError:
        """Returns the error for a record that is random, unsafe for threads, or reused."""
        record = f"record {wrong.record:,} of {level.ds}"
        found = difference_of_records(wrong.got, wrong.alone)  # `got` and `alone` become texts
        problems_and_remedies = {
            REUSED: (
                f"a later read changed {record} from {found.alone} to {found.got}. The source, or"
                " the function, returns one array for several records.",
                _NEW_ARRAYS,
            ),
            RANDOM: (
                f"{record} was {found.alone}, and {found.got} at the next read, each time for one"
                " thread that read alone.",
                _NOT_RANDOM,
            ),
            UNSAFE: (
                f"{record} was {found.got} for one of {THREADS} threads that read at the same time."
                f" One thread that read alone got {found.alone}, each time.",
                _OF_RACES,
            ),
        }
        return self._error(*problems_and_remedies[wrong.kind], found)

    def _shapes(self) -> Line:
        # Nothing is compared here: reading these batches would have refused another shape or dtype.
        reference = self._reference
        count, rows = len(reference.batches), sum(map(rows_in, reference.batches.values()))
        cut = f" of {reference.wanted:,}" if count < reference.wanted else ""
        steps = ", ".join(f"{some.steps.start:,}:{some.steps.stop:,}" for some in reference.ranges)
        compared = f"{count:,}{cut} batches ({steps}), {rows:,} rows"
        return Line("shapes and dtypes of the records", compared)
