"""The memory of a compiled step on one device, by XLA's own account; the batch that fits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StepMemory:
    """The parts of a step's memory, in bytes on one device.

    Attributes:
        argument_bytes: State and batch.
        output_bytes: The results.
        alias_bytes: The part of the results that is written over donated arguments, and so needs
            no memory of its own.
        temp_bytes: Intermediate values.
        code_bytes: The program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes that one device holds at most while the step runs."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes + self.code_bytes


def lower(step: Callable[..., Any], *args: Any) -> Any:
    """The step, traced for arguments like these; jitted first if it is not yet.

    Args:
        step: A function, or what `jax.jit` or `nnx.jit` made of one.
        *args: Its arguments, as arrays or `jax.ShapeDtypeStruct`.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    return jitted.lower(*args)


def step_memory(lowered: Any) -> StepMemory:
    """Compiles the result of `lower`, and returns its memory. Nothing is run or allocated.

    Raises:
        NotImplementedError: The backend's compiler does not account for memory.
    """
    memory = lowered.compile().memory_analysis()
    if memory is None:
        raise NotImplementedError("XLA gives no memory analysis for this backend.")
    parts = ("argument", "output", "alias", "temp", "generated_code")
    return StepMemory(*(getattr(memory, f"{part}_size_in_bytes") for part in parts))


def estimate_max_batch_size(
    step: Callable[..., Any],
    make_batch: Callable[[int], Any],
    *args: Any,
    memory_limit_bytes: int | None = None,
    multiple_of: int = 8,
) -> int:
    """The largest batch with which ``step(*args, make_batch(batch_size))`` fits on a device.

    The step is compiled, never run, and nothing is allocated for it. XLA says how much the
    compiled step holds on one device: arguments, results, temporaries and code. That is close to a
    fixed part plus a part per example, so two sizes determine the line and the limit picks the
    batch.

    Small batches hide the slope behind tile padding and on-chip scratch. So the size grows by
    four until the step holds a quarter of the limit. Memory grows at most in proportion to the
    batch, so the last size tried still fits. The result is what fits as the step is written:
    close to the limit XLA may recompute activations and make room for more, in a slower step.

    Args:
        step: The training step, e.g. ``step(state, batch)``. One that is compiled already
            (`jax.jit`, `nnx.jit`) is used as it is, with its donated arguments.
        make_batch: Makes the step's last argument for a batch size. Best made of
            `jax.ShapeDtypeStruct`, which takes no memory. With sharded leaves the batch size is
            the global one, and the memory is one device's memory.
        *args: The step's other arguments; arrays or `jax.ShapeDtypeStruct`.
        memory_limit_bytes: What one device can hold. None asks the first local device. Batches
            that wait in a prefetch buffer are not part of the step: subtract their bytes.
        multiple_of: The result is a multiple of this, which is also the smallest size tried. With
            a sharded batch it must be a multiple of the number of shards.

    Returns:
        The global batch size in examples.

    Raises:
        ValueError: The device does not tell its limit and none is given; the smallest batch does
            not fit; `make_batch` ignores its argument, or the step its batch.
        NotImplementedError: The backend's compiler does not account for memory.

    Example:
        >>> step = lambda weights, batch: (batch @ weights).sum()
        >>> estimate_max_batch_size(
        ...     step,
        ...     lambda batch_size: jax.ShapeDtypeStruct((batch_size, 1024), "float32"),
        ...     jax.ShapeDtypeStruct((1024, 1024), "float32"),
        ...     memory_limit_bytes=2**30,
        ... )
        261112
    """
    limit, device = memory_limit_bytes, jax.local_devices()[0]
    if limit is None:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(
            f"A device of kind {device.device_kind!r} does not report its memory size: "
            "pass memory_limit_bytes=, e.g. 16 * 2**30."
        )

    def held_bytes(batch_size: int) -> int:
        return step_memory(lower(step, *args, make_batch(batch_size))).total_bytes

    small, large = multiple_of, 2 * multiple_of
    if _num_elements(make_batch(small)) == _num_elements(make_batch(large)):
        raise ValueError(
            f"make_batch({small}) and make_batch({large}) return batches of the same size: let"
            " make_batch(n) return n rows."
        )
    small_bytes, large_bytes = held_bytes(small), held_bytes(large)
    if small_bytes > limit:
        raise ValueError(
            f"With a batch of {small} rows the step takes {small_bytes:,} bytes on a device, which"
            f" has {limit:,} bytes: "
            "use a smaller multiple_of, shard the state, or rematerialize activations."
        )
    # A batch with more elements than all devices have bytes cannot be held. If the step still fits,
    # it does not use the batch, and the search ends.
    while large_bytes < limit / 4 and _num_elements(make_batch(large)) < limit * jax.device_count():
        small, small_bytes = large, large_bytes
        large *= 4
        large_bytes = held_bytes(large)
    if large_bytes == small_bytes:
        raise ValueError(
            f"The step takes {large_bytes:,} bytes for a batch of {small} rows and also of {large}:"
            " the step does not use the batch."
        )
    bytes_per_example = (large_bytes - small_bytes) / (large - small)
    batch_size = small + (limit - small_bytes) / bytes_per_example
    return multiple_of * math.floor(batch_size / multiple_of)


def _num_elements(batch: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(batch))
