"""Which chip a device is, and the batch sizes for it."""

from types import SimpleNamespace

import jax
import pytest

from grain_shard.training import (
    HardwareType,
    detect_hardware,
    get_batch_size_recommendation,
    roofline_batch_size,
    validate_batch_size,
)

DEVICE_KINDS = [
    ("cpu", HardwareType.CPU, ["cpu"]),
    ("tpu", HardwareType.TPU_V4, ["TPU v4"]),
    ("tpu", HardwareType.TPU_V5E, ["TPU v5 lite", "TPU v5e"]),
    ("tpu", HardwareType.TPU_V5P, ["TPU v5", "TPU v5p"]),
    ("tpu", HardwareType.TPU_V6E, ["TPU v6 lite", "TPU v6e"]),
    ("tpu", HardwareType.TPU7X, ["TPU7x"]),
    ("gpu", HardwareType.V100, ["Tesla V100-SXM2-16GB"]),
    ("gpu", HardwareType.A100, ["NVIDIA A100-SXM4-80GB", "A100-SXM4-40GB"]),
    ("gpu", HardwareType.A100, ["NVIDIA A100-SXM4-80GB MIG 1g.10gb"]),
    ("gpu", HardwareType.H100, ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"]),
    ("gpu", HardwareType.H200, ["NVIDIA H200"]),
    ("gpu", HardwareType.B200, ["NVIDIA B200"]),
    ("gpu", HardwareType.GB200, ["NVIDIA GB200"]),
    ("gpu", HardwareType.L4, ["NVIDIA L4"]),
    ("gpu", HardwareType.MI300X, ["AMD Instinct MI300X", "AMD Instinct MI300X VF"]),
    ("tpu", HardwareType.UNKNOWN, ["TPU v2", "TPU v3", "TPU v4 lite", "TPU8i"]),
    ("gpu", HardwareType.UNKNOWN, ["NVIDIA L40S", "NVIDIA L40", "NVIDIA A10G", "NVIDIA H20"]),
    ("gpu", HardwareType.UNKNOWN, ["NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA B300 SXM6 AC"]),
    ("gpu", HardwareType.UNKNOWN, ["NVIDIA GeForce RTX 4090", "AMD Instinct MI300A", "gfx942"]),
    ("neuron", HardwareType.UNKNOWN, ["trn2"]),
]


@pytest.mark.parametrize(
    ("platform", "device_kind", "expected"),
    [(platform, kind, chip) for platform, chip, kinds in DEVICE_KINDS for kind in kinds],
)
def test_detects_real_device_kinds(platform, device_kind, expected):
    device = SimpleNamespace(platform=platform, device_kind=device_kind)
    assert detect_hardware(device) is expected


def test_detects_this_machine():
    assert detect_hardware() is detect_hardware(jax.local_devices()[0]) is HardwareType.CPU


CHIPS = [
    # The least, optimal and critical batch size; and the roofline, which peak rates give.
    (HardwareType.TPU_V5E, 64, 256, 240, 241),
    (HardwareType.TPU_V5P, 128, 512, 480, 166),
    (HardwareType.TPU_V4, 64, 256, 192, 229),
    (HardwareType.H100, 64, 320, 298, 295),
    (HardwareType.A100, 32, 256, 240, 153),
    (HardwareType.V100, 16, 128, 96, 139),
    (HardwareType.CPU, 1, 32, 16, None),
    (HardwareType.UNKNOWN, 32, 128, 64, None),
    # From here on the sizes are computed from peak rates.
    (HardwareType.TPU_V6E, 144, 576, 560, 560),
    (HardwareType.TPU7X, 80, 320, 313, 313),
    (HardwareType.H200, 56, 256, 206, 206),
    (HardwareType.B200, 72, 320, 281, 281),
    (HardwareType.GB200, 80, 320, 312, 312),
    (HardwareType.L4, 104, 448, 403, 403),
    (HardwareType.MI300X, 64, 256, 247, 247),
]


@pytest.mark.parametrize(("hardware_type", "least", "optimal", "critical", "roofline"), CHIPS)
def test_batch_sizes_of_a_chip(hardware_type, least, optimal, critical, roofline):
    sizes = get_batch_size_recommendation(hardware_type)
    assert (sizes.min_batch_size, sizes.optimal_batch_size) == (least, optimal)
    assert sizes.critical_batch_size == critical
    assert sizes.max_memory_batch_size is None
    assert sizes.notes.startswith("Tokens or examples per chip")
    if roofline is not None:
        spec = hardware_type.spec
        assert roofline_batch_size(spec.flops_per_second, spec.bytes_per_second) == roofline
        assert spec.source


def test_every_chip_is_in_the_table():
    assert {hardware_type for hardware_type, *_ in CHIPS} == set(HardwareType)


def test_int8_weights_are_read_in_half_the_time():
    assert roofline_batch_size(197e12, 819e9, bytes_per_weight=1) == 120


@pytest.mark.parametrize(
    ("batch_size", "warn_suboptimal", "valid", "says"),
    [
        (63, True, False, "Batch size 63 is below minimum recommended 64 for h100"),
        (63, False, False, "Batch size 63 is below minimum recommended 64 for h100"),
        (64, True, True, "Batch size 64 is below critical size 298 for h100"),
        (64, False, True, "Batch size 64 is acceptable for h100"),
        (297, True, True, "Batch size 297 is below critical size 298 for h100"),
        (298, True, True, "Batch size 298 is acceptable for h100"),
        (319, True, True, "Batch size 319 is acceptable for h100"),
        (320, True, True, "Batch size 320 is optimal for h100"),
        (10_000, False, True, "Batch size 10000 is optimal for h100"),
    ],
)
def test_validate_batch_size(batch_size, warn_suboptimal, valid, says):
    is_valid, message = validate_batch_size(batch_size, HardwareType.H100, warn_suboptimal)
    assert is_valid is valid
    assert message.startswith(says)


def test_seed_000_the_chip_of_this_machine_is_asked_about():
    assert get_batch_size_recommendation() == get_batch_size_recommendation(HardwareType.CPU)
    is_valid, message = validate_batch_size(64)
    assert (is_valid, message) == (True, "Batch size 64 is optimal for cpu.")
    assert validate_batch_size(64, warn_suboptimal=False) == (is_valid, message)
