"""The least of what hosts say, by either way, as far as one process shows it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_shard.errors import AgreementError
from grain_shard.hosts.by_devices import ByDevices
from grain_shard.hosts.by_store import ByStore
from grain_shard.hosts.minimum import LARGEST, Minimum, Question, Way, asks_devices
from tests.conftest import HANG_S, eventually


@pytest.mark.parametrize(("num_hosts", "expected"), [(2, False), (8, False), (9, True)])
def test_only_many_hosts_ask_their_devices(num_hosts, expected):
    assert asks_devices(range(num_hosts)) == expected


@pytest.mark.parametrize("numbers", [(3, 5, -5, LARGEST), (LARGEST, 0, -LARGEST, 1)])
@pytest.mark.parametrize("x64", [False, True])
def test_the_devices_find_the_least_whatever_mesh_and_width_the_loop_has(numbers, x64):
    """Here of one host alone: tests/test_hosts_streams.py asks those of several."""
    ended = []
    loop_mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(loop_mesh), jax.enable_x64(x64):
        minimum = Minimum(ByDevices(jax.devices()[::-1]), at_end=lambda: ended.append(True))
        minimum.start()
        for _ in range(3):
            minimum.ask(question := Question(numbers))
            assert question.begun.wait(HANG_S)
            assert question.answered.wait(HANG_S)
            assert minimum.least(question) == numbers
        minimum.close()
    assert ended == [True]


class Store:
    """What hosts have posted, by round and host; they run in threads of this process."""

    def __init__(self, num_hosts):
        self.num_hosts, self.posted = num_hosts, {}
        self.came, self.most_of_a_host = threading.Condition(), 0

    def of(self, round_):
        return dict(self.posted.get(round_, {}))


class StoreRounds:
    """`Rounds` of one host by such a store."""

    def __init__(self, store, host):
        self.store, self.host = store, host

    def post(self, round_, answer):
        with self.store.came:
            self.store.posted.setdefault(round_, {})[self.host] = answer
            own = sum(self.host in answers for answers in self.store.posted.values())
            self.store.most_of_a_host = max(self.store.most_of_a_host, own)
            self.store.came.notify_all()

    def unsay(self, round_):
        with self.store.came:
            del self.store.posted[round_][self.host]
            if not self.store.posted[round_]:
                del self.store.posted[round_]

    def gather(self, round_, stopped):
        with self.store.came:
            while len(self.store.of(round_)) < self.store.num_hosts:
                if stopped():
                    return None
                self.store.came.wait(0.01)
            return self.store.of(round_)


@settings(deadline=None, max_examples=30)
@given(
    of_hosts=st.integers(1, 4).flatmap(
        lambda asked: st.lists(
            st.lists(st.tuples(*[st.integers(-9, 9)] * 3), min_size=asked, max_size=asked),
            min_size=1,
            max_size=4,
        )
    )
)
def test_the_store_finds_the_least_of_each_question_and_keeps_the_last_two_alone(of_hosts):
    store = Store(len(of_hosts))

    def ask_all(host, questions):
        minimum = Minimum(ByStore(StoreRounds(store, host)), at_end=lambda: None)
        minimum.start()
        answers = []
        for numbers in questions:
            minimum.ask(question := Question(numbers))
            assert question.begun.is_set()  # no collective, whose turn would have to come
            assert question.answered.wait(HANG_S)
            answers.append(minimum.least(question))
        minimum.close()
        return answers

    with ThreadPoolExecutor(len(of_hosts)) as threads:
        answers = list(threads.map(ask_all, range(len(of_hosts)), of_hosts))
    expected = [
        tuple(min(numbers) for numbers in zip(*question, strict=True))
        for question in zip(*of_hosts, strict=True)
    ]
    assert answers == [expected] * len(of_hosts)
    assert store.most_of_a_host <= 2
    assert len(store.posted) == 1


def test_a_host_that_asks_the_store_alone_can_be_closed():
    ended = []
    store = Store(2)
    minimum = Minimum(ByStore(StoreRounds(store, 0)), at_end=lambda: ended.append(True))
    minimum.start()
    minimum.ask(question := Question((1,)))
    eventually(lambda: store.posted)
    minimum.close()
    assert ended == [True]
    assert question.answered.is_set()


class GoneWay(Way):
    def least(self, numbers, begins):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")


def test_where_the_hosts_cannot_be_asked_the_loop_is_told_and_does_not_wait():
    minimum = Minimum(GoneWay(), at_end=lambda: None)
    minimum.start()
    minimum.ask(question := Question((1,)))
    assert question.answered.wait(HANG_S)
    with pytest.raises(AgreementError, match="most likely one of them is gone"):
        minimum.least(question)
    minimum.close()


class CountingWay(Way):
    def __init__(self):
        self.asked = []

    def least(self, numbers, begins):
        self.asked.append(numbers)
        return numbers


def test_what_an_interrupt_has_asked_twice_is_answered_once():
    way = CountingWay()
    minimum = Minimum(way, at_end=lambda: None)
    minimum.start()
    for numbers in [(1,), (2,)]:
        minimum.ask(question := Question(numbers))
        question.is_asked = False  # the interrupt came before that was noted
        minimum.ask(question)
        assert question.answered.wait(HANG_S)
        assert minimum.least(question) == numbers
    minimum.close()
    assert way.asked == [(1,), (2,)]
