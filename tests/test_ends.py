"""The ends of streams and of exchanges, as far as one process shows them."""

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from grain_shard.background import Background, Producer
from grain_shard.hosts.ends import AgreedEnd, decide
from grain_shard.reading.pad_rows import PadRows
from grain_shard.sharding.reshard import Resharder

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
    ("drop", True, [4, 0, 3], 'rows="global" says that every host produces the same batches'),
]


@pytest.mark.parametrize(("remainder", "same_rows", "votes", "expected"), VOTES)
def test_what_follows_from_the_votes_of_all_hosts(remainder, same_rows, votes, expected):
    verdict = decide(remainder, same_rows, {host: [vote, ""] for host, vote in enumerate(votes)})
    if isinstance(expected, str):
        assert expected in verdict["error"]
        assert "\n  remedy: " in verdict["error"]
    else:
        assert verdict == expected


@pytest.mark.parametrize(
    ("same_rows", "digests", "refused"),
    [
        (True, ["a", "a", "a"], False),
        (True, ["a", "", "a"], False),
        (True, ["a", "a", "b"], True),
        (False, ["a", "a", "b"], False),
    ],
)
def test_first_batches_that_differ_are_refused_where_all_have_to_be_the_same(
    same_rows, digests, refused
):
    verdict = decide("pad", same_rows, {host: [1, d] for host, d in enumerate(digests)})
    if refused:
        assert "the first batches of hosts 0 and 2 differ" in verdict["error"]
    else:
        assert verdict == 1


@pytest.mark.parametrize("remainder", ["pad", "drop", "error"])
def test_a_failed_host_is_named_whatever_the_others_have(remainder):
    verdict = decide(remainder, False, {0: [4, ""], 2: {"failed": "OSError: no such file"}})
    assert verdict == {"error": "a host's stream failed.\n  host 2: OSError: no such file"}


class AllSayBatch:
    """Rounds in which every other host is taken to have one batch more."""

    def __init__(self):
        self.posted, self.failed, self.forgotten = [], [], []

    def post(self, round_, answer):
        self.posted.append((round_, answer))

    def fail(self, round_, text, decide):
        self.failed.append((round_, text))

    def verdict(self, round_, decide, **_):
        return decide({0: self.posted[-1][1], 1: [1, ""]})

    def forget(self, round_):
        self.forgotten.append(round_)


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


def agreed(host, rounds, **options):
    """The host's batches, up to the end that it agrees on with the others."""
    background = Background(lambda item: item, host, buffer_size=2, name="grain-shard-test")
    return AgreedEnd(
        background,
        rounds,
        remainder="pad",
        same_rows=False,
        position=0,
        past_end=lambda position: position + 1,
        padding_like=PadRows().like,
        waited_s=lambda: 0.0,
        **{"template": lambda: pytest.fail("padding was asked for"), **options},
    )


def test_a_failure_is_raised_and_not_padded_over_whatever_the_other_hosts_were_told():
    rounds = AllSayBatch()
    batches = agreed(Host(error=ValueError("a bad record")), rounds)
    with pytest.raises(ValueError, match="a bad record"):
        next(batches)
    assert rounds.failed == [("0", "ValueError: a bad record")]
    batches.close()


def test_a_failure_comes_after_the_batches_before_it():
    rounds = AllSayBatch()
    batches = agreed(Host(("a", 1), ("b", 2), error=ValueError("a bad record")), rounds)
    assert [next(batches), next(batches)] == [("a", 1), ("b", 2)]
    with pytest.raises(ValueError, match="a bad record"):
        next(batches)
    batches.close()


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
    rows = {"x": np.ones(4), "valid_mask": np.ones(4, bool), "temperature": np.float32(0.7)}
    batches = agreed(Host((rows, 1)), AllSayBatch())
    next(batches)
    padding, position = next(batches)
    assert position == 2
    assert not padding["x"].any()
    assert not padding["valid_mask"].any()
    assert padding["temperature"] == np.float32(0.7)
    batches.close()


def test_of_each_vote_the_one_before_is_forgotten():
    """Or the key-value store of a long run would grow with every vote."""
    rounds = AllSayBatch()
    batches = agreed(Host(("a", 1), ("b", 2), ("c", 3)), rounds)
    for _ in range(3):
        next(batches)
    voted = [int(name) for name, _ in rounds.posted]
    assert [int(name) for name in rounds.forgotten] == [vote - 1 for vote in voted]
    batches.close()


def test_a_host_that_stops_in_the_middle_of_a_vote_forgets_no_verdict():
    """Another host may not have read the last one yet, and would wait for it in vain."""
    rounds = AllSayBatch()
    batches = agreed(Host(("a", 1), ("b", 2)), rounds)
    next(batches)
    rounds.forgotten.clear()

    def stopped_meanwhile(*args, **kwargs):
        batches.stop()

    rounds.verdict = stopped_meanwhile
    assert next(batches, None) is None
    assert rounds.forgotten == []
    batches.close()


@pytest.mark.parametrize("begun", [False, True])
def test_to_close_it_stops_and_closes_the_stream_below_once(begun):
    host = Host(("a", 1), ("b", 2))
    batches = agreed(host, AllSayBatch())
    if begun:
        next(batches)
    batches.close()
    assert (host.stopped, host.closed) == (1, 1)
    batches.close()
    assert (host.stopped, host.closed) == (1, 1)
