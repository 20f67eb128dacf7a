"""How records are cut into batches, in integers: what holds of all runs.

What it means for a pipeline: the table of test_changing_runs.py.
"""

import hypothesis
from hypothesis import strategies as st

from grain_shard.reading.cuts import Cuts, Progress


def test_far_ahead_is_as_near_as_the_next_batch():
    cuts = Cuts(10**9, {0: 256, 10**12: 512})
    assert cuts.cut(10**15) == cuts.beginning_at(cuts.progress(10**15)).cut(10**15)
    assert cuts.steps_before(10**6) == 10**12 + (10**6 - 256_000) * (10**9 // 512)


@st.composite
def runs(draw):
    records = draw(st.integers(1, 40), label="records of an epoch")
    steps = [0, *sorted(draw(st.sets(st.integers(1, 30), max_size=3), label="steps"))]
    sizes = {step: draw(st.integers(1, records + 3)) for step in steps}
    return records, sizes


def in_turn(records, sizes, drop, epochs):
    """The batches of a run, found by going through it: [(epoch, record, how many)]."""
    batches, step = [], 0
    for epoch in range(epochs):
        record = 0
        while record < records:
            size = sizes[max(s for s in sizes if s <= step)]
            if drop and records - record < size:
                break
            batches.append((epoch, record, min(size, records - record)))
            record += size
            step += 1
    return batches


@hypothesis.given(run=runs(), drop=st.booleans(), epochs=st.integers(1, 4))
def test_it_is_what_going_through_the_run_finds(run, drop, epochs):
    records, sizes = run
    if drop and max(sizes.values()) > records:
        return  # refused
    cuts, batches = Cuts(records, sizes, drop_remainder=drop), in_turn(records, sizes, drop, epochs)
    assert cuts.steps_before(epochs) == len(batches)
    found = [cuts.cut(step) for step in range(len(batches))]
    assert cuts.has_short(epochs) == any(cut.num_records < cut.size for cut in found)
    assert [tuple(cut[:3]) for cut in found] == batches
    for step, (epoch, record, count) in enumerate(batches):
        for within in range(record, record + count):
            assert cuts.step_of(epoch, within) == step
        again = cuts.beginning_at(cuts.progress(step))
        assert again.cut(step) == cuts.cut(step), "a run that begins in the middle is the same"
        assert again.steps_before(epochs) == len(batches)


@hypothesis.given(data=st.data(), drop=st.booleans())
def test_whatever_the_sizes_no_record_is_left_out_or_comes_twice(data, drop):
    """A run that is interrupted again and again, and goes on with other sizes each time."""
    records = data.draw(st.integers(1, 40), label="records of an epoch")
    epochs, progress, seen = data.draw(st.integers(1, 4), label="epochs"), Progress(0, 0, 0), []
    for _ in range(6):
        step, size = progress.step, data.draw(st.integers(1, records), label="size")
        later = data.draw(st.integers(1, records), label="size three steps later")
        cuts = Cuts(records, {0: size, step + 3: later}, drop_remainder=drop, begin=progress)
        stop = min(cuts.steps_before(epochs), step + data.draw(st.integers(0, 8), label="steps"))
        for at in range(step, stop):
            cut = cuts.cut(at)
            assert 0 < cut.num_records <= cut.size
            seen += [(cut.epoch, cut.record + i) for i in range(cut.num_records)]
        progress = cuts.progress(stop)
        assert progress.step == stop
    assert seen == sorted(set(seen)), "in order, and nothing twice"
    everything = [(epoch, record) for epoch in range(epochs) for record in range(records)]
    last = everything.index(seen[-1]) + 1 if seen else 0
    left_out = sorted(set(everything[:last]) - set(seen))
    assert drop or not left_out
    # What is dropped is the end of an epoch, and too few for a batch.
    for epoch in {epoch for epoch, _ in left_out}:
        dropped = [record for e, record in left_out if e == epoch]
        assert dropped == list(range(records - len(dropped), records))
