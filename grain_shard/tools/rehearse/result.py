"""The result of a rehearsal, in figures and in words."""

from __future__ import annotations

import dataclasses
import signal

from grain_shard.errors import GrainShardError

_TAIL_LINES = 40
_STACK = "Stack (most recent call first)"  # how Python begins it


@dataclasses.dataclass(frozen=True)
class RehearsalResult:
    """The result of a rehearsal; lists have an entry a host.

    Attributes:
        returncodes: As in `subprocess.Popen.returncode`: -9 if signal 9 killed the host.
        outputs: What each host wrote to stdout and stderr.
        failed_host: The host that failed first, if any did.
        timed_out_hosts: The hosts that still ran when the time was over.
        not_joined: True if several hosts used JAX, each as if it were the only one, since they had
            not called ``jax.distributed.initialize()``: all of them, which ran to their ends, or
            the one that failed first.
    """

    returncodes: list[int]
    outputs: list[str]
    failed_host: int | None
    timed_out_hosts: list[int]
    not_joined: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the first host to fail (128 + n if signal n killed it), or 0.

        It is 124 at a timeout, and 1 if the hosts did not join.
        """
        if self.failed_host is not None:
            code = self.returncodes[self.failed_host]
            return code if code >= 0 else 128 - code
        if self.timed_out_hosts:
            return 124
        return 1 if self.not_joined else 0

    def summary(self) -> str:
        """Names the host that failed, or the hosts that hung, with their last lines."""
        hosts = self.timed_out_hosts if self.failed_host is None else [self.failed_host]
        tails = [
            f"[host {host}] {line}" for host in hosts for line in _last_lines(self.outputs[host])
        ]
        head, remedy = self.verdict()[:1], self.verdict()[1:]
        return "\n".join([*head, *tails, *remedy])

    def verdict(self) -> list[str]:
        """The lines of `summary` without the hosts' own lines, for a reader who has seen those."""
        ends = []
        if self.failed_host is not None:
            end = f"host {self.failed_host} failed first, with exit code {self.exit_code}"
            if (code := self.returncodes[self.failed_host]) < 0:
                end += f" (signal {-code}: {signal.strsignal(-code)})"
            ends.append(end)
        elif self.timed_out_hosts:
            hosts = ", ".join(f"host {host}" for host in self.timed_out_hosts)
            said = all(_STACK in self.outputs[host] for host in self.timed_out_hosts)
            where = ". The last lines of each host show where it stood" if said else ""
            ends.append(f"timed out, still running: {hosts}{where}")
        if self.not_joined:
            if self.failed_host is None:
                end = (
                    f"each of the {len(self.returncodes)} processes ran the whole job by itself,"
                    " because no process called jax.distributed.initialize()."
                )
            else:
                end = (
                    f"host {self.failed_host} had not called jax.distributed.initialize(). Without"
                    " that call each process runs the whole job by itself, and the processes may"
                    " disturb each other, for example in a folder that all of them write to."
                )
            ends.append(
                f"{end} Remedy: call jax.distributed.initialize(), without arguments, at the top of"
                " the script, before any other use of JAX."
            )
        return ends


def _last_lines(output: str) -> list[str]:
    """The last lines, or the stack at their end from its top on, which is where the host stood."""
    lines = output.splitlines()
    first = max(0, len(lines) - _TAIL_LINES)
    stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
    if stacks:
        first = min(first, stacks[-1])
    return lines[first:][:_TAIL_LINES]


class RehearsalError(GrainShardError, RuntimeError):
    """A host failed, or the time was over: `result` has the codes and the outputs."""

    def __init__(self, result: RehearsalResult):
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return self.result.summary()
