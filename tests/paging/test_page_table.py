"""The weight page table against a plain model of it: which pages are where, and the highest q over them."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.paging.page_table import PageState, WeightPageTable
from tests.paging.paging_cases import EXPERTS, GEOMETRY, LAYERS, LAYOUTS, NUM_BLOCKS

INDICES = st.integers(0, NUM_BLOCKS - 1)


class PageTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = WeightPageTable(GEOMETRY, LAYERS, EXPERTS)
        self.pages: dict[tuple[int, int], PageState] = {}
        self.slots: dict[tuple[int, int], np.ndarray] = {}
        self.next_slot = 1

    def begin(self, index: int, bits: int) -> None:
        count = self.table.page_slots(index, bits)
        slots = np.arange(self.next_slot, self.next_slot + count, dtype=np.int32)
        self.next_slot += count
        self.table.begin_page_in(index, bits, slots)
        self.pages[index, bits], self.slots[index, bits] = PageState.IN_FLIGHT, slots

    @initialize()
    def load_base(self):
        for index in range(NUM_BLOCKS):
            self.begin(index, 3)
            assert self.table.finish_page_in(index, 3)
            self.pages[index, 3] = PageState.GPU

    def q(self, index: int) -> int:
        return max(b for b in BITS if all(self.pages.get((index, c)) == PageState.GPU for c in BITS if c <= b))

    @rule(index=INDICES, bits=st.sampled_from(BITS))
    def page_in(self, index, bits):
        if self.pages.get((index, bits), PageState.HOST) == PageState.HOST:
            self.begin(index, bits)
        else:
            with pytest.raises(ValueError, match="not HOST"):
                self.table.begin_page_in(index, bits, np.zeros(self.table.page_slots(index, bits), np.int32))

    @precondition(lambda self: PageState.IN_FLIGHT in self.pages.values())
    @rule(data=st.data(), arrives=st.booleans())
    def end_flight(self, data, arrives):
        index, bits = data.draw(st.sampled_from([k for k, v in self.pages.items() if v == PageState.IN_FLIGHT]))
        before = self.q(index)
        if arrives:
            self.pages[index, bits] = PageState.GPU
            assert self.table.finish_page_in(index, bits) == (self.q(index) != before)
        else:
            self.pages[index, bits] = PageState.HOST
            np.testing.assert_array_equal(self.table.abandon_page_in(index, bits), self.slots[index, bits])

    @rule(index=INDICES, bits=st.integers(2, 8))
    def lower(self, index, bits):
        q = self.q(index)
        if not 3 <= bits < q:
            with pytest.raises(ValueError, match=f"can't go from {q} down to {bits} bits"):
                self.table.lower(index, bits)
            return
        if PageState.IN_FLIGHT in (self.pages.get((index, b)) for b in BITS):
            return  # the mover's callers leave these alone
        freed = self.table.lower(index, bits)
        np.testing.assert_array_equal(freed, np.concatenate([self.slots[index, b] for b in range(bits + 1, q + 1)]))
        for b in range(bits + 1, q + 1):
            self.pages[index, b] = PageState.HOST

    @invariant()
    def agrees(self):
        for index in range(NUM_BLOCKS if self.pages else 0):
            assert self.table.committed[index] == self.q(index)
            states = [self.pages.get((index, b), PageState.HOST) for b in BITS]
            assert [self.table.state(index, b) for b in BITS] == states
            assert self.table.movable()[index] == (PageState.IN_FLIGHT not in states)
            for b, state in zip(BITS, states, strict=True):
                if state != PageState.HOST:
                    found = self.table.slot_table[index // 2, self.table.columns(index, b)]
                    np.testing.assert_array_equal(found, self.slots[index, b])


PageTableMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestPageTable = PageTableMachine.TestCase


def test_columns_tile_a_row():
    table = WeightPageTable(GEOMETRY, LAYERS, EXPERTS)
    columns = [table.columns(index, b) for index in (0, 1) for b in BITS]
    assert [c for s in columns for c in range(s.start, s.stop)] == list(range(table.row_slots))


def test_sizes_and_numbering():
    table = WeightPageTable(GEOMETRY, LAYERS, EXPERTS)
    assert [table.locate(i) for i in (0, 1, 2, 2 * EXPERTS)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    for index in range(NUM_BLOCKS):
        layout = LAYOUTS[index % 2]
        assert table.weights[index] == layout.rows * layout.cols
        cumulative = np.cumsum([layout.page_slots(b) for b in BITS])
        np.testing.assert_array_equal(table.resident_slots[index], cumulative)


def test_mean_bits_weighs_by_size():
    table = WeightPageTable(GEOMETRY, LAYERS, EXPERTS)
    table.committed[0::2], table.committed[1::2] = 5, 3
    gate_up, down = (layout.rows * layout.cols for layout in LAYOUTS)
    assert table.mean_bits() == pytest.approx((5 * gate_up + 3 * down) / (gate_up + down))
