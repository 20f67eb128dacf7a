"""Which waits for other hosts end, and whom the error names."""

import pytest

from grain_shard.errors import HostTimeoutError
from grain_shard.hosts import absences
from grain_shard.hosts.absences import Absences


class Store:
    """The rounds of host 0 of three, and the topics of all of them."""

    name, hosts, timeout_s = "train/0", [0, 1, 2], 10.0

    def __init__(self, topics, given_up=False):
        self.topics, self.given_up = topics, given_up

    def put(self, topic, answer):
        self.topics.setdefault(topic, {})[0] = answer

    def get_all(self, topic):
        return self.topics.get(topic, {})

    def missing(self, round_):
        return [host for host in self.hosts if host not in self.topics.get(round_, {})]

    def check(self, round_):
        if self.given_up:
            raise HostTimeoutError(round_)


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
WAITS = [
    (9, False, {"absent": {2: ["7", "had no data"]}}, {}),
    (11, False, {}, {}),
    (11, False, {"absent": {2: ["7", "had no data"]}}, {2: "had no data"}),
    (11, False, {"absent": {2: ["6", "had no data"]}}, {}),  # its data have come since then
    (11, False, {"absent": {1: ["7", "had no data"]}}, {}),  # and it has voted
    (11, False, {"absent": {2: [None, "closed its iterator"]}}, {2: "closed its iterator"}),
    (11, True, {}, {2: ""}),
    (101, False, {}, {2: BUSY}),
]


@pytest.mark.parametrize(("seconds", "is_first", "topics", "given_up"), WAITS)
def test_a_wait_ends_where_it_is_in_vain(waits, seconds, is_first, topics, given_up):
    of = Absences(Store({"7": {0: 1, 1: 1}, **topics}))
    assert of.absent("7", is_first) == {}, "as long as the loop does not wait"
    waits(of, seconds)
    assert of.absent("7", is_first) == given_up


def test_it_looks_now_and_then(waits):
    of = Absences(Store({"absent": {2: ["7", "had no data"]}}))
    waits(of, 10.5)
    assert of.absent("7", False)
    assert not of.absent("7", False)
    waits(of, 12)
    assert of.absent("7", False)


def test_a_host_says_that_it_has_no_data(waits):
    store = Store({})
    of = Absences(store)
    of.without_data("7")
    assert store.topics == {}, "the loop does not wait"
    waits(of, 11)
    of.without_data("7")
    assert store.topics == {"absent": {0: ["7", "had no data"]}}


def test_a_host_without_data_learns_that_others_have_given_up(waits):
    of = Absences(Store({}, given_up=True))
    waits(of, 11)
    with pytest.raises(HostTimeoutError):
        of.without_data("7")
