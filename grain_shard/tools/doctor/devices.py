"""The devices that JAX finds. A program, since JAX may hang if another process holds the TPU."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from grain_shard.tools.libtpu import keep_libtpu_quiet


def devices() -> dict[str, Any]:
    """Returns the devices and hosts as JAX has them without ``jax.distributed.initialize()``."""
    keep_libtpu_quiet()
    import jax

    kinds = Counter(device.device_kind for device in jax.devices())
    first = next(iter(jax.local_devices()), None)
    return {
        "platform": jax.default_backend(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "on_this_host": jax.local_device_count(),
        "device_bytes": ((first and first.memory_stats()) or {}).get("bytes_limit"),
        "hosts": jax.process_count(),
        "this_host": jax.process_index(),
    }


if __name__ == "__main__":
    print(json.dumps(devices()))
