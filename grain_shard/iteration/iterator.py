"""`ShardedIterator`: the iterator over global batches that a training loop uses.

Words that the whole package uses:

- **host**: one JAX process.
- **global batch**: the rows of one training step, of all hosts together.
- **host batch**: the rows of a global batch that one host holds.
- **row**: one element of a batch along its leading axis: a record, or padding.
- **shard**: an equal part of the rows of a global batch. A device holds one shard, and a host
  holds the shards of its devices.
- **position**: the point between two batches at which an iterator stands, in a form that is quick
  to copy. The form depends on the kind of pipeline.
- **state**: a position as plain JSON, which the user saves.
- **round**: an exchange among hosts. Every host posts an answer, and then all hosts read the same
  verdict.
- **vote**: a round in which the hosts agree on the number of batches that all of them hand out
  next. Votes find the end of streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grain

from grain_shard.errors import GrainShardError, ShardingError, describe_mesh, reopening
from grain_shard.hosts.host_group import GroupSettings
from grain_shard.hosts.state_files import is_shared, read_state, write_state
from grain_shard.iteration.device_batches import PutBatch
from grain_shard.iteration.host_batches import HostBatches, Position
from grain_shard.iteration.run import Run, RunInputs
from grain_shard.reading.first_record import with_digest, without_digest
from grain_shard.spans import counted_by
from grain_shard.state_json import from_storage
from grain_shard.stats.figures import Stats
from grain_shard.stats.meter import Meter
from grain_shard.threads.contexts import Contexts
from grain_shard.threads.pool import log_unclosed
from grain_shard.trees import Batch


class ShardedIterator(grain.DatasetIterator[Batch]):
    """Hands out the global batches of a pipeline.

    The state of the iterator belongs to the batch that was handed out last. After the end ``next``
    keeps raising StopIteration. After an error ``next`` keeps raising that error. The iterator is a
    context manager, which closes it.

    Args:
        host: The source of this host's batches.
        put_batch: Puts the host's batches on the devices.
        device_buffer_size: The maximum number of batches that wait on the devices or are on their
            way there.
        group_settings: The hosts among which the iterator runs; None if the mesh has only one host.
        dataset: The dataset that `shard_to` made; None if the batches come from elsewhere.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> ds = grain.MapDataset.range(24).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
        >>> with iter(ds) as batches:
        ...     first, state = next(batches), batches.get_state()
        ...     second = next(batches)
        ...     batches.set_state(state)  # goes on after the first batch
        ...     print(second["x"], next(batches)["x"])
        [ 8  9 10 11 12 13 14 15] [ 8  9 10 11 12 13 14 15]
    """

    def __init__(
        self,
        host: HostBatches,
        put_batch: PutBatch,
        *,
        device_buffer_size: int,
        group_settings: GroupSettings | None,
        dataset: grain.IterDataset | None = None,
    ):
        super().__init__()
        self.dataset = dataset
        self._host = host
        self._is_closed = False
        self._moves = 0  # number of times that the user has sent the iterator to another position
        self._meter = Meter(mask_key=host.padding.mask_key)
        self._inputs = RunInputs(host, put_batch, self._meter, device_buffer_size, group_settings)
        # The threads of all runs get these contexts, so their work counts in this meter.
        with counted_by(self._meter):
            self._contexts = Contexts()
            self._open(None)

    def __repr__(self) -> str:
        axes = describe_mesh(self._inputs.put_batch.mesh_axes)  # "" without a mesh
        mesh = f", mesh ({axes})" if axes else ""
        begun = "under way" if self._run.is_started else "not begun"
        phase = "closed" if self._is_closed else begun
        return f"<ShardedIterator of {self._host.kind}{mesh}, {phase}>"

    def _open(self, position: Position | None, digest: str = "") -> None:
        """Opens a run.

        Args:
            position: The position before its first batch; None for the beginning.
            digest: The digest of a restored state that is not compared with the source yet; or "".
        """
        # True while a run is opened, and after an interrupt, which may have cost the run a batch.
        # The next call then closes the run and opens another one.
        self._is_broken = True
        self._run = self._contexts.run(Run, self._inputs, position)
        self._position, self._digest = self._run.begins_at, digest
        self._is_broken = False

    def __next__(self) -> Batch:
        if self._is_closed or self._is_broken or not self._run.is_started:
            self.start_prefetch()
        position = self._position
        try:
            batch, self._position, size = self._run.next(position, self._digest)
            self._digest = ""
            self._meter.handed_out(size)
            return batch
        except BaseException as error:
            self._position = position  # an interrupt may have come after the assignment above
            self._break_unless_raised_again(error)
            raise

    def _break_unless_raised_again(self, error: BaseException) -> None:
        if not self._run.raises_again(error):
            self._is_broken = True

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch that ``next`` returned, as plain JSON."""
        digest = self._host.first_record.digest or self._digest
        return with_digest(self._host.to_state(self._position), digest)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to the position of a saved state, in an iterator that is new or in use.

        The next call of ``next`` compares the source's first record with the state. If they
        differ, that call raises a `StateError`.

        Args:
            state: The value that ``get_state`` returned. A storage may have turned its ints into
                arrays without axes.

        Raises:
            StateError: The state was saved by another pipeline, or its values were changed. The
                message names the difference.
        """
        self._restore(from_storage(state))

    def _restore(self, state: dict[str, Any]) -> None:
        self._require_open()
        self.get_state()  # raises if the iterator has no state: then it cannot restore one either
        state, digest = without_digest(state)
        self._go_to(self._host.from_state(state), digest)

    def write_state(self, directory: Any) -> None:
        """Writes the state into files of an existing folder, for a program without Orbax.

        Every host must call this with the same folder, at the same batch.

        Args:
            directory: The folder, a path.

        Raises:
            AgreementError: The hosts are not at the same batch.
        """
        state_writer(self)(directory)

    def read_state(self, directory: Any) -> None:
        """Goes to the position of the state that the hosts wrote into a folder.

        Args:
            directory: The folder that `write_state` or Orbax's handler wrote.

        Raises:
            StateError: The folder has no state for this host; a file is damaged; files are of
                different steps; or the state was saved by another pipeline.
        """
        self._restore(read_state(directory, self._host.own_feeds))

    def _begin_save(
        self, *, in_step: bool = False
    ) -> tuple[Callable[[], None], Callable[[Any], None]]:
        """Returns `compare`, which checks that all hosts save the same batch, and `write`.

        `write` writes the present state into a folder. Any thread may call the two, now or later.

        Args:
            in_step: True if `write` returns only after all hosts have written.
        """
        state, feeds, group = self.get_state(), self._host.own_feeds, self._run.group
        fields = self._host.next_batch(self._position)
        save = group.new_save()

        def write(directory: Any) -> None:
            write_state(directory, state, feeds)
            if in_step and not is_shared(state):
                group.wait_until_written(save)

        def compare() -> None:
            group.compare_positions(save, fields)

        return compare, write

    def seek(self, step: int | None = None, *, record: int | None = None) -> None:
        """Goes to a step, or to a record, of a random-access pipeline.

        A far step takes no longer than a near one, because no record before it is read. A new
        iterator reads nothing before the first ``next``. An iterator in use first waits for its
        unfinished reads, 5 seconds at most.

        Example:
            >>> import jax
            >>> mesh = jax.make_mesh((8,), ("data",))
            >>> ds = grain.MapDataset.range(80).map(lambda i: {"x": i}).batch(8).shard_to(mesh)
            >>> with iter(ds) as batches:
            ...     batches.seek(9)
            ...     print(next(batches)["x"])
            ...     batches.seek(record=5)
            ...     print(next(batches)["x"])
            [72 73 74 75 76 77 78 79]
            [ 5  6  7  8  9 10 11 12]

        Args:
            step: Number of batches before the next batch, counted from the beginning of the
                pipeline. A state that was restored earlier does not change the count.
            record: Number of records before the next batch, including the records of earlier
                epochs. The next batch begins with this record. Its step is the step of the batch
                that has this record in a run without `seek`.

        Raises:
            ShardingError: There is no such step or record; both of them or neither is given; or the
                pipeline is a stream or feeds, which find a step only by reading all batches before.
        """
        self._require_open()
        if (step is None) == (record is None):
            raise ShardingError(
                "seek takes either a step or a record.",
                remedy="call seek(step) or seek(record=...).",
            )
        self._go_to(self._host.position_at(step=step, record=record))

    def _go_to(self, position: Position | None, digest: str = "") -> None:
        self._require_open()
        self._moves += 1
        self._open_anew(position, digest)

    def reset(self) -> None:
        """Goes back to the first batch, as evaluation loops do before each evaluation.

        Each evaluation then has the same batches. With several hosts, every host must call this.

        Raises:
            ShardingError: The pipeline is a stream that allows only one pass.
        """
        self._require_open()
        self._host.require_new_pass()
        self._go_to(None)

    def _open_anew(self, position: Position | None, digest: str) -> None:
        """Closes the run, and opens another one at a position.

        Raises:
            GrainShardError: A thread is still inside the user's stream. The call may be repeated.
        """
        self._is_broken = True  # until `_open` has opened a run; if it does not, the next call does
        try:
            self._run.close()  # before the next run opens, which may read from the same source
        except Exception:
            # The user's own close has failed, but every thread has ended.
            if not self._run.is_running:
                self._open(position, digest)
            raise
        if self._host.keeps_streams and self._run.is_running:
            raise GrainShardError(
                f"a thread is still inside the source of the {self._host.kind}, and would share it"
                " with the next thread.\n"
                "  remedy: make the same call again, once the source has returned."
            )
        self._open(position, digest)

    async def save(self, directory: Any) -> Awaitable[None]:
        """Writes the state in the background, for Orbax's v1 API.

        Args:
            directory: Orbax's folder, which Orbax may still be creating.

        Returns:
            An awaitable that ends when the files are written. If each host writes its own files, it
            ends when all hosts have written theirs.
        """
        # `in_step`, because Orbax renames the folder as soon as the first host is done.
        compare, write_files = self._begin_save(in_step=True)

        async def write() -> None:
            await asyncio.to_thread(compare)
            await asyncio.to_thread(write_files, await directory.await_creation())

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Restores a state that `save` wrote, for Orbax's v1 API.

        Returns:
            An awaitable that does nothing, because `load` itself has restored the state.
        """
        # Restored here and not in `done`, whose errors Orbax reports as errors of another handler.
        self.read_state(directory)

        async def done() -> None:
            pass

        return done()

    def stats(self) -> Stats:
        """Returns figures of the iterator so far: its work, and the time that the loop waited."""
        meter = self._meter
        return Stats(meter.total(), meter.recent(), meter.faults())

    def start_prefetch(self) -> None:
        """Starts making batches before the first ``next``; a second call does nothing."""
        self._require_open()
        if self._is_broken:  # by an interrupt
            with reopening():
                self._open_anew(self._position, self._digest)
        try:
            self._run.start()
        except BaseException as error:
            self._break_unless_raised_again(error)
            raise

    def close(self) -> None:
        """Stops the background threads and waits for them; a second call does nothing.

        This waits at most 5 seconds for a thread that is inside the user's code.

        Raises:
            BaseException: An object of the user, such as a source, could not be closed. A note of
                the error names the object. Everything else is closed by then. The error is logged
                instead if `close` is never called or has stopped waiting.
        """
        self._is_closed = True
        self._run.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this is a closed iterator: call iter(ds) for a new one.")

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle or copy the iterator, because two iterators cannot share threads."""
        raise TypeError(
            "an iterator whose batches are on devices cannot be copied or sent to another process."
            " To make a second iterator, call iter(ds). Then pass the state that get_state() of"
            " the first one returns to set_state() of the second one."
        )

    def __enter__(self) -> ShardedIterator:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except Exception as error:
            if exc is None:
                raise
            log_unclosed(error)  # only logged, because the user must see the loop's own error

    def __del__(self) -> None:
        if (run := getattr(self, "_run", None)) is not None:
            run.let_go()


def state_writer(iterator: ShardedIterator) -> Callable[[Any], None]:
    """Checks that all hosts are at the same batch; returns a function that writes this state.

    Every host must call this. Any thread may call the function, now or later, with the folder.

    Raises:
        AgreementError: The hosts are not at the same batch.
    """
    compare, write = iterator._begin_save()
    compare()
    return write
