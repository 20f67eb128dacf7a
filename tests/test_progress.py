"""What a host tells of its loop, beside the loop. Hosts are threads of this process here."""

from grain_shard.hosts.progress import Progress
from tests.on_hosts import KeyValues


def test_a_loop_that_is_left_while_its_place_is_told_is_told_to_have_left():
    store = KeyValues()
    hosts = [Progress(store.rounds(host, 2), first=0, total=None) for host in range(2)]
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
    assert [progress.all_left for progress in hosts] == [True, True]
