"""How fast batches come, and what a training loop waits for.

`measure_throughput` gives averages and examples per second; `profile` tells when each stage was at
work, which one holds the loop up, and what to change.
"""

from grain_shard.measuring.throughput import Throughput, measure_throughput
from grain_shard.measuring.timeline import Timeline, profile

__all__ = ["Throughput", "Timeline", "measure_throughput", "profile"]
