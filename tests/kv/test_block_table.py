"""KV blocks of sequences against a plain count."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.kv.block_table import KVBlockTable
from pwjax.paging.allocator import Owner, SlotAllocator

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=16, slot_words=64, block_size=4)
ROWS, MAX_TOKENS = 3, 30


class BlockTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(41)
        self.table = KVBlockTable(GEOMETRY, self.allocator, ROWS, MAX_TOKENS)
        self.entries: dict[int, dict[int, tuple[int, ...]]] = {}

    @rule()
    def acquire(self):
        assert self.table.has_free_row == (len(self.entries) < ROWS)
        if self.table.has_free_row:
            row = self.table.acquire_row()
            assert row not in self.entries and 0 <= row < ROWS
            self.entries[row] = {}

    @rule(data=st.data(), tokens=st.integers(0, MAX_TOKENS))
    def grow(self, data, tokens):
        if not self.entries:
            return
        row = data.draw(st.sampled_from(sorted(self.entries)))
        wanted = max(0, -(-tokens // 4) - len(self.entries[row]))
        assert self.table.missing_slots(row, tokens) == wanted * GEOMETRY.block_slots
        if wanted * GEOMETRY.block_slots > self.allocator.free_slots:
            return
        for new_row, block, slots in self.table.grow(row, tokens):
            assert new_row == row and block == len(self.entries[row])
            self.entries[row][block] = tuple(slots.tolist())

    @rule(data=st.data())
    def release(self, data):
        if self.entries:
            row = data.draw(st.sampled_from(sorted(self.entries)))
            self.table.release_row(row)
            del self.entries[row]

    @invariant()
    def agrees(self):
        slots = [s for row in self.entries.values() for block in row.values() for s in block]
        assert len(set(slots)) == len(slots) == self.table.used_slots == self.allocator.used_slots(Owner.KV)
        assert all(self.table.num_blocks(row) == len(blocks) for row, blocks in self.entries.items())


BlockTableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBlockTable = BlockTableMachine.TestCase


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (30, 8)])
def test_sizes(tokens, blocks):
    table = KVBlockTable(GEOMETRY, SlotAllocator(41), ROWS, MAX_TOKENS)
    assert table.blocks_for(tokens) == blocks
    assert table.slots_for(tokens) == blocks * GEOMETRY.block_slots
    assert table.shape == (ROWS, 8, GEOMETRY.block_slots)
    # 2 layers x (key, value) x 4 tokens x 16 bf16 elements = 512 bytes, two slots of 256
    assert GEOMETRY.block_slots == 2
