"""Runs a multi-host JAX program on one (Linux) machine: one process for each host, on CPUs.

A script runs as on a pod: ``jax.distributed.initialize()`` needs no arguments, and collectives
cross the processes::

    $ python -m grain_shard rehearse --hosts 4 --devices-per-host 2 train.py --steps 20
    [host 2] step 0: loss 4.12
    [host 0] step 0: loss 4.12

A test can call a function on every host, and gets all results in a list::

    >>> import jax
    >>> from grain_shard import rehearse
    >>> rehearse.run(jax.process_index, hosts=2)
    [0, 1]

If a host fails, the other hosts are ended, and the report shows the host that failed first. When
the rehearsal ends, so do its hosts and their child processes. Only SIGKILL leaves no time to end
them: each host then runs until it next prints.
"""

from grain_shard.tools.rehearse.rehearsal import run, run_script
from grain_shard.tools.rehearse.result import RehearsalError, RehearsalResult

__all__ = ["RehearsalError", "RehearsalResult", "run", "run_script"]
