"""How records are cut into batches, in integers: what holds of all runs.

What it means for a pipeline: the table of test_changing_runs.py.
"""

import hypothesis
from hypothesis import strategies as st

from grain_shard.reading.cuts import Cuts


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
    cuts, batches = Cuts(records, sizes, drops_short=drop), in_turn(records, sizes, drop, epochs)
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
