"""The devices that JAX finds. A program, since JAX may hang if another process holds the TPU."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from grain_shard.tools.libtpu import keep_libtpu_quiet


def devices() -> dict[str, Any]:
    """The devices and hosts as JAX has them without ``jax.distributed.initialize()``."""
    keep_libtpu_quiet()
    import jax

    kinds = Counter(device.device_kind for device in jax.devices())
    memory = [
        (device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()[:1]
    ]
    return {
        "platform": jax.default_backend(),
        "devices": dict(kinds),
        "local_devices": jax.local_device_count(),
        "bytes_per_device": memory[0] if memory else None,
        "hosts": jax.process_count(),
        "host": jax.process_index(),
    }


if __name__ == "__main__":
    print(json.dumps(devices()))
