"""The runtime planner (paper section 3.2, equations 1-8, Algorithm 1): numbers in, plan out, NumPy only.

`docs/planner.md` tells how it decides. Nothing here imports JAX, reads a clock or keeps state between calls.
"""

from pwjax.planner.policy import Policy, default_policy
from pwjax.planner.types import Calibration, Move, Observation, Plan, TableView

__all__ = ["Calibration", "Move", "Observation", "Plan", "Policy", "TableView", "default_policy"]
