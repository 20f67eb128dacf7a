"""`RehearsalResult`: the outputs and return codes of the hosts, and a summary in words."""

from __future__ import annotations

import dataclasses
import signal

from grain_shard.errors import GrainShardError

_TAIL_LINES = 40
_STACK = "Stack (most recent call first)"  # the first line of a stack that faulthandler prints


@dataclasses.dataclass(frozen=True)
class RehearsalResult:
    """The result of a rehearsal: the outputs and return codes of the hosts.

    Attributes:
        returncodes: The return code of each host, as in `subprocess.Popen.returncode`: -9 if
            signal 9 killed the host.
        outputs: The text that each host wrote to stdout and stderr.
        failed_host: Index of the host that failed first; None if no host failed.
        timed_out_hosts: Indices of the hosts that still ran at the timeout.
        not_joined: True if hosts used JAX without ``jax.distributed.initialize()``, so that each of
            them ran alone: all hosts if none failed, else at least the host that failed first.
        places: The batch that the loop of each host got last, in words. A host that did not iterate
            over a dataset of `shard_to` is left out.
    """

    returncodes: list[int]
    outputs: list[str]
    failed_host: int | None
    timed_out_hosts: list[int]
    not_joined: bool = False
    places: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit code of the first host to fail; 128 + n if signal n killed the host.

        If no host failed, it is 124 after a timeout, 1 if the hosts did not join, and else 0.
        """
        if self.failed_host is not None:
            code = self.returncodes[self.failed_host]
            return code if code >= 0 else 128 - code
        if self.timed_out_hosts:
            return 124
        return 1 if self.not_joined else 0

    def summary(self) -> str:
        """Returns a text that names the host that failed, or the hosts that timed out.

        It includes the last lines of these hosts.
        """
        hosts = self.timed_out_hosts if self.failed_host is None else [self.failed_host]
        tails = [
            f"[host {host}] {line}" for host in hosts for line in _last_lines(self.outputs[host])
        ]
        head, remedy = self.verdict()[:1], self.verdict()[1:]
        return "\n".join([*head, *tails, *remedy])

    def verdict(self) -> list[str]:
        """Returns the lines of `summary` without the hosts' own lines, which `echo` shows."""
        lines = []
        if self.failed_host is not None:
            failed = f"host {self.failed_host} failed first, with exit code {self.exit_code}"
            if (code := self.returncodes[self.failed_host]) < 0:
                failed += f" (signal {-code}: {signal.strsignal(-code)})"
            lines.append(failed)
        elif self.timed_out_hosts:
            hosts = ", ".join(f"host {host}" for host in self.timed_out_hosts)
            have_stacks = all(_STACK in self.outputs[host] for host in self.timed_out_hosts)
            where = ". The last lines of each host show where it stood" if have_stacks else ""
            lines.append(f"timed out, still running: {hosts}{where}")
        lines += [f"host {host} {place}" for host, place in self.places.items()]
        if self.not_joined:
            who = "each host" if self.failed_host is None else f"host {self.failed_host}"
            lines.append(
                f"{who} ran alone: its call of jax.distributed.initialize() is missing, failed, or"
                " comes after another use of JAX. Processes that have not joined the others run the"
                " whole job, and may disturb each other, for example in a folder that all of them"
                " write to. Remedy: call jax.distributed.initialize(), without arguments, before"
                " any other use of JAX."
            )
        return lines


def _last_lines(output: str) -> list[str]:
    """Returns 40 lines of a host's output: its end, or the top of its last stack if that is longer.

    The top of the stack names the place where the host was.
    """
    lines = output.splitlines()
    first = max(0, len(lines) - _TAIL_LINES)
    stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
    if stacks:
        first = min(first, stacks[-1])
    return lines[first:][:_TAIL_LINES]


class RehearsalError(GrainShardError, RuntimeError):
    """A host failed, or the hosts timed out. `result` has their return codes and outputs."""

    def __init__(self, result: RehearsalResult):
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return self.result.summary()
