"""What a host tells of its loop, beside the loop. Hosts are threads of this process here."""

import itertools
import threading
from types import SimpleNamespace

import pytest

from grain_shard.hosts import blocked, exits
from grain_shard.hosts.own_data import OwnData
from grain_shard.hosts.places import (
    IN_SAVE,
    IN_STEP,
    Place,
    Places,
    left_early,
    left_in_last_step,
    stand_apart,
)
from grain_shard.hosts.progress import LoopProgress
from grain_shard.hosts.stillness import Stillness
from tests.conftest import eventually
from tests.on_hosts import KeyValues


def test_a_loop_that_is_left_while_its_place_is_told_is_told_to_have_left():
    store = KeyValues()
    hosts = [LoopProgress(store.rounds(host, 2), first=0, total=None) for host in range(2)]
    put = hosts[1]._rounds.put

    def slow_put(topic, value):
        if topic == "places":
            hosts[1].leave(5, "break")
        put(topic, value)

    for progress in hosts:
        progress.asks(4)
    hosts[1]._rounds.put = slow_put
    assert hosts[1].look() is None
    hosts[1]._rounds.put = put
    hosts[0].leave(5, "break")
    assert [hosts[host].look(at_exit=True) for host in (1, 0, 1)] == [None, None, None]
    assert hosts[0].look(at_exit=True) is None, "the places are deleted by then"
    assert [progress.all_left for progress in hosts] == [True, True]


GONE, AT_END = Place(7, "break"), Place(7, "")
GOES_ON, IS_STILL, SAVES = Place(7, None), Place(7, None, IN_STEP), Place(7, None, IN_SAVE)
ENDED_AT_END = AT_END._replace(has_ended=True)
LEFT = "host 0 left the loop after batch 7 ({}), and host {} stood still after that, {}."


def without_remedy(found):
    text, _, remedy = (found or "").partition("\n  remedy: ")
    return text if remedy else None


@pytest.mark.parametrize(
    ("places", "is_long", "error"),
    [
        ([GONE, IS_STILL], True, LEFT.format("break", 1, IN_STEP)),
        ([GONE, AT_END, IS_STILL], True, LEFT.format("break", 2, IN_STEP)),
        ([GONE, SAVES], True, LEFT.format("break", 1, IN_SAVE)),
        ([ENDED_AT_END, IS_STILL], True, LEFT.format("the end of the data", 1, IN_STEP)),
        ([GONE, IS_STILL], False, None),  # the step may last a little longer
        ([GONE, GOES_ON], True, None),  # a host evaluates, or saves, before it leaves
        ([GONE, IS_STILL, GOES_ON], True, None),  # in a step, the still host waits for the other
        ([GONE, IS_STILL, None], True, None),  # of that host nothing is known yet
        ([IS_STILL, IS_STILL], True, None),  # a long step
        ([IS_STILL, AT_END], True, None),  # the last step
    ],
)
def test_a_host_that_left_before_its_step_is_named_once_the_others_stand_still(
    places, is_long, error
):
    known = {host: place for host, place in enumerate(places) if place is not None}
    seen = Places(known, len(places), same_s=300.0 * is_long)
    assert without_remedy(left_early(seen) or left_in_last_step(seen)) == error


@pytest.mark.parametrize(
    ("timeout_s", "status", "still", "is_named"),
    [
        (0.0, 1, IN_STEP, True),
        (0.0, 0, IN_STEP, False),
        (0.0, 0, IN_SAVE, True),
        (600.0, 1, IN_STEP, False),
    ],
)
def test_the_first_host_waits_for_a_loop_that_stands_still_before_it_names_a_host(
    timeout_s, status, still, is_named, monkeypatch, caplog
):
    monkeypatch.setattr(exits, "status", lambda: status)  # of the host that has left
    store = KeyValues()
    hosts = [LoopProgress(store.rounds(host, 2, timeout_s=timeout_s), 0, None) for host in range(2)]
    for progress in hosts:
        progress.asks(6)
    hosts[0].leave(7, "break")
    assert hosts[1].look(still) is None
    errors = [hosts[0].look(at_exit=True) or "" for _ in range(2)]
    assert ["host 1 stood still" in error for error in errors] == [is_named] * 2
    # After a clean end it is first only a line of the log, once.
    assert caplog.text.count("host 1 stood still") == (not status and not is_named)


BEHIND, AHEAD = Place(6, None, f"{IN_STEP}, train.py:40"), Place(7, None, f"{IN_STEP}, train.py:30")
AT_END = Place(8, "", f"{IN_STEP}, train.py:60")
APART = (
    "all hosts have stood still for 60 s:\n"
    "  {} at batch 6, most likely in the step of that batch, train.py:40\n"
    "  {} at batch {}, most likely in the step of that batch, train.py:{}"
)


@pytest.mark.parametrize(
    ("places", "warning"),
    [
        ([BEHIND, AHEAD, AHEAD], APART.format("host 0", "hosts 1, 2", 7, 30)),
        ([AHEAD, BEHIND], APART.format("host 1", "host 0", 7, 30)),
        (
            [IS_STILL, SAVES],
            "all hosts have stood still for 60 s:\n  host 1 at batch 7, in a save\n"
            f"  host 0 at batch 7, {IN_STEP}",
        ),
        (
            [BEHIND, BEHIND._replace(still=f"{IN_STEP}, train.py:50")],
            APART.format("host 0", "host 1", 6, 50),
        ),
        (
            [BEHIND, AT_END, AHEAD],
            APART.format("host 0", "host 2", 7, 30)
            + "\n  host 1 at batch 8, at the end of the data, train.py:60",
        ),
        ([AT_END, AT_END._replace(batches=7)], None),  # the loops are over
        ([BEHIND, AT_END._replace(still="")], None),  # host 1 works on, as on an export
        ([BEHIND, AT_END._replace(has_ended=True)], None),  # is said in other words
        ([AHEAD, AHEAD], None),  # a long step
        ([BEHIND, GOES_ON], None),  # host 1 works: it evaluates, or it reads
        ([BEHIND, GONE], None),  # is said in other words
        ([BEHIND, AHEAD, None], None),  # of host 2 nothing is known yet
    ],
)
def test_loops_that_stand_still_at_unlike_places_are_named(places, warning):
    known = {host: place for host, place in enumerate(places) if place is not None}
    assert without_remedy(stand_apart(Places(known, len(places), same_s=60.0))) == warning


def test_the_first_host_logs_once_that_loops_stand_still_at_unlike_places(caplog):
    store = KeyValues()
    hosts = [LoopProgress(store.rounds(host, 2, timeout_s=0.0), 0, None) for host in range(2)]
    for host, progress in enumerate(hosts):
        progress.asks(6 + host)
    for _ in range(3):
        assert [hosts[host].look(IN_STEP) for host in (1, 0)] == [None, None]
    assert caplog.text.count("all hosts have stood still for 0 s:\n  host 0 at batch 7") == 1


def test_a_thread_is_still_if_it_waits_outside_the_standard_library_or_in_a_save():
    still, lock = Stillness(long_s=0.0), threading.Lock()
    event, ended = threading.Event(), threading.Event()

    def loop():
        still.is_here()
        event.wait()  # waits inside the standard library, as for data
        lock.acquire()  # waits in C code that this file calls, as a step does
        lock.release()
        ended.set()

    thread = threading.Thread(target=loop)
    with lock:
        thread.start()
        eventually(lambda: still._clock is not None)
        assert [still.still() for _ in range(3)] == [""] * 3
        with still.in_save():
            eventually(lambda: still.still().startswith(f"{IN_SAVE}, test_progress.py:"))
        assert still.still() == ""
        event.set()
        eventually(lambda: still.still().startswith(f"{IN_STEP}, test_progress.py:"))
    thread.join()
    assert ended.is_set()
    assert still.still() == ""


def test_a_wait_for_own_data_is_too_long_unless_another_batch_or_another_try_came():
    retries = itertools.count()
    tries_again = OwnData(1, 0.0, lambda: next(retries))
    goes_on, hangs = OwnData(1, 0.0, int), OwnData(1, 0.0, int)
    eventually(lambda: (hangs.error(7) or "").startswith("host 1 has waited"))
    assert [tries_again.error(7) for _ in range(3)] == [None] * 3
    assert [goes_on.error(batch) for batch in (7, 8, None, 8)] == [None] * 4


@pytest.mark.parametrize(("moves_on", "ends"), [(2, False), (100, True)])
def test_a_machine_that_stands_still_between_two_looks_blocks_no_loop(moves_on, ends, monkeypatch):
    looks, ended = itertools.count(), []
    clock = SimpleNamespace(monotonic=itertools.count(0, 20).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(blocked, "time", clock)
    monkeypatch.setattr(exits, "end", lambda: ended.append(True))
    main = threading.main_thread().ident
    blocked.end_if_blocked(lambda: (main, 0), lambda: next(looks) == moves_on)
    assert bool(ended) == ends
