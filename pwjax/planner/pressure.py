"""KV-cache pressure as a number of slots (equation 7), and the hysteresis between offload and reload.

Everything is in slots of the one arena, where the paper has bytes: a slot is the smallest amount that can change hands.
"""

from __future__ import annotations

from pwjax.planner.types import Observation


def free_blocks(observation: Observation) -> int:
    """F_blk: whole KV blocks that the free slots hold, after moves in flight and the next step's needs.

    Negative when the next step's needs don't fit, so that equation 7 asks for them too.
    """
    return observation.free_slots // observation.block_slots


def target_slots(observation: Observation) -> int:
    """D = max(0, T_blk + 1 - F_blk) * B_KV (equation 7), in slots. T_blk is the low watermark."""
    missing = observation.low_watermark_blocks + 1 - free_blocks(observation)
    return max(0, missing) * observation.block_slots


def pressure_triggered(observation: Observation) -> bool:
    """Algorithm 1, line 10: a plan is carried out when D > 0."""
    return target_slots(observation) > 0


def prepare_slots(observation: Observation) -> int:
    """What queued plans are prepared for: D and the KV growth of the next 32 steps.

    With D alone the queue would be empty until the boundary that needs it.
    """
    return target_slots(observation) + max(0, observation.growth_slots)


def reload_slots(observation: Observation) -> int:
    """Slots that a reload may take: 0 unless more than `high_watermark` blocks are free.

    After the reload and the growth of the next 32 steps, `high_watermark` blocks are still free; and one block more
    than the offload trigger, which matters only where both watermarks are equal (0 with `--reserve-kv`).
    """
    if free_blocks(observation) <= observation.high_watermark_blocks:
        return 0
    kept_blocks = max(observation.high_watermark_blocks, observation.low_watermark_blocks + 1)
    kept = kept_blocks * observation.block_slots + max(0, observation.growth_slots)
    return max(0, observation.free_slots - kept)
