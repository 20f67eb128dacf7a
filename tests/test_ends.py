"""The ends of streams and of exchanges, as far as one process shows them.

On hosts that are processes, with hosts that fail, stall or leave: test_hosts_streams.py.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_shard.errors import HostTimeoutError
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.iteration.device_batches import PutOnDevices
from grain_shard.reading.padding import Padding
from grain_shard.stats.meter import Meter
from grain_shard.threads.mapped import mapped
from grain_shard.threads.producer import Items
from tests.conftest import eventually
from tests.on_hosts import KeyValues


def agreed(batches, rounds=None, *, buffer_size=2, remainder="pad"):
    """A host's batches, up to the end that it agrees on with the others."""
    options, same = {"name": "grain-shard-test"}, lambda item: item
    read = mapped(same, Items(iter(batches)), size=buffer_size, **options)
    return AgreedEnd(
        mapped(same, read, size=1, **options),
        read,
        rounds or KeyValues().rounds(0, 1),
        remainder=remainder,
        same_rows=False,
        padding=lambda before: "padding",
        require_voters=lambda missing: None,
    )


def handed_out(batches):
    result = list(batches)
    batches.close()
    return result


@settings(deadline=None, max_examples=60)
@given(
    hosts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    remainder=st.sampled_from(["pad", "drop"]),
)
def test_all_hosts_hand_out_as_many_batches_whatever_their_buffers(hosts, remainder):
    store, lengths = KeyValues(), [length for length, _ in hosts]
    iterators = [
        agreed(
            range(length), store.rounds(k, len(hosts)), buffer_size=buffer_size, remainder=remainder
        )
        for k, (length, buffer_size) in enumerate(hosts)
    ]
    with ThreadPoolExecutor(len(hosts)) as threads:
        results = list(threads.map(handed_out, iterators))
    expected = max(lengths) if remainder == "pad" else min(lengths)
    for length, result in zip(lengths, results, strict=True):
        own = list(range(min(length, expected)))
        assert result == own + ["padding"] * (expected - len(own))


def test_few_questions_are_asked_where_the_buffers_are_full():
    batches = agreed(range(60), buffer_size=8)
    for _ in range(48):
        next(batches)
        # So the buffer is full again, as it is where steps take longer than batches.
        eventually(lambda: batches._read.known().results >= batches._votes.handed_out + 8)
    assert batches._votes.number <= 48 / 4 + 2
    batches.close()


def test_verdicts_that_all_have_read_are_forgotten():
    store = KeyValues()
    batches = agreed(range(20), store.rounds(0, 1))
    assert len(handed_out(batches)) == 20
    last = batches._votes.number
    assert set(store.entries) == {f"series/{number} verdict" for number in (last - 1, last)}


def test_a_vote_that_others_do_not_answer_ends_with_the_batches():
    store = KeyValues()
    batches = agreed(range(20), store.rounds(0, 2))
    batches.start()
    eventually(lambda: store.entries)
    batches.close()
    assert not any(thread.is_alive() for thread in batches._voting.threads)
    assert next(batches, "the end") == "the end"


def test_a_host_that_does_not_vote_is_waited_for_ten_times_as_long_after_the_first_vote():
    store = KeyValues()
    votes = agreed(range(20), store.rounds(0, 3, timeout_s=60.0))._votes
    store.rounds(2, 3).put("0", 4)
    with pytest.raises(HostTimeoutError, match="hosts 0, 1 did not answer in time"):
        store.of_host(0, lambda: votes.loop_waits(61.0))
    votes.loop_waits(59.0)
    votes.number = 1
    votes.loop_waits(599.0)
    with pytest.raises(HostTimeoutError, match="hosts 0, 1, 2 did not answer in time"):
        store.of_host(0, lambda: votes.loop_waits(601.0))


def test_a_scalar_stays_what_it_is_in_padding():
    """It belongs to the whole batch: on hosts that still have rows, it is that of theirs."""

    class Padded:
        padding = Padding(1)

        def past_end(self, position, batches):
            return position + batches

    rows = {"x": np.ones(4), "valid_mask": np.ones(4, bool), "temperature": np.float32(0.7)}
    put = PutOnDevices(lambda batch: batch, Meter(mask_key="valid_mask"), 0, keeps_last=True)
    assert put((rows, 1)).size["records"] == 4
    padding, position, size = put.padding(Padded(), 0)
    assert (position, size["records"]) == (2, 0)
    assert not padding["x"].any()
    assert not padding["valid_mask"].any()
    assert padding["temperature"] == np.float32(0.7)
