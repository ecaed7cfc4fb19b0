"""The weight page table: one row a linear-block (paper section 3.1).

Linear-block `i = (moe_layer * num_experts + expert) * 2 + unit`. Column `j` of a `[n, 6]` array is bit-width `3 + j`.

Invariants:
* `committed[i]` (q) is what kernels use; pages 3..q are `GPU` and their slots are in `slot_table`.
* q falls before a page above it gives up its slots; q rises only over pages that are `GPU`.
* A page that is `IN_FLIGHT` owns slots, but q stays below it.
"""

from __future__ import annotations

import enum

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, MIN_BITS, MoEGeometry


class PageState(enum.IntEnum):
    HOST = 0
    IN_FLIGHT = 1
    GPU = 2


class WeightPageTable:
    """Host side of the table. The device's copies of `slot_table` and `committed` are updated by deltas.

    Attributes:
        committed: int8 `[n]`, q; 0 until the base page is on the device.
        desired: int8 `[n]`, d.
        initial: int8 `[n]`, the assignment at load.
        slot_table: int32 `[n / 2, row_slots]`: for each (layer, expert) the slots of the gate_up pages, then down's.
        states: uint8 `[n, 6]`, `PageState` of every page.
        resident_slots: int64 `[n, 6]`, M_i^b in slots.
        weights: int64 `[n]`, N * K.
    """

    def __init__(self, geometry: MoEGeometry, num_layers: int, num_experts: int) -> None:
        self.geometry = geometry
        self.num_layers, self.num_experts = num_layers, num_experts
        self.layouts = (geometry.gate_up, geometry.down)
        n = num_layers * num_experts * 2
        self.committed = np.zeros(n, np.int8)
        self.desired = np.zeros(n, np.int8)
        self.initial = np.zeros(n, np.int8)
        self.states = np.full((n, len(BITS)), PageState.HOST, np.uint8)
        self.slot_table = np.zeros((n // 2, self.row_slots), np.int32)
        per_unit = [[layout.resident_slots(b) for b in BITS] for layout in self.layouts]
        self.resident_slots = np.tile(np.array(per_unit, np.int64), (n // 2, 1))
        self.weights = np.tile(np.array([x.rows * x.cols for x in self.layouts], np.int64), n // 2)

    @property
    def num_linear_blocks(self) -> int:
        return len(self.committed)

    @property
    def row_slots(self) -> int:
        return sum(layout.total_slots for layout in self.layouts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the device's slot table: `[num_layers, num_experts, row_slots]`."""
        return self.num_layers, self.num_experts, self.row_slots

    def locate(self, index: int) -> tuple[int, int, int]:
        """`(moe_layer, expert, unit)` of a linear-block."""
        layer_expert, unit = divmod(index, 2)
        return *divmod(layer_expert, self.num_experts), unit

    def page_slots(self, index: int, bits: int) -> int:
        return self.layouts[index % 2].page_slots(bits)

    def columns(self, index: int, bits: int) -> slice:
        """Columns of `slot_table[index // 2]` that hold the slots of page `bits`."""
        unit = index % 2
        start = self.layouts[unit].page_offset_slots(bits) + (self.layouts[0].total_slots if unit else 0)
        return slice(start, start + self.page_slots(index, bits))

    def state(self, index: int, bits: int) -> PageState:
        return PageState(self.states[index, bits - MIN_BITS])

    def movable(self) -> np.ndarray:
        """bool `[n]`: linear-blocks with no page in flight."""
        return ~(self.states == PageState.IN_FLIGHT).any(axis=1)

    def lower(self, index: int, bits: int) -> np.ndarray:
        """Commits a lower precision; returns the slots of the pages above it, now free (int32).

        The caller releases them to the allocator and sends the new q to the device before the next step.
        """
        old = int(self.committed[index])
        if not MIN_BITS <= bits < old:
            raise ValueError(f"linear-block {index} can't go from {old} down to {bits} bits")
        self.committed[index] = self.desired[index] = bits
        row = self.slot_table[index // 2]
        freed = [row[self.columns(index, b)].copy() for b in range(bits + 1, old + 1)]
        self.states[index, bits + 1 - MIN_BITS : old + 1 - MIN_BITS] = PageState.HOST
        return np.concatenate(freed)

    def begin_page_in(self, index: int, bits: int, slots: np.ndarray) -> None:
        """Page `bits` gets its slots and is in flight."""
        if self.state(index, bits) != PageState.HOST:
            raise ValueError(f"page ({index}, {bits}) is {self.state(index, bits).name}, not HOST")
        self.slot_table[index // 2, self.columns(index, bits)] = slots
        self.states[index, bits - MIN_BITS] = PageState.IN_FLIGHT

    def finish_page_in(self, index: int, bits: int) -> bool:
        """Page `bits` is on the device. Raises q over every page that is now there; returns whether q changed."""
        self.states[index, bits - MIN_BITS] = PageState.GPU
        q = int(self.committed[index])
        while q < MAX_BITS and self.states[index, max(q + 1, MIN_BITS) - MIN_BITS] == PageState.GPU:
            q = max(q + 1, MIN_BITS)
        changed = q != self.committed[index]
        self.committed[index] = q
        self.desired[index] = max(int(self.desired[index]), q)
        return bool(changed)

    def abandon_page_in(self, index: int, bits: int) -> np.ndarray:
        """A copy that will not be used: the page is on the host again; returns its slots.

        Of several pages of a linear-block, the highest is abandoned first; a lower one may still be under way.
        """
        self.states[index, bits - MIN_BITS] = PageState.HOST
        self.desired[index] = bits - 1
        return self.slot_table[index // 2, self.columns(index, bits)].copy()

    def mean_bits(self) -> float:
        """Sum of q N K over sum of N K."""
        return float((self.committed * self.weights).sum() / self.weights.sum())
