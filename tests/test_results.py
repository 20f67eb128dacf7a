"""`Results`: numbered results come in any order and are taken in order."""

import pytest

from grain_shard.errors import Raised
from grain_shard.threads.results import Results

BROKEN = Raised(OSError("broken"), None)
LATER = Raised(OSError("later"), None)
END = Raised(StopIteration(), None)


def results(size, *puts):
    made = Results(size)
    for number, result in puts:
        made.put(number, result)
    return made


@pytest.mark.parametrize(
    ("puts", "ready", "end"),
    [
        ([], 0, None),
        ([(1, "b")], 0, None),
        ([(1, "b"), (0, "a")], 2, None),
        ([(0, "a"), (1, BROKEN)], 1, BROKEN),
        ([(1, BROKEN)], 0, None),  # result 0 comes first
        ([(1, BROKEN), (0, "a"), (2, "c")], 1, BROKEN),
        ([(1, BROKEN), (1, LATER), (0, "a")], 1, BROKEN),
        ([(1, LATER), (0, BROKEN)], 0, BROKEN),
        ([(0, "a"), (1, END)], 1, END),
    ],
)
def test_an_error_comes_after_the_results_before_it(puts, ready, end):
    made = results(9, *puts)
    assert made.known() == (ready, end and end.error)
    assert [made.take() for _ in range(ready)] == list("abc")[:ready]
    assert made.is_next_here == (end is not None)
    if end is not None:
        for _ in range(2):  # it keeps raising the error
            with pytest.raises(type(end.error)):
                made.take()


def test_put_says_if_more_results_are_ready():
    made = Results(9)
    assert [made.put(1, "b"), made.put(0, "a"), made.put(2, "c")] == [False, True, True]


def test_results_begin_up_to_the_size_beyond_those_taken_and_not_past_an_error():
    made = results(2, (0, "a"))
    assert made.limit == 2
    made.take()
    assert made.limit == 3
    made.put(1, BROKEN)
    assert made.limit == 1
