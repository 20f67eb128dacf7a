"""How many threads read side by side: the decisions, and what they are made of, by literal tables.

Nothing here takes time: every moment is a number in the test.
"""

import itertools

import pytest

from grain_shard.threads.pace import ReadPace, ThreadCount, Window


def reading(rate, cores=1.0, starved=1.0):
    """A window in which the consumer waits; by default, one processor is busy."""
    return Window(rate, cores=cores, starved=starved)


def waiting(rate):
    """A window in which reads wait: hardly a processor is busy."""
    return reading(rate, cores=0.02)


def fed(rate):
    """A window in which the consumer had what it needed."""
    return reading(rate, starved=0.0)


REST = [reading(100)] * 3  # after the first reads, and after the first attempt that was no better
# Wall-clock and processor seconds of the fastest of the first reads.
COMPUTES = 0.001, 0.001
WAITS = 0.016, 0.001

# These two, windows, and the numbers of threads after the first reads and after each window.
TABLE = {
    "reads that wait: as many as keep one processor busy": (WAITS, [], [16]),
    "but no more than the most": ((1.0, 0.001), [], [128]),
    "reads that compute, or that do neither in a time that can be measured": ((0.0, 0.0), [], [1]),
    "after some windows twice as many are tried, and taken back if they are no better": (
        COMPUTES,
        [*REST, reading(100), reading(104)],
        [1, 1, 1, 1, 2, 1],
    ),
    "or kept while the rate rises; after still more were no better, fewer are tried": (
        COMPUTES,
        [
            *REST,
            reading(100),
            reading(190),
            reading(110),
            *([reading(190)] * 4),
            reading(188),
        ],
        [1, 1, 1, 1, 2, 4, 2, 2, 2, 2, 1, 2],
    ),
    "fewer are kept if they are about as fast": (
        WAITS,
        [*[reading(160)] * 4, reading(160), *[reading(160)] * 4, reading(158)],
        [16, 16, 16, 16, 32, 16, 16, 16, 16, 8, 4],
    ),
    "fewer are not tried where all threads wait": (
        WAITS,
        [waiting(160)] * 12,
        [16, 16, 16, 16, 32, 16, 16, 16, 16, 32, 16, 16, 16],
    ),
    "nor more than the most": (
        (1.0, 0.001),
        [waiting(1280)] * 9,
        [128] * 10,
    ),
    "nothing is tried while the consumer has what it needs": (
        WAITS,
        [fed(160)] * 5,
        [16, 16, 16, 16, 16, 16],
    ),
    "a source that has become slow is followed at the second window": (
        COMPUTES,
        [*REST[:2], waiting(1), waiting(1), waiting(2), waiting(4)],
        [1, 1, 1, 1, 2, 4, 8],
    ),
    "one slow window is chance": (
        COMPUTES,
        [reading(100), waiting(1), reading(100)],
        [1, 1, 1, 1],
    ),
    "and one that has become fast": (
        WAITS,
        [*[waiting(160)] * 3, *[reading(9000)] * 4],
        [16, 16, 16, 16, 16, 8, 4, 2],
    ),
}


@pytest.mark.parametrize(("first", "windows", "chosen"), TABLE.values(), ids=TABLE.keys())
def test_decisions(first, windows, chosen):
    count = ThreadCount(128)
    count.begin(*first)
    threads = [count.threads]
    for window in windows:
        count.decide(window)
        threads.append(count.threads)
    assert threads == chosen


def test_it_rests_the_longer_the_more_often_nothing_helped():
    count, attempts = ThreadCount(128), []
    count.begin(*COMPUTES)
    for window in range(200):
        before = count.threads
        count.decide(reading(100 if count.threads == 1 else 50))
        if before == 1 != count.threads:
            attempts.append(window)
    gaps = [later - attempt for attempt, later in itertools.pairwise(attempts)]
    assert gaps == [5, 8, 14, 26, 50, 66]


@pytest.mark.parametrize(
    ("threads", "seconds_per_record", "at_a_time"),
    [
        (1, None, 1),  # no record was read yet
        (16, 1e-4, 40),  # as many as take 4 ms
        (1, 1e-5, 64),  # but no more than 64
        (16, 1e-3, 16),  # or the thread's share of a batch
        (16, 5e-3, 8),  # but no more than take 40 ms
        (16, 1.0, 1),
        (128, 1e-3, 4),
        (512, 5e-3, 1),
    ],
)
def test_how_many_records_a_task_reads(threads, seconds_per_record, at_a_time):
    pace = ReadPace(threads, most=512)
    pace.seconds_per_record = seconds_per_record
    assert pace.at_a_time(256) == at_a_time


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
    assert window.cores == pytest.approx(0.16)


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


def test_a_window_does_not_end_at_the_moment_at_which_it_begins(monkeypatch):
    """A coarse clock gives two ends the same time; the first one begins the window."""
    clock = Clock()
    clock.reads(0.0, 0.1)
    monkeypatch.setattr(clock.pace, "threads", 3)  # two reads do not begin a window
    for _ in range(2):
        clock.pace.begun(0.1)
    monkeypatch.setattr(clock.pace, "threads", 1)
    for _ in range(2):
        clock.pace.done(0.1, 0.2, 0.0, 1)
    assert clock.pace.threads == 1


def test_there_are_no_more_threads_than_the_system_allows():
    clock = Clock()
    clock.pace.limit(3)
    clock.pace.consumer_waits(0.0)
    clock.reads(0.0, 0.1)
    assert clock.pace.threads == 3
