"""The runtime planner (paper section 3.2, equations 1-8, Algorithm 1): numbers in, plan out, NumPy only.

`docs/planner.md` tells how it decides. Nothing here imports JAX, reads a clock or keeps state between calls.
"""

from pwjax.planner.ablation import NO_ABLATION, Ablation, indifferent_sensitivity
from pwjax.planner.assignment import (
    assigned_slots,
    capacity_for_mean_bits,
    initial_bits,
    mean_bits,
    random_bits,
    static_bits,
    uniform_bits,
)
from pwjax.planner.planner import decide, plan_step, prepare
from pwjax.planner.policy import Policy, default_policy, fit_multipliers
from pwjax.planner.queue import PlanQueue
from pwjax.planner.types import Calibration, Move, Observation, Plan, TableView, top_bits

__all__ = [
    "NO_ABLATION",
    "Ablation",
    "Calibration",
    "Move",
    "Observation",
    "Plan",
    "PlanQueue",
    "Policy",
    "TableView",
    "assigned_slots",
    "capacity_for_mean_bits",
    "decide",
    "default_policy",
    "fit_multipliers",
    "indifferent_sensitivity",
    "initial_bits",
    "mean_bits",
    "plan_step",
    "prepare",
    "random_bits",
    "static_bits",
    "top_bits",
    "uniform_bits",
]
