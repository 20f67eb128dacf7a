"""The speed of batches, and the stage that a training loop waits for.

`profile` measures a loop: examples per second, when each stage was at work, which one holds the
loop up, and what to change. `measure_throughput` is the same under the name that peers use.

`ShardedIterator.stats` returns `Stats` at any time: the `Figures` of the run since the beginning
and of late, the reads that failed, and the `SlowestHost`.
"""

from grain_shard.hosts.slowest import SlowestHost
from grain_shard.stats.figures import Figures, Stats
from grain_shard.tools.measuring.profiling import Profile, measure_throughput, profile

__all__ = ["Figures", "Profile", "SlowestHost", "Stats", "measure_throughput", "profile"]
