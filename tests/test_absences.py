"""Which waits for other hosts end, and whom the error names."""

import json

import pytest

from grain_shard.hosts import absences
from grain_shard.hosts.absences import Absences
from tests.on_hosts import KeyValues


def rounds_with(topics):
    """The rounds of host 0 of three, with these topics of all of them."""
    entries = {f"series/{t}/{h}": json.dumps(v) for t, by in topics.items() for h, v in by.items()}
    return KeyValues(entries).rounds(0, 3, timeout_s=10.0)


@pytest.fixture
def waits(monkeypatch):
    """A function that has the loop wait for so many seconds."""
    now = [100.0]
    monkeypatch.setattr(absences.time, "monotonic", lambda: now[0])

    def waits(of, seconds):
        of.loop_waits_since = 100.0
        now[0] = 100.0 + seconds

    return waits


# How long host 0 waits for others, in a vote in which hosts 0 and 1 have answered; whether it is
# the first vote, the topics, and the hosts that it gives up, with the reason.
BUSY = "did not ask for its next batch"
NO_DATA = "still waited for the data of its next batch"
WAITS = [
    (9, False, {"absent": {2: ["7", NO_DATA]}}, {}),
    (11, False, {}, {}),
    (11, False, {"absent": {2: ["7", NO_DATA]}}, {2: NO_DATA}),
    (11, False, {"absent": {2: ["6", NO_DATA]}}, {}),  # its data have come since then
    (11, False, {"absent": {1: ["7", NO_DATA]}}, {}),  # and it has voted
    (11, True, {}, {2: ""}),
    (101, False, {}, {2: BUSY}),
]


@pytest.mark.parametrize(("seconds", "is_first", "topics", "given_up"), WAITS)
def test_a_wait_ends_where_it_is_in_vain(waits, seconds, is_first, topics, given_up):
    of = Absences(rounds_with({"7": {0: 1, 1: 1}, **topics}))
    assert of.absent("7", is_first) == {}, "as long as the loop does not wait"
    waits(of, seconds)
    assert of.absent("7", is_first) == given_up


def test_it_looks_now_and_then(waits):
    of = Absences(rounds_with({"absent": {2: ["7", NO_DATA]}}))
    waits(of, 10.5)
    assert of.absent("7", False)
    assert not of.absent("7", False)
    waits(of, 12)
    assert of.absent("7", False)


def test_a_host_says_that_it_has_no_data(waits):
    rounds = rounds_with({})
    of = Absences(rounds)
    of.without_data("7")
    assert rounds.get_all("absent") == {}, "the loop does not wait"
    waits(of, 11)
    of.without_data("7")
    assert rounds.get_all("absent") == {0: ["7", NO_DATA]}
