"""What a host makes of failures and ends of other hosts. Hosts are objects of this process here.

On hosts that are processes: test_hosts_failing.py.
"""

import threading
from types import SimpleNamespace

import pytest

from grain_shard.errors import AgreementError, HostTimeoutError
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.blocked import Blocked
from grain_shard.hosts.host_group import GroupSettings, HostGroup
from grain_shard.hosts.series import Series
from tests.on_hosts import KeyValues


@pytest.fixture
def told():
    """What host 0 has told the others."""
    return []


@pytest.fixture
def alarm(told):
    """The alarm of host 0, whose loop was handed 6 batches after the first 100."""
    stage = SimpleNamespace(taken=6, stop=lambda: None)
    return Alarm(KeyValues().rounds(0, 3), stage, 100, 1000, told.append)


ENDED = "the process of host 2 ended after batch 105 of 1,000 (ValueError: mine), and host 0 got"


def test_a_process_that_ended_stops_who_was_handed_more_batches(alarm, told):
    alarm.hear_end(2, 6, None)
    alarm.hear_end(1, 1000, None)
    alarm.raise_failure()
    assert told == []
    alarm.hear_end(2, 5, "ValueError: mine")
    with pytest.raises(AgreementError) as error:
        alarm.asks()
    assert told == [str(error.value)]
    assert str(error.value).splitlines()[0] == f"{ENDED} batch 106."
    alarm.hear_end(1, 3, None)
    assert len(told) == 1, "all hosts have stopped already"


def test_a_loop_that_was_handed_more_and_closed_its_iterator_tells_so(alarm, told):
    alarm.close()
    alarm.hear_end(2, 5, "ValueError: mine")
    assert [text.startswith(ENDED) for text in told] == [True]


@pytest.mark.parametrize(("missing", "waits"), [([1], False), ([1, 2], True)])
def test_a_vote_of_a_process_that_ended_is_not_waited_for(alarm, told, missing, waits):
    alarm.require_voters(lambda: [2])
    alarm.hear_end(2, 6, None)
    if not waits:
        alarm.require_voters(lambda: missing)
        return
    with pytest.raises(AgreementError, match="after batch 106 of 1,000, and host 0 waits for its"):
        alarm.require_voters(lambda: missing)
    assert len(told) == 1


def test_own_data_are_waited_for_as_long_as_timeout_s_unless_reads_are_tried_again():
    retries = 0
    group_settings = GroupSettings("random access", range(2), Series(), 10.0, {}, [0])
    host = KeyValues().of_host(1, lambda: HostGroup(group_settings, retries=lambda: retries))
    for waited_s in (1.0, 10.0, 1.0, 10.0):  # two waits
        host.waits(waited_s)
    retries = 1
    host.waits(11.0)
    host.waits(21.0)
    with pytest.raises(HostTimeoutError, match=r"host 1 has waited 22 s for the data of its next"):
        host.waits(22.0)
    HostGroup(None).waits(1000.0)  # on a single host


def test_a_loop_is_blocked_once_it_has_stood_still_for_ten_seconds_of_looks(monkeypatch, capfd):
    goes_on, moves, stands, stays = threading.Event(), Blocked(), Blocked(), Blocked()
    thread = threading.Thread(target=goes_on.wait)
    thread.start()
    assert not any(moves.look(thread.ident, asked, 4.0) for asked in range(9))
    looks = [stands.look(thread.ident, 0, 4.0) for _ in range(6)]
    monkeypatch.setenv("GRAIN_SHARD_END_PROCESS", "0")
    assert not any(stays.look(thread.ident, 0, 4.0) for _ in range(6))
    goes_on.set()
    thread.join()
    assert looks == [False, False, False, True, False, False]
    assert capfd.readouterr().err.count("Current thread") == 2, "the stacks are printed, once each"
