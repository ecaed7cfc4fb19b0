"""What a method means for the experts' bits at load, and for the slots that they can't go below."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallas_kernels.bitplane_moe.layout import MIN_BITS
from pwjax import planner
from pwjax.engine.config import Method
from pwjax.paging.page_table import WeightPageTable
from pwjax.planner import Ablation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Assignments of bits for one model and method.

    Attributes:
        sensitivity: float64 `[n, 6]`.
        ablation: without `sensitivity`, serving starts from a table that doesn't tell linear-blocks apart.
        max_bits: highest precision served.
        seed: of `random:<mean>`.
    """

    method: Method
    table: WeightPageTable
    sensitivity: np.ndarray
    max_bits: int
    slot_bytes: int
    seed: int
    ablation: Ablation = planner.NO_ABLATION

    def at_load(self, capacity_slots: int) -> np.ndarray:
        """int8 `[n]`: what the method says, or else the best that fits `capacity_slots`."""
        if self._fixed is not None:
            return self._fixed
        table = self.table
        return planner.initial_bits(
            self.planned_sensitivity,
            table.resident_slots,
            table.weights,
            capacity_slots,
            self.max_bits,
            self.slot_bytes,
        )

    @functools.cached_property
    def planned_sensitivity(self) -> np.ndarray:
        """float64 `[n, 6]`: what the planner goes by. Sizes never depend on it, so ablations get equal memory."""
        if self.ablation.sensitivity:
            return self.sensitivity
        return planner.indifferent_sensitivity(self.sensitivity, self.table.weights)

    @functools.cached_property
    def _fixed(self) -> np.ndarray | None:
        """The assignment of a method that names its bits; None for the others."""
        method, table = self.method, self.table
        if method.name == "bf16":
            return np.zeros(0, np.int8)
        if method.bits is None:
            return None
        if method.name == "uniform":
            return planner.uniform_bits(table.num_linear_blocks, int(method.bits))
        common = table.resident_slots, table.weights, method.bits, self.max_bits, self.slot_bytes
        if method.name == "random":
            return planner.random_bits(self.seed, *common)
        return planner.static_bits(self.sensitivity, *common)

    @property
    def least_slots(self) -> int:
        """Slots below which weights can't go: the method's own bits, or 3 for all."""
        if self._fixed is not None:
            return planner.assigned_slots(self._fixed, self.table.resident_slots)
        return int(self.table.resident_slots[:, 0].sum())

    @property
    def most_slots(self) -> int:
        """Slots of all pages up to `max_bits`."""
        return int(self.table.resident_slots[:, self.max_bits - MIN_BITS].sum())

    def slots_for_mean(self, mean_bits: float) -> int:
        """Slots that `--mean-bits` leaves to the weights."""
        table = self.table
        return planner.capacity_for_mean_bits(
            self.sensitivity, table.resident_slots, table.weights, mean_bits, self.max_bits, self.slot_bytes
        )
