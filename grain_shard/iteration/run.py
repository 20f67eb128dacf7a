"""`Run`: the background work that makes the batches after one position of an iterator.

An iterator that goes to another position closes its run and opens another run there.
"""

from __future__ import annotations

from dataclasses import dataclass

from grain_shard.errors import GrainShardError, Raised, ShardingError
from grain_shard.hosts.compare import FIRST_BATCH, GLOBAL, NOW, SAVED
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.host_group import GroupSettings, HostGroup
from grain_shard.iteration.device_batches import DeviceBatch, PutBatch, PutOnDevices
from grain_shard.iteration.host_batches import HostBatches, Position
from grain_shard.iteration.long_wait import log_long_wait
from grain_shard.stats.meter import Meter
from grain_shard.threads.mapped import mapped
from grain_shard.threads.pool import Pool


@dataclass(frozen=True)
class RunInputs:
    """The objects that an iterator gives to all its runs.

    Attributes:
        host: The source of this host's batches.
        put_batch: Puts the host's batches on the devices.
        meter: Counts the batches, and measures the waits of the training loop.
        device_buffer_size: The maximum number of batches that wait on the devices or are on their
            way there.
        group_settings: The hosts among which the iterator runs; None if the mesh has only one host.
    """

    host: HostBatches
    put_batch: PutBatch
    meter: Meter
    device_buffer_size: int
    group_settings: GroupSettings | None


class Run:
    """The background work that makes the batches after one position.

    Args:
        inputs: The objects that the iterator gives to all its runs.
        position: The position before the first batch; None for the beginning.

    Attributes:
        begins_at: The position before the first batch.
        stage: The global batches on the devices, up to the end that all hosts agree on.
        group: The connection to the same iterator on other hosts.
        is_started: True once the background threads were started.
        end: The error that ``next`` keeps raising, if ``stage`` does not repeat it; None otherwise.
    """

    def __init__(self, inputs: RunInputs, position: Position | None):
        host, meter = inputs.host, inputs.meter
        opened = host.open(position)
        self.begins_at, self._first_digest = opened.position, opened.first_digest
        self._inputs, self._batches = inputs, opened.batches
        self.is_started = self._has_compared = False
        self.end: Raised | None = None
        num_before = host.next_batch(self.begins_at)["next batch"]
        faults = opened.faults
        self.group: HostGroup = HostGroup(
            inputs.group_settings, num_before, opened.total, lambda: faults().retries
        )
        # Host batches go to the devices, and from there to the end that all hosts agree on. The
        # threads of these stages refer to `put` and `group`, and not to self: a thread that refers
        # to self would keep the run from being collected.
        group = self.group

        def on_wait(waited_s: float) -> None:
            log_long_wait(waited_s)
            group.waits(waited_s)

        # On several hosts, a stream that ends before others goes on with batches of padding, whose
        # shapes are copied from the last batch.
        keeps_last = host.ends_by_vote and inputs.group_settings is not None
        put = PutOnDevices(inputs.put_batch, meter, self.begins_at, keeps_last=keeps_last)
        self._on_devices: Pool[DeviceBatch] = mapped(
            put,
            opened.batches,
            size=inputs.device_buffer_size,
            name="grain-shard-device",
            on_wait=on_wait,
        )
        self.stage: Pool[DeviceBatch] | AgreedEnd[DeviceBatch] = self._on_devices
        if host.ends_by_vote:
            self.stage = self.group.until_agreed_end(
                self._on_devices,
                opened.batches,
                remainder=host.padding.remainder,
                same_rows=host.rows == GLOBAL,
                padding=lambda before: put.padding(host, before),
                on_wait=on_wait,
            )
        meter.opens(opened.reads, faults)

    def start(self) -> None:
        """Starts the background threads; a second call does nothing."""
        self.group.start(self.stage)
        self.stage.start()
        self.is_started = True

    def close(self) -> None:
        """Stops the background threads and waits for them. An interrupted call may be repeated."""
        self.group.close()
        self.stage.close()

    @property
    def is_running(self) -> bool:
        """True if a background thread has not ended, for example inside the user's code."""
        return self._batches.is_running or self._on_devices.is_running

    def next(self, position: Position, digest: str) -> DeviceBatch:
        """Waits for the next batch and returns it.

        If an error or the end comes instead, this tells the other hosts. At the first batch, the
        hosts also compare their pipelines.

        Args:
            position: The position before the batch.
            digest: The digest of a restored state that is not compared with the source yet; or "".

        Raises:
            StopIteration: The batches end, on every host.
            BaseException: The error of the pipeline, or of another host.
        """
        if self.end is not None:
            self.end.throw()
        inputs, group = self._inputs, self.group
        group.asks()
        with inputs.meter:  # measures the wait
            try:
                batch = next(self.stage)
            except StopIteration:
                batch = None
            except BaseException as error:
                if isinstance(error, ShardingError):
                    # The stages before the devices do not know the mesh, so the error gets it here.
                    error.with_mesh(inputs.put_batch.mesh_axes)
                group.failed(error)
                raise
            if batch is None:
                # `ended` may raise the failure of another host. Outside the except block Python
                # does not chain that failure to this host's StopIteration.
                group.ended(inputs.host.next_batch(position))
                raise StopIteration
        if not self._has_compared:
            self._compare(position, digest)
        return batch

    def _compare(self, position: Position, digest: str) -> None:
        """Compares the pipeline with the pipelines of other hosts and with the restored state.

        Raises:
            AgreementError: A field differs between hosts, or another host has failed.
            StateError: The source has another first record than the restored state.
        """
        host, put_batch = self._inputs.host, self._inputs.put_batch
        record = host.first_record
        try:
            self._batches.wait_for(lambda: record.is_read, on_wait=log_long_wait)
        except StopIteration:
            pass  # the end of this host's batches comes in a later `next`
        except BaseException as error:
            # The error of a later batch comes in a later `next`, too: the first batch can be
            # compared without it. Any other error, such as an interrupt, ends this call.
            if error is not self._batches.known().end:
                raise
        record.run()  # reads the record if no thread of the batches has read it
        fields = {**host.next_batch(position), **put_batch.describe()}
        fields |= {NOW: record.digest, SAVED: digest}
        if first_digest := self._first_digest():
            fields[FIRST_BATCH] = first_digest
        record.digest = self.group.compare(fields, put_batch.digest)
        self._has_compared = True

    def raises_again(self, error: BaseException) -> bool:
        """Returns True if each later call of `next` raises this error again.

        Errors of background threads and of this package are raised again. Any other error is an
        interrupt, after which a batch may be missing: then this run must not be used any more.

        Args:
            error: The error that ended a call of `start` or `next`.
        """
        ends = self._batches.known().end, self._on_devices.known().end
        if isinstance(error, StopIteration) or any(error is end for end in ends):
            return True
        if isinstance(error, GrainShardError):
            self.end = self.end or Raised(error, error.__traceback__)
        elif (failure := self.group.interruption(error)) is not None:
            # Set before the other hosts are told: a second interrupt may cut the telling short.
            self.end = Raised(failure, None)
            self.group.failed(error)
        else:
            return False
        return True

    def let_go(self) -> None:
        """Stops the background threads without waiting for them.

        The garbage collector may call this at any point of any thread, which must not wait.
        """
        self.stage.stop()
        self._on_devices.log_close_error()
        self.group.close()
