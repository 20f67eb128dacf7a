"""What hosts say of themselves, compared: the same everywhere, or which host and which field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Answers = Mapping[int, Any]


def compare(answers: Answers) -> dict[str, Any]:
    """The verdict of `agree`: empty, or an error that names the hosts and the field.

    Example:
        >>> print(compare({0: {"seeds": 1}, 1: {"seeds": 1}, 2: {"seeds": 7}})["error"])
        the hosts do not run the same pipeline.
          seeds: 1 on hosts 0, 1; 7 on host 2
          remedy: run the same script with the same arguments and files on every host.
    """
    failed = {host: a["failed"] for host, a in answers.items() if "failed" in a}
    if failed:
        lines = [f"  host {host}: {text}" for host, text in failed.items()]
        return {"error": "\n".join([f"{hosts_text(failed)} failed at the first batch.", *lines])}
    lines = [line for name in _fields(answers) if (line := difference(name, answers))]
    lines += _same_rows(answers)
    if not lines:
        return {}
    remedy = "run the same script with the same arguments and files on every host."
    return {
        "error": "\n".join(
            ["the hosts do not run the same pipeline.", *lines, f"  remedy: {remedy}"]
        )
    }


def _fields(answers: Answers) -> list[str]:
    names = dict.fromkeys(name for answer in answers.values() for name in answer)
    return [name for name in names if name not in ("local rows", "feed rows")]


def difference(name: str, answers: Answers) -> str | None:
    """A line that says which hosts gave what for a field; None if all gave the same."""
    hosts_by_value: dict[str, list[int]] = {}
    for host, answer in answers.items():
        hosts_by_value.setdefault(json.dumps(answer.get(name)), []).append(host)
    if len(hosts_by_value) == 1:
        return None
    groups = [f"{value} on {hosts_text(hosts)}" for value, hosts in hosts_by_value.items()]
    return f"  {name}: {'; '.join(groups)}"


def _same_rows(answers: Answers) -> list[str]:
    """Hosts that hold the same shards must feed the same rows, and others must not.

    The answer's field "local rows" is (shards, digest of the first batch), if it has one; "feed
    rows" is the same for feeds. Those of different shards may be alike: feeds come from one source.
    """
    lines = [
        f"  rows: hosts {twin} and {host} hold the same shards and feed different rows;"
        " shard the source by grain_shard.ShardByMesh(mesh, spec)"
        for twin, host in _conflicts(answers, "local rows", same=0, other=1)
    ]
    lines += [
        f"  rows: hosts {twin} and {host} hold different shards and feed the same rows;"
        " shard the source by grain_shard.ShardByMesh(mesh, spec), or pass"
        ' rows="global" if every host reads the whole batch, or makes up the same data'
        for twin, host in _conflicts(answers, "local rows", same=1, other=0)
    ]
    return lines + [
        f"  feeds: hosts {twin} and {host} run the same feeds and get different rows; what"
        " make_feed returns must depend on shard_index and shard_count alone"
        for twin, host in _conflicts(answers, "feed rows", same=0, other=1)
    ]


def _conflicts(answers: Answers, name: str, *, same: int, other: int) -> Iterator[tuple[int, int]]:
    """Pairs of hosts whose field is the same in one place and not in the other."""
    first: dict[str, tuple[int, Any]] = {}
    for host, answer in answers.items():
        if (field := answer.get(name)) is not None:
            twin, of_twin = first.setdefault(str(field[same]), (host, field[other]))
            if of_twin != field[other]:
                yield twin, host


def hosts_text(hosts: Any) -> str:
    """Some hosts in a few words."""
    hosts = list(hosts)
    names = ", ".join(map(str, hosts[:8])) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
    return f"host {names}" if len(hosts) == 1 else f"hosts {names}"
