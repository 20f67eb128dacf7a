"""What hosts say of themselves, compared: the same everywhere, or which host and which field."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    lines += _same_rows(answers) + _same_feeds(answers)
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

    The answer's field "local rows" is (shards, digest of the first batch), if it has one.
    """
    lines, first_of_shards, first_of_digest = [], {}, {}
    for host, answer in answers.items():
        if "local rows" not in answer:
            continue
        shards, digest = str(answer["local rows"][0]), answer["local rows"][1]
        twin, digest_of_twin = first_of_shards.setdefault(shards, (host, digest))
        if digest_of_twin != digest:
            lines.append(
                f"  rows: hosts {twin} and {host} hold the same shards and feed different rows;"
                " shard the source by grain_shard.ShardByMesh(mesh, spec)"
            )
        other, shards_of_other = first_of_digest.setdefault(digest, (host, shards))
        if shards_of_other != shards:
            lines.append(
                f"  rows: hosts {other} and {host} hold different shards and feed the same rows;"
                " shard the source by grain_shard.ShardByMesh(mesh, spec), or pass"
                ' rows="global" if every host reads the whole batch, or makes up the same data'
            )
    return lines


def _same_feeds(answers: Answers) -> list[str]:
    """Hosts that hold the same shards run the same feeds, and must get the same rows of them.

    The answer's field "feed rows" is (shards, digest of the first batch), if it has one.
    """
    lines, first_of_shards = [], {}
    for host, answer in answers.items():
        if "feed rows" not in answer:
            continue
        shards, digest_here = str(answer["feed rows"][0]), answer["feed rows"][1]
        twin, digest_of_twin = first_of_shards.setdefault(shards, (host, digest_here))
        if digest_of_twin != digest_here:
            lines.append(
                f"  feeds: hosts {twin} and {host} run the same feeds and get different rows; what"
                " make_feed returns must depend on shard_index and shard_count alone"
            )
    return lines


def hosts_text(hosts: Any) -> str:
    """Some hosts in a few words."""
    hosts = list(hosts)
    names = ", ".join(map(str, hosts[:8])) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
    return f"host {names}" if len(hosts) == 1 else f"hosts {names}"
