"""Finds the kind of a chip, and the batch sizes that keep the chip busy.

In this module a batch size counts **tokens per chip** for a model that applies its weights to every
token, and **examples per chip** for a model that applies its weights once per example. Under data
parallelism that is one device's share of the global batch.

A matrix multiplication reads its weights from memory once per training step, for any number of
tokens or examples. Below the critical batch size the chip waits for the weights. Above it, the
arithmetic takes longer than the reading. See `roofline_batch_size`.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChipSpec:
    """The two peak rates of a chip that determine its critical batch size.

    Attributes:
        flops_per_second: Dense bf16 matrix rate in FLOP/s, without structured sparsity.
        bytes_per_second: Bandwidth of the chip's main memory in bytes/s.
        source: The publication that gives both rates.
        sizes_of_datarax: The minimum, optimal and critical batch size that the library datarax has
            for the chip; None if it has none. They are kept so that its users get the same sizes.
    """

    flops_per_second: float
    bytes_per_second: float
    source: str
    sizes_of_datarax: tuple[int, int, int] | None = None


class HardwareType(enum.StrEnum):
    """A kind of chip for which this module has batch sizes. Any other chip is `UNKNOWN`.

    Attributes:
        spec: The peak rates of the chip; None for `CPU` and `UNKNOWN`.

    Example:
        >>> HardwareType("tpu_v5e")
        <HardwareType.TPU_V5E: 'tpu_v5e'>
        >>> print(HardwareType.H100, HardwareType.H100 == "h100")
        h100 True
    """

    spec: ChipSpec | None

    def __new__(cls, name: str, spec: ChipSpec | None = None) -> HardwareType:
        chip = str.__new__(cls, name)
        chip._value_, chip.spec = name, spec
        return chip

    TPU_V5E = "tpu_v5e", ChipSpec(197e12, 819e9, "cloud.google.com/tpu/docs/v5e", (64, 256, 240))
    # JAX's own table of TPUs has 2460 GB/s for v5p. The critical batch size by the rates would then
    # be 187, and not 166.
    TPU_V5P = "tpu_v5p", ChipSpec(459e12, 2765e9, "cloud.google.com/tpu/docs/v5p", (128, 512, 480))
    TPU_V4 = "tpu_v4", ChipSpec(275e12, 1200e9, "cloud.google.com/tpu/docs/v4", (64, 256, 192))
    TPU_V6E = "tpu_v6e", ChipSpec(918e12, 1638e9, "cloud.google.com/tpu/docs/v6e")
    # JAX shows a TPU7x chip as two devices, one per core. Each device has half of both rates, so
    # the ratio of the rates is the same.
    TPU7X = "tpu7x", ChipSpec(2307e12, 7370e9, "cloud.google.com/tpu/docs/tpu7x")
    H100 = (
        "h100",
        ChipSpec(989e12, 3350e9, "How to Scale Your Model, chapter on GPUs, SXM", (64, 320, 298)),
    )
    H200 = "h200", ChipSpec(989e12, 4800e9, "How to Scale Your Model, chapter on GPUs")
    A100 = "a100", ChipSpec(312e12, 2039e9, "NVIDIA A100 datasheet, 80 GB SXM", (32, 256, 240))
    # A V100 has no bf16 units, so its fp16 rate is used.
    V100 = "v100", ChipSpec(125e12, 900e9, "NVIDIA V100 datasheet, SXM2", (16, 128, 96))
    B200 = "b200", ChipSpec(2250e12, 8000e9, "How to Scale Your Model, chapter on GPUs")
    # One of the GPUs of a GB200 NVL72, which has 72. NVIDIA gives 576 TB/s for all, and 360 PFLOP/s
    # with sparsity, which is twice the dense rate.
    GB200 = "gb200", ChipSpec(2500e12, 8000e9, "NVIDIA GB200 NVL72 product page")
    L4 = "l4", ChipSpec(121e12, 300e9, "NVIDIA L4 figures, half of the rate with sparsity")
    MI300X = "mi300x", ChipSpec(1307e12, 5300e9, "AMD MI300X figures")
    CPU = "cpu"
    UNKNOWN = "unknown"

    def shortfall(self, batch_size: int) -> str | None:
        """Returns why a batch is too small for this chip; None if it is large enough.

        Args:
            batch_size: Tokens or examples per chip. The critical batch size is large enough.

        Example:
            >>> print(HardwareType.CPU.shortfall(8))
            Batch size 8 is below critical size 16 for cpu: a larger batch costs little extra time.
        """
        is_enough = batch_size >= get_batch_size_recommendation(self).critical_batch_size
        return None if is_enough else validate_batch_size(batch_size, self)[1]


@dataclass(frozen=True)
class BatchSizeRecommendation:
    """Recommended batch sizes for one kind of chip, in tokens or examples per chip.

    Attributes:
        min_batch_size: Smallest size that is advised: with a smaller batch the chip is mostly idle.
        optimal_batch_size: Smallest size with the best throughput, somewhat above the critical one.
        critical_batch_size: Smallest size at which matrix multiplications do not wait for their
            weights.
        max_memory_batch_size: Largest size that fits in memory. Always None, because it depends on
            the model; `grain_shard.training.estimate_max_batch_size` finds it for a training step.
        notes: The unit of the sizes, and their source.

    Example:
        >>> sizes = get_batch_size_recommendation(HardwareType.TPU_V6E)
        >>> sizes.min_batch_size, sizes.optimal_batch_size, sizes.critical_batch_size
        (144, 576, 560)
    """

    min_batch_size: int
    optimal_batch_size: int
    critical_batch_size: int
    max_memory_batch_size: int | None = None
    notes: str = ""


def roofline_batch_size(
    flops_per_second: float, bytes_per_second: float, bytes_per_weight: float = 2
) -> int:
    """Returns the batch size at which a matrix multiplication takes as long as reading its weights.

    Multiplying activations ``[B, D]`` with weights ``[D, F]`` costs ``2*B*D*F`` FLOP and, with B
    much smaller than D and F, reads about ``bytes_per_weight*D*F`` bytes. Both take equally long
    at ``B = flops_per_second * bytes_per_weight / (2 * bytes_per_second)``.

    Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter on rooflines.

    Args:
        flops_per_second: Peak rate of the multiplication, in FLOP/s.
        bytes_per_second: Memory bandwidth in bytes/s.
        bytes_per_weight: Size of one weight as it is read: 2 for bf16, 1 for int8.

    Returns:
        B in tokens (or examples) per chip, rounded to the nearest integer.

    Example:
        >>> roofline_batch_size(989e12, 3350e9)  # H100
        295
    """
    return round(flops_per_second * bytes_per_weight / (2 * bytes_per_second))


def detect_hardware(device: Any = None) -> HardwareType:
    """Returns the kind of chip of a JAX device, from its `platform` and `device_kind`.

    Args:
        device: A `jax.Device`. None takes this process's first device, which starts JAX's backend.

    Returns:
        The chip's `HardwareType`; `UNKNOWN` for a chip without batch sizes in this module.

    Example:
        >>> import jax
        >>> detect_hardware(jax.devices("cpu")[0])
        <HardwareType.CPU: 'cpu'>
    """
    if device is None:
        import jax  # Imported only here: an import of this module must be fast.

        device = jax.local_devices()[0]
    if device.platform == "cpu":
        return HardwareType.CPU
    # A TPU's kind must match as a whole: "TPU v4 lite" is not a v4. JAX calls a v5e "TPU v5 lite",
    # and a v5p "TPU v5" or "TPU v5p".
    kind = device.device_kind.lower()
    tpu = "tpu_v5p" if kind == "tpu v5" else kind.replace(" lite", "e").replace("tpu v", "tpu_v")
    # A GPU's kind is a product name ("NVIDIA A100-SXM4-80GB"), of which one word must be the model.
    # So "NVIDIA L40S" is not an L4. AMD's "gfx942" matches no chip, because MI300A, MI300X and
    # MI325X share it.
    names = {tpu, *re.split(r"[\s\-_]+", kind)}
    chips = (chip for chip in HardwareType if chip.spec is not None and chip.value in names)
    return next(chips, HardwareType.UNKNOWN)


def get_batch_size_recommendation(
    hardware_type: HardwareType | None = None,
) -> BatchSizeRecommendation:
    """Returns batch sizes for a chip, from the library datarax or computed from peak rates.

    If they are computed, `roofline_batch_size` gives the critical size. The minimum is a quarter of
    it, rounded up to a multiple of 8, the height of a TPU's smallest tile. At this size a matrix
    multiplication still reaches a quarter of its peak rate. The optimum is the critical size
    rounded up to a multiple of 64, which fills the tiles of a matrix unit. A CPU and an unknown
    chip have fixed sizes.

    Args:
        hardware_type: The chip; None for the chip of this process's first device.

    Example:
        >>> get_batch_size_recommendation(HardwareType.TPU_V5E).optimal_batch_size
        256
    """
    chip = hardware_type or detect_hardware()
    notes = "Tokens or examples per chip."
    if chip is HardwareType.CPU:
        rule = f"{notes} A rule of thumb, because CPUs differ too much."
        return BatchSizeRecommendation(1, 32, 16, notes=rule)
    spec = chip.spec
    if spec is None:
        cautious = f"{notes} Cautious sizes, because the chip is unknown."
        return BatchSizeRecommendation(32, 128, 64, notes=cautious)
    critical = roofline_batch_size(spec.flops_per_second, spec.bytes_per_second)
    notes += (
        f" {spec.flops_per_second / 1e12:g} TFLOP/s over {spec.bytes_per_second / 1e9:g} GB/s"
        f" ({spec.source}): a critical batch of {critical}."
    )
    if spec.sizes_of_datarax is not None:
        return BatchSizeRecommendation(*spec.sizes_of_datarax, notes=f"{notes} As in datarax.")
    minimum = 8 * math.ceil(critical / 4 / 8)
    optimal = 64 * math.ceil(critical / 64)
    return BatchSizeRecommendation(minimum, optimal, critical, notes=notes)


def validate_batch_size(
    batch_size: int, hardware_type: HardwareType | None = None, warn_suboptimal: bool = True
) -> tuple[bool, str]:
    """Compares the batch size of one chip with the sizes recommended for the chip.

    Args:
        batch_size: Tokens or examples on one chip, not in the global batch.
        hardware_type: The chip; None for the chip of this process's first device.
        warn_suboptimal: False to call a valid size below the critical one "acceptable".

    Returns:
        A pair (valid, message). Only a size below the chip's minimum is not valid.

    Example:
        >>> validate_batch_size(64, HardwareType.CPU)
        (True, 'Batch size 64 is optimal for cpu.')
    """
    chip = detect_hardware() if hardware_type is None else hardware_type
    sizes = get_batch_size_recommendation(chip)
    is_valid, rating, why = True, "acceptable", ""
    if batch_size < sizes.min_batch_size:
        is_valid, rating = False, f"below minimum recommended {sizes.min_batch_size}"
        why = ": the chip will mostly wait for memory"
    elif batch_size < sizes.critical_batch_size and warn_suboptimal:
        rating = f"below critical size {sizes.critical_batch_size}"
        why = ": a larger batch costs little extra time"
    elif batch_size >= sizes.optimal_batch_size:
        rating = "optimal"
    return is_valid, f"Batch size {batch_size} is {rating} for {chip.value}{why}."
