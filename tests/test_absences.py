"""Which waits for other hosts end, and whom the error names."""

import pytest

from grain_shard.errors import HostTimeoutError
from grain_shard.hosts.absences import Absences


class Store:
    """The rounds of host 0 of three, and what all of them have said."""

    name, hosts = "train/0", [0, 1, 2]

    def __init__(self, said, left):
        self.topics, self.left = {topic: dict(of) for topic, of in said.items()}, left

    def say(self, topic, text):
        self.topics.setdefault(topic, {})[0] = text

    def unsay(self, topic):
        del self.topics[topic][0]

    def said(self, topic):
        return self.topics.get(topic, {})

    def of_hosts(self, folder):
        return self.left

    def raise_silent(self, silent):
        raise HostTimeoutError(str(silent))


# What host 0 waits for, whether it gives up, what the others have said, the series that they have
# left, and whom the error names; None if host 0 goes on waiting.
WAITS = [
    ("others", False, {}, {}, None),
    ("others", False, {"waiting": {1: ""}}, {}, None),
    ("others", False, {"no data": {2: ""}}, {}, {2: "had no data"}),
    ("others", False, {}, {1: ["train/0"]}, {1: "closed its iterator"}),
    ("others", False, {}, {1: ["evaluation/0"]}, None),
    ("others", True, {"waiting": {1: ""}}, {}, {2: "did not ask for its next batch"}),
    ("others", False, {"gave up": {1: ""}}, {}, {0: "came too late"}),
    ("its data", False, {"no data": {1: "", 2: ""}}, {}, None),
    ("its data", False, {"gave up": {2: ""}}, {}, {0: "came too late"}),
]


@pytest.mark.parametrize(("waits_for", "gives_up", "said", "left", "named"), WAITS)
def test_a_wait_ends_where_it_is_in_vain(waits_for, gives_up, said, left, named):
    absences = Absences(Store(said, left))
    waits_for_own = waits_for == "its data"
    if named is None:
        absences.look(waits_for_own, gives_up)
    else:
        with pytest.raises(HostTimeoutError) as caught:
            absences.look(waits_for_own, gives_up)
        assert str(caught.value) == str(named)


def test_what_a_host_says_of_itself_is_what_it_waits_for_now():
    store = Store({}, {})
    absences = Absences(store)
    absences.look(waits_for_own=False)
    assert store.topics == {"waiting": {0: ""}}
    absences.look(waits_for_own=True)
    assert store.topics == {"waiting": {}, "no data": {0: ""}}
    absences.come_back(waits_for_own=True)
    assert store.topics == {"waiting": {}, "no data": {}}
