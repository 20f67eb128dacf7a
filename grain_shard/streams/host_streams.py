"""`HostStreams`: this host's batches of streams or feeds, which can be opened at any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from grain_shard.grain_inside.flags import let_grain_read_its_flags
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.host_batches import THREAD, HostBatches, Opened
from grain_shard.reading.faults import Faults
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.iterable import require_new_pass
from grain_shard.reading.padding import Padding
from grain_shard.streams.position import StreamsPosition
from grain_shard.streams.rows import StreamRows
from grain_shard.streams.stream_batches import Joined, StreamBatches, StreamOptions
from grain_shard.streams.streams import ENDED, StreamReads
from grain_shard.streams.turns import Turns, TurnsOfWorkers
from grain_shard.threads.mapped import mapped
from grain_shard.trees import Batch


class HostStreams(HostBatches):
    """This host's batches of streams.

    A position has the number of batches handed out and the state of each stream. So a checkpoint of
    feeds can be divided by feed, and other hosts can read the feeds that they run.

    Args:
        plan: The streams, and how their turns become batches of this host's rows.
        options: The options with which the streams run. At most `options.buffer_size` batches wait
            on the host or are unfinished. With worker processes, it may be one batch more.
        rows: The rows that the streams yield on each of several hosts; see `HostBatches`.
        saved_feeds: The feeds that this host writes into a checkpoint; None for all of its feeds.
    """

    ends_by_vote = True

    def __init__(
        self,
        plan: StreamRows,
        options: StreamOptions = StreamOptions(),  # noqa: B008 (it is frozen)
        rows: str = GLOBAL,
        saved_feeds: Sequence[int] | None = None,
    ):
        self._plan, self._options, self.kind, self.rows = plan, options, plan.streams.kind, rows
        self.keeps_streams = not options.num_workers
        self.padding = plan.padding or Padding(1)
        of_padding = {} if plan.padding is None else plan.padding.fingerprint()
        self.fingerprint = {**plan.streams.fingerprint, **of_padding}
        first_stream = self._first_stream = plan.streams.make(0)
        if self.kind != FEEDS:
            self.first_record = FirstRecord()  # two hosts may have unlike streams
            return
        own = list(plan.numbers)
        self.own_feeds = OwnFeeds(own, own if saved_feeds is None else saved_feeds)
        self.first_record = FirstRecord(first_stream)
        self.compared = {**self.fingerprint, "global_batch_size": plan.unpadded_size}

    def open(self, position: StreamsPosition | None) -> Opened:
        let_grain_read_its_flags()  # an .mp_prefetch in a stream reads them
        plan, options = self._plan, self._options
        faults = Faults(options.fault_rules)
        made = StreamBatches(plan, faults, position, self.first_record)
        reads = StreamReads(
            faults, options.num_threads, rows=plan.rows_in_turn, batches=options.buffer_size
        )
        if options.num_workers:
            turns = TurnsOfWorkers(plan.streams, reads, made.states, options.num_workers)
            # Worker processes have a buffer of their own. So only one batch waits here.
            batches = mapped(lambda item: item, Joined(made, turns), size=1, name=THREAD)
        else:
            turns = Turns(plan.streams, reads, made.states)
            made.opened(turns.pickled_states())
            batches = turns.pool(made.join, size=options.buffer_size, name=THREAD)
        return Opened(made.position, batches, first_digest=made.first_digest, faults=faults.counts)

    def require_new_pass(self) -> None:
        require_new_pass(self._first_stream)

    def first(self) -> Batch:
        return self._plan.first(self._options.fault_rules)

    def next_batch(self, position: StreamsPosition) -> Mapping[str, Any]:
        return {"next batch": position.step}

    def repeated(self, times: int) -> NoReturn:
        raise self._plan.streams.no_epochs()

    def past_end(self, position: StreamsPosition, batches: int) -> StreamsPosition:
        step, states, learned = position
        return StreamsPosition.at(step + batches, states, ENDED, learned)

    def why_unsaved(self) -> str:
        return self._plan.streams.why_unsaved

    def to_state(self, position: StreamsPosition) -> dict[str, Any]:
        return position.to_state(self._plan.streams, self.fingerprint)

    def from_state(self, state: dict[str, Any]) -> StreamsPosition:
        return StreamsPosition.of_state(state, self._plan, self.fingerprint)
