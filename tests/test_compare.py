"""What every host is told when the hosts differ: which hosts, in what, and what to do."""

import pytest

from grain_shard.hosts.compare import compare

REMEDY = (
    "  remedy: run the same script with the same arguments, files and checkpoint on every host."
)


def lines_of(answers, remedy=REMEDY):
    """The lines between the first, which is always the same, and the remedy."""
    if not (error := compare(answers).error):
        return []
    first, *lines, last = error.splitlines()
    assert (first, last) == ("the hosts do not run the same pipeline.", remedy)
    return lines


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        ([{}, {}], []),
        ([{"records": 8}, {"records": 8}], []),
        ([{"at": {"a": 1, "b": 2}}, {"at": {"b": 2, "a": 1}}], []),
        ([{"records": n} for n in (8, 8, 9)], ["  records: 8 on hosts 0, 1; 9 on host 2"]),
        (
            [{"step": 1, "records": 22, "seeds": n} for n in (1, 9)] + [{"step": 1, "seeds": 1}],
            [
                "  records: 22 on hosts 0, 1; nothing on host 2",
                "  seeds: 1 on hosts 0, 2; 9 on host 1",
            ],
        ),
        ([{"mask": "bool[8]"}, {}], ['  mask: "bool[8]" on host 0; nothing on host 1']),
        ([{"mask": None}, {}], ["  mask: null on host 0; nothing on host 1"]),
        ([{"x": "a" * 5000}, {"x": 1}], [f'  x: "{"a" * 199}... on host 0; 1 on host 1']),
    ],
)
def test_fields(answers, lines):
    assert lines_of(dict(enumerate(answers))) == lines


def test_whole_batches_that_differ_have_their_remedy():
    field = 'first batch of rows="global"'
    assert lines_of({0: {field: "6dee7067"}, 1: {field: "6f555ae6"}}) == [
        f'  {field}: "6dee7067" on host 0; "6f555ae6" on host 1',
        '  rows: with rows="global" every host must produce the same batches. Read the same files'
        " with the same seed on every host. Or shard the source by"
        ' grain_shard.ShardByMesh(mesh, spec), and pass rows="local"',
    ]


@pytest.mark.parametrize("field", ["source", "transforms"])
def test_a_pipeline_that_differs_may_be_divided_by_the_host(field):
    remedy = (
        f"{REMEDY} If all of that is the same, the pipeline most likely depends on"
        " jax.process_index(), by a slice or by files for each host. Remove the slice, and give all"
        " hosts all files: .shard_to then gives each host its rows."
    )
    assert lines_of({0: {field: "6dee7067"}, 1: {field: "6f555ae6"}}, remedy) == [
        f'  {field}: "6dee7067" on host 0; "6f555ae6" on host 1'
    ]


SAME_SHARDS = "hold the same shards, but their pipelines yield different rows"
SAME_ROWS = "hold different shards, but their pipelines yield the same rows"
SHARD = "shard the source by grain_shard.ShardByMesh(mesh, spec)"
WHOLE = (
    f'{SHARD}, or pass rows="global" if every host reads the whole batch or generates the same data'
)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({0: ([0], "a"), 1: ([1], "b")}, []),
        ({0: ([0], "a"), 1: ([0], "a"), 2: ([1], "b")}, []),
        ({0: ([0], "a"), 1: ([0], "b")}, [f"hosts 0, 1 {SAME_SHARDS}"]),
        ({0: ([0], "a"), 1: ([1], "a"), 2: ([2], "b")}, [f"hosts 0, 1 {SAME_ROWS}"]),
        # Of streams that have ended, all rows are padding.
        ({0: ([0], "a"), 1: ([1], ""), 2: ([2], "")}, []),
        (
            {host: ([host], "a") for host in range(64)},
            [f"hosts 0, 1, 2, 3, 4, 5, 6, 7 and 56 more {SAME_ROWS}"],
        ),
    ],
)
def test_rows_of_hosts_that_feed_their_own(rows, found):
    remedy = SHARD if SAME_SHARDS in "".join(found) else WHOLE
    answers = {host: {"local rows": list(row)} for host, row in rows.items()}
    assert lines_of(answers, f"  remedy: {remedy}.") == [f"  rows: {text}" for text in found]


def test_wrong_rows_are_said_beside_a_field_that_differs():
    answers = {host: {"local rows": [[host], "a"], "records": 8 + host} for host in (0, 1)}
    assert lines_of(answers, f"{REMEDY} Or {WHOLE}.") == [
        "  records: 8 on host 0; 9 on host 1",
        f"  rows: hosts 0, 1 {SAME_ROWS}",
    ]


def test_feeds_may_yield_the_same_but_not_another_time_something_else():
    alike = {host: {"feed rows": [[host], "a"]} for host in (0, 1)}
    assert lines_of(alike) == []
    unlike = {0: {"feed rows": [[0], "a"]}, 1: {"feed rows": [[0], "b"]}}
    remedy = "let the stream that make_feed returns depend on shard_index and shard_count alone."
    assert lines_of(unlike, f"  remedy: {remedy}") == [
        "  feeds: hosts 0, 1 run the same feeds, but get different rows"
    ]
