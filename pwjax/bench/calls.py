"""Kernel calls as the benchmarks time them: checked first, several in one function, each on data of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pwjax.bench.timing import copy_bytes_per_second, matmul_flops_per_second, median_seconds, on_gpu

L2_BYTES = 60 * 10**6  # H200; a multiple of it is harmless elsewhere
DISTINCT_L2 = 4  # bytes that are read before any is read again, in caches
MAX_CALLS = 64  # more take long to compile
INTEGER_INSTRUCTIONS_PER_SECOND = 16.7e12  # of an H200: 64 lanes a clock an SM
TOLERANCE = 2**-8  # largest error over the largest value, with bfloat16 activations


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device can do: measured rates, and integer instructions a decoded weight."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    instructions_per_weight: float = 0.0

    @classmethod
    def measure(cls, instructions_per_weight: float = 0.0) -> Ceilings:
        return cls(copy_bytes_per_second(), matmul_flops_per_second(), instructions_per_weight)


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must do."""

    bytes: float
    flops: float
    decoded_weights: float = 0.0

    def floors(self, ceilings: Ceilings) -> dict[str, float | None]:
        """Microseconds that the call takes at least, by what binds."""
        instructions = self.decoded_weights * ceilings.instructions_per_weight
        return {
            "bytes_floor_us": 1e6 * self.bytes / ceilings.copy_bytes_per_second,
            "flop_floor_us": 1e6 * self.flops / ceilings.matmul_flops_per_second,
            "instruction_floor_us": 1e6 * instructions / INTEGER_INSTRUCTIONS_PER_SECOND if on_gpu() else None,
        }


def distinct_calls(bytes_a_call: float, *, least: int) -> int:
    """Calls on pages of their own that one timed function holds, so that caches are of no use."""
    most = MAX_CALLS if on_gpu() else least  # elsewhere nobody asks how fast it is
    return min(max(least, math.ceil(DISTINCT_L2 * L2_BYTES / bytes_a_call)), most)


@dataclasses.dataclass(frozen=True)
class Result:
    """Seconds of a call, None where its result was wrong; the largest error over the largest value; calls that were
    timed together, each on data of its own."""

    seconds: float | None
    error: float
    calls: int


def check_and_time(
    op: Callable[..., jax.Array], calls: Sequence[tuple[jax.Array, ...]], arena: jax.Array, expected: jax.Array
) -> Result:
    """Checks the first call's result, then times all calls in one jitted function.

    Args:
        op: called with the operands of a call and the arena.
        expected: float32, of the first call.
    """
    run = jax.jit(lambda calls, arena: [op(*operands, arena) for operands in calls])
    # What the kernel leaves unwritten is likely to show: freed memory that it may get is not a number.
    jax.block_until_ready([jnp.full(expected.shape, jnp.nan, jnp.float32) for _ in calls])
    got = run(calls, arena)[0].astype(jnp.float32)
    error = float(jnp.max(jnp.abs(got - expected)) / jnp.max(jnp.abs(expected)))
    if not error <= TOLERANCE:  # not a number is wrong too
        return Result(None, error, len(calls))
    seconds = median_seconds(lambda: run(calls, arena), calls=10 if on_gpu() else 1)
    return Result(seconds / len(calls), error, len(calls))


def figures(result: Result, work: Work, ceilings: Ceilings) -> dict[str, Any]:
    """Time, rate and shares of the floors; None where the result was wrong, and what was wrong as `failure`."""
    least = work.floors(ceilings)
    binding = max(least["bytes_floor_us"] or 0.0, least["flop_floor_us"] or 0.0)
    share = lambda floor: None if result.seconds is None or not floor else floor / (1e6 * result.seconds)  # noqa: E731
    return {
        "microseconds": None if result.seconds is None else 1e6 * result.seconds,
        "gigabytes_per_second": None if result.seconds is None else work.bytes / result.seconds / 1e9,
        "floor_share": share(binding),
        "instruction_floor_share": share(least["instruction_floor_us"]),
        **least,
        "distinct_bytes": result.calls * work.bytes,
        "error": result.error,
        "failure": None if result.seconds is not None else f"error of {result.error:.2g} over the largest value",
    }
