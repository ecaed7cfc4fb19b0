"""The memory budget: what the fixed parts take, and how many slots the arena gets.

    budget = dense weights (and, for method bf16, experts) + tables + staging + workspace + arena

Workspace is the most temporary memory and outputs that any compiled step needs, by XLA's own analysis of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pwjax.errors import UserError

CPU_DEFAULT_LIMIT_BYTES = 4 * 2**30
GPU_DEFAULT_SHARE = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """Bytes that do not change while serving."""

    dense_bytes: int
    tables_bytes: int
    staging_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.tables_bytes + self.staging_bytes + self.workspace_bytes

    def __str__(self) -> str:
        return (
            f"dense {self.dense_bytes} + tables {self.tables_bytes} + staging {self.staging_bytes} + "
            f"workspace {self.workspace_bytes}"
        )


def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Temporaries, outputs that alias no input, and small inputs of one compiled step."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not report the memory of compiled programs"
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def round_slots(num_slots: int) -> int:
    """Rounds down to 8 significant bits (0.8% at most), so that near budgets share compiled programs in the cache."""
    grain = 1 << max(0, num_slots.bit_length() - 8)
    return num_slots // grain * grain


def round_up_slots(num_slots: int) -> int:
    """The least number of slots of at least `num_slots` that `round_slots` keeps."""
    while round_slots(num_slots) < num_slots:
        num_slots += 1
    return num_slots


def arena_slots(budget_bytes: int, fixed: FixedMemory | None, slot_bytes: int, least_slots: int) -> int:
    """Slots of the arena under a budget; with `fixed` None, the budget is the arena's own (`--arena`).

    Raises:
        UserError: fewer than `least_slots` fit; the message has the budget, the least that would do, and the parts.
    """
    fixed_bytes = fixed.total_bytes if fixed else 0
    slots = round_slots(max((budget_bytes - fixed_bytes) // slot_bytes, 0))
    if slots < least_slots:
        # The rounding must not turn the figure that the message names into one that fails again.
        arena_bytes = round_up_slots(least_slots) * slot_bytes
        parts = f" ({fixed} + arena {arena_bytes})" if fixed else ""
        raise UserError(
            f"{'--memory-budget' if fixed else '--arena'} {budget_bytes} is too small: {fixed_bytes + arena_bytes} "
            f"bytes are needed{parts}; raise it, or lower --max-model-len, --max-num-seqs, the watermarks, or the bits "
            "of the method"
        )
    return slots


def device_free_bytes(device: Any) -> int | None:
    """Bytes that JAX may still allocate on the device; None where it does not say (CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_device_admits(budget_bytes: int, device: Any) -> None:
    """Raises UserError if JAX's own limit on this device is below the budget."""
    free = device_free_bytes(device)
    if free is not None and free < budget_bytes:
        raise UserError(
            f"memory budget {budget_bytes}: JAX may allocate only {free} more bytes on {device.device_kind}; set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION higher before JAX starts, or lower the budget"
        )


def measured_peak_bytes(device: Any) -> int | None:
    """Most bytes that JAX has had in use on the device since the process started; None on a CPU."""
    stats = device.memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None
