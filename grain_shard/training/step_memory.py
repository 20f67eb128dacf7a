"""The memory of a compiled step on one device, as XLA's compiler accounts for it."""

from __future__ import annotations

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
    return StepMemory(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )
