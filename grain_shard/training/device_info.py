"""What there is to compute on, as plain values."""

from __future__ import annotations

from typing import Any

import jax

from grain_shard.hardware import HardwareType


def device_info(hardware_type: HardwareType) -> dict[str, Any]:
    """The devices of all processes, and those of this one; see `DevicePlacement.get_device_info`.

    Args:
        hardware_type: The chip behind this process's devices.
    """
    devices, local_devices = jax.devices(), jax.local_devices()
    return {
        "num_devices": len(devices),
        "hardware_type": hardware_type.value,
        "platforms": sorted({device.platform for device in devices}),
        "device_kinds": sorted({device.device_kind for device in devices}),
        "devices": [
            {"id": d.id, "platform": d.platform, "device_kind": d.device_kind} for d in devices
        ],
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        "local_devices": [device.id for device in local_devices],
        "memory": {device.id: _memory(device) for device in local_devices},
    }


def _memory(device: Any) -> dict[str, int | None] | None:
    stats = device.memory_stats()
    return stats and {name: stats.get(name) for name in ("bytes_in_use", "bytes_limit")}
