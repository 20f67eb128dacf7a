"""`HostStreams`: this host's batches of streams or feeds, which can be opened at any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from grain_shard.grain_inside.flags import let_grain_read_its_flags
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.host_batches import THREAD, HostBatches, Opened
from grain_shard.iteration.settings import Settings
from grain_shard.reading.faults import Faults
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.from_iterable import require_new_pass
from grain_shard.reading.padding import Padding
from grain_shard.streams.position import StreamsPosition
from grain_shard.streams.stream_batches import Joined, StreamBatches
from grain_shard.streams.stream_rows import StreamRows
from grain_shard.streams.streams import ENDED, StreamReads
from grain_shard.streams.turns import Turns, TurnsOfWorkers
from grain_shard.threads.mapped import mapped
from grain_shard.trees import Batch


class HostStreams(HostBatches):
    """This host's batches of streams.

    A position has the number of batches handed out and the state of each stream. So a checkpoint of
    feeds can be divided by feed, and each host reads the feeds that it runs. See `HostBatches`
    for the attributes.

    Args:
        stream_rows: The streams, and how their turns become batches of this host's rows.
        settings: The options of `shard_to`.
        rows: The rows that the streams yield on each of several hosts; see `HostBatches`.
        saved_feeds: The feeds that this host writes into a checkpoint; None for all of its feeds.
    """

    ends_by_vote = True

    def __init__(
        self,
        stream_rows: StreamRows,
        settings: Settings,
        rows: str = GLOBAL,
        saved_feeds: Sequence[int] | None = None,
    ):
        self._stream_rows, self._settings = stream_rows, settings
        self.kind, self.rows = stream_rows.streams.kind, rows
        self.keeps_streams = not settings.num_workers
        self.padding = stream_rows.padding or Padding(1)
        of_padding = {} if stream_rows.padding is None else stream_rows.padding.fingerprint()
        self.fingerprint = {**stream_rows.streams.fingerprint, **of_padding}
        first_stream = self._first_stream = stream_rows.streams.make(0)
        if self.kind != FEEDS:
            self.first_record = FirstRecord()  # not compared: each host may have its own stream
            return
        own = list(stream_rows.numbers)
        self.own_feeds = OwnFeeds(own, own if saved_feeds is None else saved_feeds)
        self.first_record = FirstRecord(first_stream)
        self.compared = {**self.fingerprint, "global_batch_size": stream_rows.unpadded_size}

    def open(self, position: StreamsPosition | None) -> Opened:
        let_grain_read_its_flags()  # an .mp_prefetch in a stream reads them
        stream_rows, settings = self._stream_rows, self._settings
        size, num_workers = settings.cpu_buffer_size, settings.num_workers
        faults = Faults(settings.fault_rules)
        maker = StreamBatches(stream_rows, faults, position, self.first_record)
        reads = StreamReads(
            faults, settings.num_threads, rows=stream_rows.rows_in_turn, batches=size
        )
        if num_workers:
            turns = TurnsOfWorkers(stream_rows.streams, reads, maker.states, num_workers)
            # Worker processes have a buffer of their own. So only one batch waits here.
            batches = mapped(lambda item: item, Joined(maker, turns), size=1, name=THREAD)
        else:
            turns = Turns(stream_rows.streams, reads, maker.states)
            maker.opened(turns.pickled_states())
            batches = turns.pool(maker.join, size=size, name=THREAD)
        digest = maker.first_digest
        return Opened(maker.position, batches, first_digest=digest, faults=faults.counts)

    def require_new_pass(self) -> None:
        require_new_pass(self._first_stream)

    def first(self) -> Batch:
        return self._stream_rows.first(self._settings.fault_rules)

    def next_batch(self, position: StreamsPosition) -> Mapping[str, Any]:
        return {"next batch": position.step}

    def repeated(self, times: int) -> NoReturn:
        raise self._stream_rows.streams.no_epochs()

    def past_end(self, position: StreamsPosition, batches: int) -> StreamsPosition:
        step, states, learned = position
        return StreamsPosition.at(step + batches, states, ENDED, learned)

    def why_unsaved(self) -> str:
        return self._stream_rows.streams.why_unsaved

    def to_state(self, position: StreamsPosition) -> dict[str, Any]:
        return position.to_state(self._stream_rows.streams, self.fingerprint)

    def from_state(self, state: dict[str, Any]) -> StreamsPosition:
        return StreamsPosition.of_state(state, self._stream_rows, self.fingerprint)
