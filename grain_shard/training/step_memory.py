"""The memory that a compiled step takes on a device, and the largest batch that fits.

XLA's memory analysis gives the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StepMemory:
    """The memory that a compiled training step takes on one device, by its use.

    Attributes:
        argument_bytes: Bytes of the arguments: state and batch.
        output_bytes: Bytes of the results.
        alias_bytes: Bytes of the results that are written over donated arguments, and so need no
            memory of their own.
        temp_bytes: Bytes of intermediate values.
        code_bytes: Bytes of the program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """The maximum number of bytes that one device holds while the step runs.

        Results that are written over donated arguments count once.
        """
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes + self.code_bytes


def lower(step: Callable[..., Any], *args: Any) -> Any:
    """Returns the step lowered (traced, not compiled) for the shapes and dtypes of `args`.

    Args:
        step: A function, or the result of `jax.jit` or `nnx.jit`. A plain function is jitted first.
        *args: The arguments of the step, as arrays or `jax.ShapeDtypeStruct`.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    return jitted.lower(*args)


def step_memory(lowered: Any) -> StepMemory:
    """Compiles the result of `lower`, and returns the memory that the program takes on a device.

    The program is not run, and no device memory is allocated.

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
    """Returns the largest batch size with which ``step(*args, make_batch(size))`` fits on a device.

    The step is compiled but not run, and no device memory is allocated. XLA gives the memory that
    the compiled step takes on one device: arguments, results, temporaries and code. This memory is
    nearly a straight line over the batch size: a fixed part, and a part per example. So the step is
    compiled for two batch sizes, and the line through both gives the size at the limit.

    For small batches, tile padding and on-chip scratch hide the slope of the line. So the size is
    multiplied by four until the step takes a quarter of the limit. Memory grows at most in
    proportion to the batch, so the last size tried still fits. A larger batch than the result may
    fit, too: close to the limit XLA may recompute activations, which makes the step slower.

    Args:
        step: The training step, e.g. ``step(state, batch)``. A jitted step (`jax.jit`, `nnx.jit`)
            is used unchanged, with its donated arguments.
        make_batch: A function that takes a batch size and returns the step's last argument, best as
            `jax.ShapeDtypeStruct`s, which take no memory. With sharded leaves the batch size is the
            global one.
        *args: The step's other arguments, as arrays or `jax.ShapeDtypeStruct`.
        memory_limit_bytes: Bytes that one device can hold. None asks the first local device.
            Batches that wait in a prefetch buffer are not part of the step: subtract their bytes.
        multiple_of: A number that divides the result, which is also the smallest size tried. With
            a sharded batch it must be a multiple of the number of shards.

    Returns:
        The global batch size in examples.

    Raises:
        ValueError: No limit is given, and the device does not report its memory. Or the smallest
            batch does not fit. Or `make_batch` ignores the batch size, or the step ignores the
            batch.
        NotImplementedError: The backend's compiler does not account for memory.

    Example:
        >>> step = lambda weights, batch: jax.nn.relu(batch @ weights) @ weights
        >>> estimate_max_batch_size(
        ...     step,
        ...     lambda batch_size: jax.ShapeDtypeStruct((batch_size, 1024), "float32"),
        ...     jax.ShapeDtypeStruct((1024, 1024), "float32"),
        ...     memory_limit_bytes=2**30,
        ... )
        87040
    """
    limit = memory_limit_bytes
    device = jax.local_devices()[0]
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
    # Afterwards `small` and `large` are the last two sizes tried, through which the line goes.
    # No batch with more elements than all devices have bytes can fit. If the step still seems to
    # fit, it does not use the batch, so the search must end here.
    while large_bytes < limit / 4 and _num_elements(make_batch(large)) < limit * jax.device_count():
        small, small_bytes = large, large_bytes
        large *= 4
        large_bytes = held_bytes(large)
    if large_bytes == small_bytes:
        raise ValueError(
            f"The step takes {large_bytes:,} bytes for a batch of {small} rows, and as many for"
            f" {large} rows: the step does not use the batch. Pass a step that uses the batch that"
            " make_batch returns."
        )
    bytes_per_example = (large_bytes - small_bytes) / (large - small)
    batch_size = small + (limit - small_bytes) / bytes_per_example
    return multiple_of * math.floor(batch_size / multiple_of)


def _num_elements(batch: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(batch))
