"""`ShardedIterator`: hands out global batches, and keeps the promises about its life and state.

The words, as they are used everywhere in this package:

- **host**: one JAX process.
- **global batch**: the rows of one training step, of all hosts together.
- **host batch**: the rows of a global batch that one host holds.
- **row**: one element of a batch along its leading axis: a record, or padding.
- **shard**: an equal part of the rows, which one device holds. A host holds its devices' shards.
- **position**: where an iterator stands, in whatever form is quick to copy.
- **state**: a position as plain JSON, as the user saves it.
- **round**: every host posts an answer, and all read one verdict on them.
- **vote**: the answers of a round that is held to find out where streams end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, cast

import grain

from grain_shard.background import Background, TaskStage
from grain_shard.errors import ShardingError, describe_mesh
from grain_shard.hosts.compare import CONTENTS, FIRST_BATCH, GLOBAL, NOW, SAVED
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.state_files import is_shared, read_state, write_state
from grain_shard.hosts.together import AcrossHosts, Together
from grain_shard.interrupts import Uninterrupted
from grain_shard.iteration.host_batches import HostBatches, Position
from grain_shard.iteration.placing import Placed, Placer, Placing
from grain_shard.iteration.second_pass import Passes
from grain_shard.jax_context import jax_context
from grain_shard.reading.contents import with_digest, without_digest
from grain_shard.sharding.reshard import Resharder
from grain_shard.spans import counted_by
from grain_shard.stats.figures import Stats
from grain_shard.stats.meter import Meter
from grain_shard.tasks import log_unclosed
from grain_shard.trees import Batch

_SAVES = itertools.count()  # the same number on every host, because all hosts save together


class Run:
    """The batches from one position on.

    Args:
        kind: The kind of the pipeline.
        batches: The batches on this host.
        placed: The batches on the devices.
        stage: The same, up to the end that all hosts agree on.
        together: Their like on other hosts.
        meter: Counts them.
        first_digest: As in `Opened`.

    Attributes:
        first_digest: As given.
        batches: As given.
        placed: As given.
        stage: As given.
        together: As given.
        has_compared: True once the pipeline was compared with other hosts' and with a state's.
        start: Starts working ahead, once.
        close: Ends that and waits for it, once.
    """

    def __init__(
        self,
        kind: str,
        batches: TaskStage[Any],
        placed: TaskStage[Placed],
        stage: TaskStage[Placed] | AgreedEnd[Placed],
        together: Together,
        meter: Meter,
        first_digest: Callable[[], str],
    ):
        def start() -> None:
            together.start(kind, stage.stop, meter.waits_of_late)
            stage.start()

        def close() -> None:
            together.close()
            stage.close()

        self.first_digest: Callable[[], str] = first_digest
        self.batches: TaskStage[Any] = batches
        self.placed: TaskStage[Placed] = placed
        self.stage: TaskStage[Placed] | AgreedEnd[Placed] = stage
        self.together: Together = together
        self.has_compared: bool = False
        self.start: Uninterrupted = Uninterrupted(start)
        self.close: Uninterrupted = Uninterrupted(close)

    def let_go(self) -> None:
        """Ends it without waiting: the garbage collector runs anywhere."""
        self.stage.stop()
        self.placed.log_close_error()
        self.together.close()

    def __del__(self) -> None:
        self.let_go()  # once more: an interrupt may have cut the iterator's own __del__


class Place(NamedTuple):
    """The place of an iterator: one value, so that an interrupt finds it before a step or after.

    Attributes:
        run: The batches that it hands out.
        position: The position after the last batch that was handed out.
        taken: The number of batches of the run that were handed out.
        pending: The next batch, if it was taken from the background already.
    """

    run: Run
    position: Position
    taken: int = 0
    pending: Placed | None = None


class ShardedIterator(grain.DatasetIterator[Batch]):
    """Hands out global batches. A context manager; its state belongs to the last batch handed out.

    After the end ``next`` keeps raising StopIteration; after an error, that error.

    Args:
        host: Where this host's batches come from.
        placer: Puts them on the devices.
        device_buffer_size: Batches that may wait on the devices or be on their way there.
        reshard: Applied to each batch as it is handed out, by the thread that asks for it, since it
            contains collectives.
        across: With several hosts in the mesh, how to run in step with them.
        passes: The passes of the dataset's iterators; None for this iterator's alone.
        dataset: The dataset, if `shard_to` made it.

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
        placer: Placer,
        *,
        device_buffer_size: int,
        reshard: Resharder | None,
        across: AcrossHosts | None,
        passes: Passes | None = None,
        dataset: grain.IterDataset | None = None,
    ):
        super().__init__()
        self.dataset = dataset
        self._host, self._placer, self._is_closed = host, placer, False
        self._device_buffer_size, self._reshard = device_buffer_size, reshard
        self._across, self._passes = across, passes or Passes()
        self._meter = Meter(mask_key=host.padding.mask_key)
        with counted_by(self._meter):
            self._enter_context = jax_context()  # of the thread that made the iterator
            self._at = self._open(None)
        self._beginning = self._at.position

    def __repr__(self) -> str:
        axes = describe_mesh(self._placer.mesh_axes)  # none, if it places on one device
        mesh = f", mesh ({axes})" if axes else ""
        begun = "under way" if self._at.run.start.is_begun else "not begun"
        phase = "closed" if self._is_closed else begun
        return f"<ShardedIterator of {self._host.kind}{mesh}, {phase}>"

    def _open(self, position: Position | None) -> Place:
        host, meter = self._host, self._meter
        opened = host.open(position)
        batches, self._saved_digest = opened.batches, ""
        together = Together(self._across)
        # The threads must refer to this and not to self, which could never be collected then.
        place = Placing(self._placer, meter, opened.position, keeps_last=host.ends_by_vote)
        placed = Background(
            place, batches, buffer_size=self._device_buffer_size, name="grain-shard-device"
        )
        stage: TaskStage[Placed] | AgreedEnd[Placed] = placed
        if host.ends_by_vote:
            stage = together.until_agreed_end(
                placed,
                batches,
                same_rows=host.rows == GLOBAL,
                padding=lambda before: place.padding(host, before),
            )
        meter.opens(opened.reads, opened.faults)
        run = Run(host.kind, batches, placed, stage, together, meter, opened.first_digest)
        return Place(run, opened.position)

    def __next__(self) -> Batch:
        self._require_open()
        is_first = not self._at.taken and self.position == self._beginning
        if is_first:
            self._passes.begins()
        self.start_prefetch()
        at = self._at
        at.run.together.check()
        if at.pending is None:
            at = self._at = Place(at.run, at.position, at.taken, self._next_placed(at))
        if self._reshard is not None:
            self._reshard.forget()
        batch, position, size = cast(Placed, at.pending)
        at.run.stage.release(at.taken + 1)
        self._meter.handed_out(size)
        self._passes.gives(is_first=is_first)
        try:
            self._at = Place(at.run, position, at.taken + 1)
            return batch
        except BaseException:  # an interrupt: the batch was not handed out
            self._at = at
            raise

    def _compare(self, at: Place) -> None:
        """Compares the pipeline with other hosts', and its contents with the restored state's."""
        contents, run = self._host.contents, at.run
        run.batches.wait_for(lambda: contents.is_read)
        by_record = {
            NOW: contents.by_record(contents.digest),
            SAVED: contents.by_record(self._saved_digest),
        }
        fields = {
            **self._host.next_batch(at.position),
            **self._placer.describe(),
            CONTENTS: by_record,
        }
        if digest := run.first_digest():
            fields[FIRST_BATCH] = digest
        agreed = run.together.compare(fields, self._placer.digest, contents.is_steady)
        if contents.digest and not agreed:
            contents.leave_out()
        contents.digest, self._saved_digest = agreed, ""
        run.has_compared = True

    def _next_placed(self, at: Place) -> Placed:
        """Waits for the next batch, and tells other hosts if there is none."""
        together = at.run.together
        with self._meter:
            try:
                placed = at.run.stage.peek()
            except StopIteration:
                placed = None
            except ShardingError as error:
                # The stages before placement know no mesh, and may run where there is none.
                together.failed(error)
                raise error.with_mesh(self._placer.mesh_axes)  # noqa: B904 (the same error)
            except BaseException as error:
                together.failed(error)
                raise
            if placed is None:
                # Outside the except block, so that another host's failure, if it is the cause, is
                # not chained to an exception of this host.
                together.ended(self._host.next_batch(at.position))
                self._passes.ends()
                if self._reshard is not None:
                    self._reshard.wait()
                raise StopIteration
        if not at.run.has_compared:
            self._compare(at)
        return (
            placed if self._reshard is None else placed._replace(batch=self._reshard(placed.batch))
        )

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch that ``next`` returned, as plain JSON."""
        digest = self._host.contents.digest or self._saved_digest
        return with_digest(self._host.to_state(self._at.position), digest)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position, in an iterator that is new or in use.

        The contents of the source are compared with the state's beside the next batch, which
        raises a `StateError` if they differ.

        Raises:
            StateError: The state was saved by another pipeline; the message names what changed.
        """
        self._require_open()
        self.get_state()  # raises if the iterator has no state, and so cannot take one
        state, digest = without_digest(state)
        self.go_to(self._host.from_state(state))
        self._saved_digest = digest

    def write_state(self, directory: Any) -> None:
        """Writes the state into files of a folder; every host calls it.

        Raises:
            AgreementError: The hosts are not at the same batch.
        """
        self._state_writer()(directory)

    def _state_writer(self) -> Callable[[Any], None]:
        """Returns a function that writes the present state into a folder, also later."""
        state, feeds, at = self.get_state(), self._host.own_feeds, self._at
        place = self._host.next_batch(at.position)

        def write(directory: Any) -> None:
            at.run.together.compare_places(place)
            write_state(directory, state, feeds)

        return write

    def read_state(self, directory: Any) -> None:
        """Goes on from the state that the hosts have written into a folder.

        Raises:
            StateError: There is none for this host, a file is damaged or of another step, or the
                state was saved by another pipeline.
        """
        self.set_state(read_state(directory, self._host.own_feeds))

    def seek(self, step: int | None = None, *, record: int | None = None) -> None:
        """Goes to a step, or to a record, of a random-access pipeline.

        A far place takes no longer than a near one, because no record before it is read. In a new
        iterator nothing at all is read before the first ``next``. An iterator in use first waits
        for the reads that are under way, 5 seconds at most.

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
            step: Number of batches before the next one, in a run of this pipeline from its
                beginning. A state that was restored before plays no part.
            record: Number of records before the next batch, earlier epochs included. The step
                becomes the number of the batch that holds the next record in a run without `seek`.

        Raises:
            ShardingError: There is no such step or record; both of them or neither is given; or the
                pipeline is a stream, which cannot find a place without reading up to it.
        """
        self._require_open()
        if (step is None) == (record is None):
            raise ShardingError(
                "seek takes either a step or a record.",
                remedy="call seek(step) or seek(record=...).",
            )
        self.go_to(self._host.position_at(step=step, record=record))

    @property
    def position(self) -> Position:
        """The position after the last batch that ``next`` returned, in a form quick to copy."""
        return self._at.position

    def go_to(self, position: Position | None) -> None:
        """Goes on from a position of an iterator over the same dataset; None for its beginning."""
        self._require_open()
        self._beginning = None  # whoever goes there again means it
        self._open_anew(position)

    def reset(self) -> None:
        """Goes back to the first batch, as evaluation loops do before each evaluation.

        Each evaluation then has the same batches. On several hosts all of them call it.

        Raises:
            ShardingError: The pipeline is a stream that allows only one pass.
        """
        self._require_open()
        self._host.require_new_pass()
        self._passes = Passes()  # a deliberate second pass needs no warning
        self.go_to(None)

    def _open_anew(self, position: Position | None) -> None:
        run = self._at.run
        try:
            run.close()  # first: the next run may draw from the same source
        finally:  # the new run begins even if closing the old one raised
            if run.close.is_over:
                with self._enter_context():
                    self._at = self._open(position)

    async def save(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: writes the state while the loop goes on."""
        write_files, state, number = self._state_writer(), self.get_state(), next(_SAVES)

        async def write() -> None:
            folder = await directory.await_creation()
            await asyncio.to_thread(write_files, folder)
            if not is_shared(state):
                # The folder gets its final name when the first host is done; by then all must be.
                await asyncio.to_thread(self._at.run.together.meet, f"save-{number}")

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: restores what `save` wrote."""
        # Not inside `done`, because Orbax reports its errors as errors of another handler.
        self.read_state(directory)

        async def done() -> None:
            pass

        return done()

    def stats(self) -> Stats:
        """Returns the figures of its work so far, and of the training loop's waiting; any time."""
        meter, one = self._meter, self._at.run.together.slowest
        slowest = None if one is None else one.found
        return Stats(meter.total(), meter.recent(), meter.faults(), slowest)

    def start_prefetch(self) -> None:
        """Starts working ahead before the first ``next``."""
        self._require_open()
        if self._at.run.close.is_begun:  # an interrupt, or a refused state, has closed the run
            self._open_anew(self._at.position)
        self._at.run.start()

    def close(self) -> None:
        """Stops the background threads and waits for them; a second call does nothing.

        Raises:
            BaseException: The pipeline raised it in closing something of the user's, which a note
                names. Everything else is closed by then. Where nobody calls this, or a thread is
                inside the user's code for more than 5 seconds, such an error is logged instead.
        """
        self._is_closed = True
        self._at.run.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this is a closed iterator: call iter(ds) for a new one.")

    def __reduce__(self) -> NoReturn:
        """Refused, for `copy`, too: two iterators cannot share threads."""
        raise TypeError(
            "an iterator whose batches are on devices cannot be copied or sent to another process."
            " Call iter(ds) for a second iterator, and pass its set_state() the get_state() of the"
            " first."
        )

    def __enter__(self) -> ShardedIterator:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except Exception as error:
            if exc is None:
                raise
            log_unclosed(error)  # the error that ended the loop is the one to see

    def __del__(self) -> None:
        if (at := getattr(self, "_at", None)) is not None:
            at.run.let_go()
