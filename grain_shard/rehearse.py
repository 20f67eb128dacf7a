"""Rehearse a multi-host JAX program on one (Linux) machine: one process for each host, on CPUs.

A script runs as on a pod: ``jax.distributed.initialize()`` needs no arguments, and collectives
cross the processes. A test calls a function on every host, and has what each of them returned::

    $ python -m grain_shard rehearse --hosts 4 --devices-per-host 2 train.py --steps 20
    [host 2] step 0: loss 4.12
    [host 0] step 0: loss 4.12

    >>> import jax
    >>> from grain_shard import rehearse
    >>> rehearse.run(jax.process_index, hosts=2)
    [0, 1]

When a host fails, the others are ended, and the report is about the one that failed first. However
a rehearsal ends, its hosts and their child processes end with it. There is one exception: SIGKILL
gives it no time to end them. They then go on until they next print.
"""

from grain_shard.tools.rehearse.rehearsal import run, run_script
from grain_shard.tools.rehearse.result import RehearsalError, RehearsalResult

__all__ = ["RehearsalError", "RehearsalResult", "run", "run_script"]
