"""How many threads read side by side: the decisions, and what they are made of, by literal tables.

Nothing here takes time: every moment is a number in the test.
"""

import itertools

import pytest

from grain_shard.threads.pace import ReadPace, ThreadCount, Window


def waiting(rate, process_cores=0.02, starved=1.0):
    """A window in which reads wait: hardly a processor is busy."""
    return Window(rate, thread_cores=process_cores, process_cores=process_cores, starved=starved)


def computing(rate, thread_cores=0.9):
    """A window in which reads compute."""
    return Window(rate, thread_cores=thread_cores, process_cores=thread_cores + 0.1, starved=1.0)


def fed(rate):
    """A window in which the consumer had what it needed."""
    return Window(rate, thread_cores=0.1, process_cores=0.1, starved=0.0)


REST = [computing(100)] * 3  # after the first read, and after the first attempt that was no better
# Reads side by side when the first one was done, and the processors that they kept busy.
ALONE = 1, 1.0
WAITS = 4, 1 / 4

# These two, windows, and the numbers of threads after the first read and after each window.
TABLE = {
    "reads that wait: as many at once as a processor can serve": (
        WAITS,
        [waiting(160), waiting(1280), waiting(1280)],
        [16, 128, 128, 128],
    ),
    "no more at once than a processor can serve": (
        (1, 0.2),
        [waiting(50, process_cores=0.2)],
        [5, 25],
    ),
    "nor than 64, by one read": ((1, 0.001), [], [64]),
    "nor more than one, if reads compute side by side": ((8, 2.0), [], [1]),
    "after attempts in both directions that were no better, attempts are smaller": (
        WAITS,
        [computing(160), *[computing(150)] * 5, computing(75), *[computing(150)] * 8],
        [16, 32, 16, 16, 16, 16, 8, *[16] * 7, 23, 16],
    ),
    "reads that compute stay alone, then twice as many are tried, and taken back if no better": (
        ALONE,
        [*REST, computing(100), computing(104)],
        [1, 1, 1, 1, 2, 1],
    ),
    "or kept if they are; after still more were no better, fewer are tried": (
        ALONE,
        [
            *REST,
            computing(100),
            computing(190),
            computing(110),
            *([computing(190)] * 4),
            computing(188),
        ],
        [1, 1, 1, 1, 2, 4, 2, 2, 2, 2, 1, 2],
    ),
    "where no processor is left, fewer are tried": (
        ALONE,
        [*REST, computing(100), computing(190, thread_cores=1.9)],
        [1, 1, 1, 1, 2, 1],
    ),
    "where reads surely wait, fewer are not tried": (
        WAITS,
        [waiting(160)] * 11,
        [16, 128, 16, 16, 16, 16, 128, 16, 16, 16, 16, 16],
    ),
    "where it may be that other processes have the processors, they are": (
        WAITS,
        [waiting(160, process_cores=0.2)] * 7,
        [16, 80, 16, 16, 16, 16, 8, 4],
    ),
    "where there can be no more, only after a long rest": (
        WAITS,
        [waiting(160), *[waiting(1280, process_cores=0.2)] * 67],
        [16, *[128] * 66, 64, 32],
    ),
    "nothing is tried while the consumer has what it needs": (
        WAITS,
        [fed(160)] * 5,
        [16, 16, 16, 16, 16, 16],
    ),
    "a source that has become slow is followed at the second window": (
        ALONE,
        [*REST[:2], waiting(1), waiting(1), waiting(16)],
        [1, 1, 1, 1, 16, 128],
    ),
    "one slow window is chance": (
        ALONE,
        [computing(100), waiting(1), computing(100)],
        [1, 1, 1, 1],
    ),
    "and one that has become fast": (
        WAITS,
        [waiting(160), waiting(1280), *[computing(9000)] * 4],
        [16, 128, 128, 128, 64, 32, 16],
    ),
    "and one that has become fast while other processes have the processors": (
        WAITS,
        [waiting(160), waiting(1280), *[waiting(9000, process_cores=0.4)] * 5],
        [16, 128, 128, 128, 64, 32, 16, 8],
    ),
}


@pytest.mark.parametrize(("first", "windows", "chosen"), TABLE.values(), ids=TABLE.keys())
def test_decisions(first, windows, chosen):
    count = ThreadCount(128, cores=2)
    count.begin(*first)
    threads = [count.threads]
    for window in windows:
        count.decide(window)
        threads.append(count.threads)
    assert threads == chosen


def test_it_rests_the_longer_the_more_often_nothing_helped():
    count, attempts = ThreadCount(128, cores=2), []
    count.begin(*ALONE)
    for window in range(200):
        before = count.threads
        count.decide(computing(100 if count.threads == 1 else 50))
        if before == 1 != count.threads:
            attempts.append(window)
    gaps = [later - attempt for attempt, later in itertools.pairwise(attempts)]
    assert gaps == [5, 8, 14, 26, 50, 66]


class Clock:
    """A pace whose reads begin and end when the test says so."""

    def __init__(self, **options):
        self.processor_s = 0.0
        self.pace = ReadPace(process_time=lambda: self.processor_s, **options)

    def reads(self, start, end, count=1):
        """Reads of a record each, side by side: all begin, then all end."""
        for _ in range(count):
            self.pace.begun(start)
        for _ in range(count):
            self.processor_s += 0.001
            self.pace.done(start, end, 0.001, 1)


def test_the_rate_does_not_depend_on_how_many_reads_end_within_the_window(monkeypatch):
    """Sixteen reads of 100 ms that end together are 160 a second, not sixteen in no time."""
    clock, windows = Clock(most=16), []
    decide = clock.pace.count.decide
    clock.pace.consumer_waits(0.0)
    clock.reads(0.0, 0.1)
    monkeypatch.setattr(clock.pace.count, "decide", lambda w: (windows.append(w), decide(w)))
    clock.reads(0.1, 0.2, count=16)
    (window,) = windows
    assert window.rate == pytest.approx(160)
    assert window.starved == pytest.approx(1)
    assert window.process_cores == pytest.approx(0.16)


def test_a_window_with_more_threads_begins_when_as_many_read(monkeypatch):
    """The third thread takes 200 ms to start. Its window has three reads at all times."""
    clock, windows = Clock(), []
    clock.pace.consumer_waits(0.0)
    clock.reads(0.0, 0.1)
    monkeypatch.setattr(clock.pace, "threads", 3)
    monkeypatch.setattr(clock.pace.count, "decide", windows.append)
    starts = 0.1, 0.1, 0.3
    for start in starts:
        clock.pace.begun(start)
    for start in starts:
        clock.pace.done(start, 0.5, 0.0, 1)
    (window,) = windows
    assert window.rate == pytest.approx(3 / ((0.4 + 0.4 + 0.2) / 3))


def test_there_are_no_more_threads_than_the_system_allows():
    clock = Clock()
    clock.pace.limit(3)
    clock.pace.consumer_waits(0.0)
    clock.reads(0.0, 0.1)
    assert clock.pace.threads == 3
