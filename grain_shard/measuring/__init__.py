"""How fast batches come, and what a training loop waits for.

`profile` measures a loop: examples per second, when each stage was at work, which one holds the
loop up, and what to change. `measure_throughput` is the same under the name that peers use.
"""

from grain_shard.measuring.profiling import Profile, measure_throughput, profile

__all__ = ["Profile", "measure_throughput", "profile"]
