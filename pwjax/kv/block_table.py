"""KV blocks of the running sequences. Host bookkeeping; the device's table is updated by deltas inside each step.

A sequence has a *row* of the table while it runs. Entry `[row, block]` lists the arena slots of that block.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.paging.allocator import Owner, SlotAllocator


class KVBlockTable:
    """Slots of every running sequence.

    Args:
        geometry: shape of a block.
        allocator: where slots come from; the same one that weight pages draw on.
        max_num_seqs: rows.
        max_model_len_tokens: the longest sequence.
    """

    def __init__(
        self, geometry: KVGeometry, allocator: SlotAllocator, max_num_seqs: int, max_model_len_tokens: int
    ) -> None:
        self.geometry = geometry
        self._allocator = allocator
        self.max_blocks = self.blocks_for(max_model_len_tokens)
        self._blocks: list[list[np.ndarray]] = [[] for _ in range(max_num_seqs)]
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the device's table: `[max_num_seqs, max_blocks, block_slots]`, int32."""
        return len(self._blocks), self.max_blocks, self.geometry.block_slots

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.geometry.block_size)

    def slots_for(self, tokens: int) -> int:
        """Slots that a sequence of `tokens` occupies."""
        return self.blocks_for(tokens) * self.geometry.block_slots

    @property
    def used_slots(self) -> int:
        """Slots of all sequences."""
        return sum(map(len, self._blocks)) * self.geometry.block_slots

    def num_blocks(self, row: int) -> int:
        return len(self._blocks[row])

    def missing_slots(self, row: int, tokens: int) -> int:
        """Slots still to be taken before the sequence in `row` can hold `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - len(self._blocks[row])) * self.geometry.block_slots

    def acquire_row(self) -> int:
        return self._free_rows.pop()

    def grow(self, row: int, tokens: int) -> list[tuple[int, int, np.ndarray]]:
        """Takes the blocks that `tokens` tokens need. Returns the new `(row, block, slots)` entries for the device."""
        blocks = self._blocks[row]
        added = []
        while len(blocks) < self.blocks_for(tokens):
            slots = self._allocator.allocate(self.geometry.block_slots, Owner.KV)
            added.append((row, len(blocks), slots))
            blocks.append(slots)
        return added

    def release_row(self, row: int) -> None:
        """Frees all blocks of a sequence, and its row."""
        for slots in self._blocks[row]:
            self._allocator.release(slots, Owner.KV)
        self._blocks[row] = []
        self._free_rows.append(row)
