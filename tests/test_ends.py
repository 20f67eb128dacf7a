"""The ends of streams and of exchanges, as far as one process shows them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from grain_shard.errors import AgreementError
from grain_shard.hosts.ends import AgreedEnd, decide
from grain_shard.iteration.placing import Placing
from grain_shard.reading.padding import Padding
from grain_shard.sharding.reshard import Resharder
from grain_shard.stats.meter import Meter
from grain_shard.threads.background import in_background
from grain_shard.threads.tasks import Producer
from tests.conftest import HANG_S, eventually
from tests.on_hosts import KeyValues

# What follows from the votes: remainder, whether all hosts have the same rows, each host's vote,
# and how many batches are handed out before the next one (0: all end here), or the error.
VOTES = [
    ("pad", False, [1], 1),
    ("pad", False, [4, 2, 3], 2),
    ("pad", False, [4, 0, 3], 3),
    ("pad", False, [0, 0, 1], 1),
    ("pad", False, [0, 0, 0], 0),
    ("drop", False, [4, 2, 3], 2),
    ("drop", False, [4, 0, 3], 0),
    ("drop", False, [0, 0, 0], 0),
    ("error", False, [4, 2, 3], 2),
    ("error", False, [0, 0, 0], 0),
    ("error", False, [4, 0, 3], "the streams of 1 of 3 hosts (the first: host 1) end earlier"),
    ("pad", True, [4, 2, 3], 2),
    ("pad", True, [0, 0, 0], 0),
    ("pad", True, [4, 0, 0], "the streams of 2 of 3 hosts (the first: host 1) end earlier"),
    ("drop", True, [4, 0, 3], 'with rows="global" every host must produce the same batches'),
]


@pytest.mark.parametrize(("remainder", "same_rows", "votes", "expected"), VOTES)
def test_what_follows_from_the_votes_of_all_hosts(remainder, same_rows, votes, expected):
    verdict = decide(remainder, same_rows, dict(enumerate(votes)))
    if isinstance(expected, str):
        assert expected in verdict["error"]
        assert "\n  remedy: " in verdict["error"]
    else:
        assert verdict == expected


FAILED = ValueError("a bad record")


class Host(Producer):
    """A host's batches; ends with an error, if there is one."""

    def __init__(self, *batches, error=StopIteration):
        self.batches, self.error, self.stopped, self.closed = list(batches), error, 0, 0

    def __next__(self):
        if not self.batches:
            raise self.error
        return self.batches.pop(0)

    def stop(self):
        self.stopped += 1

    def close(self):
        self.closed += 1


def agreed(source, rounds=None, *, buffer_size=2, remainder="pad"):
    """The host's batches, up to the end that it agrees on with the others."""
    read = in_background(
        lambda item: item, source, buffer_size=buffer_size, name="grain-shard-test"
    )
    placed = in_background(lambda item: item, read, buffer_size=1, name="grain-shard-test")
    return AgreedEnd(
        placed,
        read,
        rounds or KeyValues().rounds(0, 1),
        remainder=remainder,
        same_rows=False,
        padding=lambda before: "padding",
    )


def handed_out(batches):
    """What comes of them until the end, or until an error, which is the last."""
    result = []
    try:
        for batch in batches:
            result.append(batch)
    except Exception as error:
        result.append(error)
    batches.close()
    return result


def of_hosts(lengths, *, failing=(), remainder="pad", buffer_sizes=None):
    """What each of several hosts hands out, whose streams have so many batches."""
    store, sizes = KeyValues(), buffer_sizes or [2] * len(lengths)
    iterators = [
        agreed(
            Host(*range(length), error=FAILED if host in failing else StopIteration),
            store.rounds(host, len(lengths)),
            buffer_size=sizes[host],
            remainder=remainder,
        )
        for host, length in enumerate(lengths)
    ]
    with ThreadPoolExecutor(len(lengths)) as threads:
        return list(threads.map(handed_out, iterators))


@settings(deadline=None, max_examples=60)
@given(
    hosts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    remainder=st.sampled_from(["pad", "drop"]),
)
def test_all_hosts_hand_out_as_many_batches_whatever_their_buffers(hosts, remainder):
    lengths, buffer_sizes = zip(*hosts, strict=True)
    expected = max(lengths) if remainder == "pad" else min(lengths)
    for length, result in zip(
        lengths, of_hosts(lengths, remainder=remainder, buffer_sizes=buffer_sizes), strict=True
    ):
        own = list(range(min(length, expected)))
        assert result == own + ["padding"] * (expected - len(own))


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_where_a_host_fails_all_stop_with_it(lengths):
    """The host that fails raises its own error, and every other one names it."""
    own, *others = of_hosts(lengths, failing={0})
    assert own[-1] is FAILED
    assert len(own) - 1 == lengths[0]
    for other in others:
        assert len(other) - 1 == lengths[0]
        assert isinstance(other[-1], AgreementError)
        assert "host 0: ValueError: a bad record" in str(other[-1])


def test_few_questions_are_asked_where_the_buffers_are_full():
    batches = agreed(Host(*range(60)), buffer_size=8)
    for _ in range(48):
        next(batches)
        # So the buffer is full again, as it is where steps take longer than batches.
        eventually(lambda: batches._read.known().results >= batches._votes.handed_out + 8)
    assert batches._votes.number <= 48 / 4 + 2
    batches.close()


def test_verdicts_that_all_have_read_are_forgotten():
    store = KeyValues()
    batches = agreed(Host(*range(20)), store.rounds(0, 1))
    assert len(handed_out(batches)) == 20
    last = batches._votes.number
    assert set(store.entries) == {f"series/{number} verdict" for number in (last - 1, last)}


def test_a_vote_that_others_do_not_answer_ends_with_the_batches():
    store = KeyValues()
    batches = agreed(Host(*range(20)), store.rounds(0, 2))
    batches.start()
    eventually(lambda: store.entries)
    batches.close()
    assert not any(thread.is_alive() for thread in batches._voting.threads)
    assert next(batches, "the end") == "the end"


def test_a_host_that_still_has_no_data_learns_that_the_others_have_given_up_on_it():
    class Stalled(Host):
        goes_on, learned_in_time = threading.Event(), True

        def __next__(self):
            self.learned_in_time = self.goes_on.wait(HANG_S)
            raise StopIteration

    rounds, source = KeyValues().rounds(0, 2, timeout_s=0.1), Stalled()
    rounds.put_once("0 verdict", {"error": "host 0 had no data"})
    batches = agreed(source, rounds)
    with pytest.raises(AgreementError, match="had no data"):
        next(batches)
    source.goes_on.set()
    batches.close()
    assert source.learned_in_time


def test_the_last_exchange_is_waited_for_where_the_data_end(monkeypatch):
    waited = []
    wait = Resharder.wait
    monkeypatch.setattr(Resharder, "wait", lambda self: (waited.append(self._last), wait(self)))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    ds = grain.MapDataset.range(16).map(lambda i: {"x": np.float32(i)}).batch(8)
    iterator = iter(ds.shard_to(mesh, P("data"), read="once"))
    assert next(iterator)["x"].shape == (8,)
    next(iterator)
    assert waited == []
    assert next(iterator, None) is None
    assert len(waited) == 1
    assert isinstance(waited[0], jax.Array)


def test_a_scalar_stays_what_it_is_in_padding():
    """It belongs to the whole batch: on hosts that still have rows, it is that of theirs."""

    class Padded:
        padding = Padding(1)

        def past_end(self, position, batches):
            return position + batches

    rows = {"x": np.ones(4), "valid_mask": np.ones(4, bool), "temperature": np.float32(0.7)}
    place = Placing(lambda batch: batch, Meter(mask_key="valid_mask"), 0, keeps_last=True)
    assert place((rows, 1)).size["records"] == 4
    padding, position, size = place.padding(Padded(), 0)
    assert (position, size["records"]) == (2, 0)
    assert not padding["x"].any()
    assert not padding["valid_mask"].any()
    assert padding["temperature"] == np.float32(0.7)


@pytest.mark.parametrize("begun", [False, True])
def test_to_close_it_stops_the_stream_below_and_closes_it_once(begun):
    host = Host(*range(20))  # more than fit the buffers
    batches = agreed(host)
    if begun:
        next(batches)
    batches.close()
    assert host.stopped
    assert host.closed == 1
    batches.close()
    assert host.stopped
    assert host.closed == 1
