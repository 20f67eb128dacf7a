"""Measures the speed of batches, and finds the stage that a training loop waits for.

`profile` measures a loop: the records per second, the times at which each stage worked, the stage
that delays the loop, and the change that would help.

`ShardedIterator.stats` returns `Stats` at any time: the `Figures` of the whole run and of the last
minute, and the counts of failed reads.
"""

from grain_shard.stats.figures import Figures, Stats
from grain_shard.tools.measuring.profiling import Profile, profile

__all__ = ["Figures", "Profile", "Stats", "profile"]
