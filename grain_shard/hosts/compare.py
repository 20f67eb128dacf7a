"""Compares the fields by which hosts describe their pipelines; errors name hosts and fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from grain_shard.hosts.verdict import Verdict

Answers = Mapping[int, Any]
_MAX_CHARACTERS = 200  # longest value of a field in a message; the end of a longer one is cut off
# The field for the digest of the first whole batch. Hosts with rows="global" compare it, because
# they say that all of them produce the same batches.
FIRST_BATCH = 'first batch of rows="global"'
# The fields that describe a pipeline. `_DIVIDED` is the usual reason why one of them differs among
# hosts that run the same script.
_OF_THE_PIPELINE = "source", "transforms"
_DIVIDED = (
    " If all of that is the same, the pipeline most likely depends on jax.process_index(), by a"
    " slice or by files for each host. Remove the slice, and give all hosts all files: .shard_to"
    " then gives each host its rows."
)
# The rows that a host's pipeline yields: the same whole batches on all hosts ("global"), rows of
# its own ("local"), or the rows of its feeds ("feeds"). `OWN_ROWS` has the field that hosts add for
# "local" and "feeds": a pair of their shards and a digest of their rows of the first batch.
GLOBAL: Final = "global"
LOCAL: Final = "local"
OF_FEEDS: Final = "feeds"
OWN_ROWS = {LOCAL: "local rows", OF_FEEDS: "feed rows"}
# The fields with the digest of the source's first record: as the host reads it, and as the state
# has it that the host restored. A host without a digest is not compared.
NOW, SAVED = "record 0 of the source", "record 0 in the state"
_SAME = (
    "sort the list of files (a set, glob and os.listdir have no fixed order), seed every"
    " shuffle, do not make random records in the source,"
)


def compare(answers: Answers) -> Verdict:
    """Compares the answers of all hosts.

    Args:
        answers: The fields of each host, by host.

    Returns:
        The verdict. If a field differs, it is an `error`, which names the hosts and the field. If
        the hosts agree with each other, but the restored state has another record 0, it is
        `changed`. If nothing differs, the hosts have `agreed` on the digest of the source's first
        record, or on "" if no host has one.

    Example:
        >>> print(compare({0: {"seeds": 1}, 1: {"seeds": 1}, 2: {"seeds": 7}}).error)
        the hosts do not run the same pipeline.
          seeds: 1 on hosts 0, 1; 7 on host 2
          remedy: run the same script with the same arguments, files and checkpoint on every host.
    """
    lines = differences(answers)  # a line of the message for each field that differs
    wrong_rows = _wrong_rows(answers)  # pairs (line, remedy)
    # Only hosts with rows="global" have this field.
    first_batches = {host: answer for host, answer in answers.items() if FIRST_BATCH in answer}
    if first_batches and difference(FIRST_BATCH, first_batches):
        lines.append(
            '  rows: with rows="global" every host must produce the same batches. Read the same'
            " files with the same seed on every host. Or shard the source by"
            ' grain_shard.ShardByMesh(mesh, spec), and pass rows="local"'
        )
    if not lines and not wrong_rows:
        return _compare_records(answers)
    remedies = list(dict.fromkeys(remedy for _, remedy in wrong_rows))
    if lines:
        # The fields that describe the pipeline often differ because each host takes its own slice.
        same = "run the same script with the same arguments, files and checkpoint on every host."
        divided = any(difference(name, answers) for name in _OF_THE_PIPELINE)
        remedies.insert(0, same + (_DIVIDED if divided else ""))
    lines += [line for line, _ in wrong_rows]
    problem = "the hosts do not run the same pipeline."
    return Verdict(error=_message(problem, lines, " Or ".join(remedies)))


def compare_positions(answers: Answers) -> Verdict:
    """Compares the positions at which the hosts save their iterators.

    Args:
        answers: The fields of each host's next batch, by host.

    Returns:
        The verdict, which is an `error` if a field differs.

    Example:
        >>> print(compare_positions({0: {"next batch": 8}, 1: {"next batch": 7}}).error)
        the hosts are not at the same batch, so a global batch had rows of two batches.
          next batch: 8 on host 0; 7 on host 1
          remedy: call next equally often on every host. To look at a batch on one host alone,
          iterate over the dataset before .shard_to.
    """
    problem = "the hosts are not at the same batch, so a global batch had rows of two batches."
    remedy = (
        "call next equally often on every host. To look at a batch on one host alone, iterate"
        " over the dataset before .shard_to."
    )
    lines = differences(answers)
    return Verdict(error=_message(problem, lines, remedy) if lines else "")


def _message(problem: str, lines: Iterable[str], remedy: str) -> str:
    return "\n".join([problem, *lines, f"  remedy: {remedy}"])


def _compare_records(answers: Answers) -> Verdict:
    """Compares the source's first record between hosts, and with the one in a restored state.

    Either may be missing: a stream has no record 0, and a new run has no state.
    """
    # The hosts that have read the record. The other ones are not compared.
    read = {host: answer for host, answer in answers.items() if answer.get(NOW)}
    if line := difference(NOW, read):
        error = "the hosts read different records at the same index of their source."
        remedy = f"{_SAME} and give all hosts all records: do not slice by jax.process_index()."
        return Verdict(error=_message(error, [line], remedy))
    now = next((answer[NOW] for answer in read.values()), "")
    saved = next((answer[SAVED] for answer in answers.values() if answer.get(SAVED)), "")
    if not now or saved in ("", now):
        return Verdict(agreed=now)
    error = (
        "the source has changed since the state was saved: it has other records at the same index."
    )
    remedy = (
        f"{_SAME} and restore with the records of the saved run. If they were changed on purpose,"
        " call batches.set_state(batches.get_state()) after this error, to go on at the same place."
    )
    line = f"  {NOW}: saved {saved!r}, now {now!r}"
    return Verdict(changed=_message(error, [line], remedy))


def differences(answers: Answers) -> list[str]:
    """Returns a line of text for each field that must be the same on all hosts and is not.

    The digests of records and of a host's own rows are left out: they are compared in other ways.

    Args:
        answers: The fields of each host, by host.
    """
    names = dict.fromkeys(name for answer in answers.values() for name in answer)
    compared = [name for name in names if name not in (*OWN_ROWS.values(), NOW, SAVED)]
    return [line for name in compared if (line := difference(name, answers))]


def difference(name: str, answers: Answers) -> str | None:
    """Returns a line such as ``seeds: 1 on hosts 0, 1; 7 on host 2``, if a field differs.

    Args:
        name: The name of the field.
        answers: The fields of each host, by host.

    Returns:
        The line; None if all hosts have the same value.
    """
    hosts_by_value: dict[str, list[int]] = {}
    for host, answer in answers.items():
        value = json.dumps(answer[name], sort_keys=True) if name in answer else "nothing"
        hosts_by_value.setdefault(value, []).append(host)
    if len(hosts_by_value) < 2:
        return None
    groups = [f"{_short(value)} on {hosts_text(hosts)}" for value, hosts in hosts_by_value.items()]
    return f"  {name}: {'; '.join(groups)}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _wrong_rows(answers: Answers) -> list[tuple[str, str]]:
    """Returns a line and a remedy for each group of hosts whose rows do not fit their shards.

    Hosts with the same shards must have the same rows, and hosts with different shards different
    rows. Two exceptions: rows that are all padding have the digest "" and fit any shards, and
    different feeds may yield the same rows.
    """

    def own_rows(kind: str) -> dict[int, Sequence[Any]]:
        """Returns the pairs (shards, digest of the rows), by host."""
        field = OWN_ROWS[kind]
        return {host: answer[field] for host, answer in answers.items() if field in answer}

    local = own_rows(LOCAL)
    # The pairs the other way round, to find equal rows on different shards.
    digests_first = {host: (digest, shards) for host, (shards, digest) in local.items() if digest}
    shard_source = "shard the source by grain_shard.ShardByMesh(mesh, spec)"
    wrong = [
        (
            f"  rows: {hosts} hold the same shards, but their pipelines yield different rows",
            shard_source,
        )
        for hosts in _differing(local)
    ]
    wrong += [
        (
            f"  rows: {hosts} hold different shards, but their pipelines yield the same rows",
            f'{shard_source}, or pass rows="global" if every host reads the whole batch or'
            " generates the same data",
        )
        for hosts in _differing(digests_first)
    ]
    wrong += [
        (
            f"  feeds: {hosts} run the same feeds, but get different rows",
            "let the stream that make_feed returns depend on shard_index and shard_count alone",
        )
        for hosts in _differing(own_rows(OF_FEEDS))
    ]
    return [(line, f"{remedy}.") for line, remedy in wrong]


def _differing(pairs: Mapping[int, Sequence[Any]]) -> Iterator[str]:
    """Yields the names of hosts whose pairs begin with the same value and end with others.

    Example:
        >>> list(_differing({0: ("a", 1), 1: ("a", 2), 2: ("b", 1), 3: ("b", 1)}))
        ['hosts 0, 1']
    """
    groups: dict[str, dict[int, str]] = {}
    for host, (first, second) in pairs.items():
        groups.setdefault(str(first), {})[host] = str(second)
    for seconds in groups.values():
        if len(set(seconds.values())) > 1:
            yield hosts_text(seconds)


def hosts_text(hosts: Any) -> str:
    """Returns a text such as "hosts 0, 1", with the numbers of at most eight hosts."""
    hosts = list(hosts)
    names = ", ".join(map(str, hosts[:8])) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
    return f"host {names}" if len(hosts) == 1 else f"hosts {names}"
