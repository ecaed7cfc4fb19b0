"""Random linear-blocks: their pages, their slots in a poisoned arena, and the dense weights that they stand for.

The dense weights come from what was packed, not from the pages, so they can judge whatever reads the pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import MAX_BITS, MIN_BITS, BlockLayout, pack_page
from pallas_kernels.testing.moe_cases import GARBAGE_SLOT, POISON

SPARE_SLOTS = 9  # poisoned slots that belong to nobody


@dataclasses.dataclass(frozen=True)
class RandomBlocks:
    """Linear-blocks of one unit with weights near N(0, 1 / K).

    Attributes:
        indices: uint8 `[B, N, K]`, of 8 bits.
        luts: float16 `[B, G, 2**b]` by b, sorted.
        scale: float32 `[B, N]`.
    """

    layout: BlockLayout
    indices: np.ndarray
    luts: dict[int, np.ndarray]
    scale: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, layout: BlockLayout, count: int, max_bits: int) -> RandomBlocks:
        """`count` linear-blocks with tables up to `max_bits`."""
        indices = rng.integers(0, 256, (count, layout.rows, layout.cols), np.uint8)
        scale = (rng.uniform(0.8, 1.2, (count, layout.rows)) * layout.cols**-0.5).astype(np.float32)
        luts = {
            bits: np.sort(rng.standard_normal((count, layout.groups, 2**bits), np.float32)).astype(np.float16)
            for bits in range(MIN_BITS, max_bits + 1)
        }
        return cls(layout, indices, luts, scale)

    def pages(self) -> dict[int, np.ndarray]:
        """uint32 `[B, page_slots(b) * slot_words]` by b."""
        return {bits: pack_page(self.layout, bits, self.indices, lut, self.scale) for bits, lut in self.luts.items()}

    def slots(self) -> np.ndarray:
        """uint32 `[B, slots, slot_words]`: all pages of each linear-block, in order."""
        pages = np.concatenate(list(self.pages().values()), axis=1)
        return pages.reshape(len(pages), -1, self.layout.slot_words)

    def weights(self, block: int, bits: int) -> jax.Array:
        """float32 `[N, K]` on the device."""
        groups = np.arange(self.layout.rows) // self.layout.lut_rows
        table = jnp.asarray(self.luts[bits][block], jnp.float32)[groups]
        codes = jnp.asarray(self.indices[block] >> (MAX_BITS - bits)).astype(jnp.int32)
        return jnp.take_along_axis(table, codes, axis=1) * jnp.asarray(self.scale[block])[:, None]


def scattered(
    rng: np.random.Generator, units: Sequence[RandomBlocks], bits: np.ndarray
) -> tuple[jax.Array, list[jax.Array]]:
    """An arena with linear-blocks in random slots; the rest of it, and of the slot tables, is poison.

    Args:
        units: blocks of each unit; linear-block `e` holds a copy of block `e % B`.
        bits: int `[L, E, units]`; only pages up to it are there.

    Returns:
        arena uint32 `[num_slots, slot_words]`, and for each unit its slot tables int32 `[L, E, total_slots]`.
    """
    stored = [unit.slots() for unit in units]
    poison = np.full((1, units[0].layout.slot_words), POISON, np.uint32)
    source = np.concatenate([poison, *(slots.reshape(-1, slots.shape[-1]) for slots in stored)])
    firsts = np.cumsum([1] + [slots.shape[0] * slots.shape[1] for slots in stored])
    resident = [np.vectorize(unit.layout.resident_slots)(bits[..., u]) for u, unit in enumerate(units)]
    num_slots = int(sum(counts.sum() for counts in resident)) + SPARE_SLOTS
    free = iter(np.split(rng.permutation(num_slots).astype(np.int32), _ends(resident)))
    origin = np.zeros(num_slots, np.int32)
    tables = []
    for unit, slots, first, counts in zip(units, stored, firsts, resident, strict=False):
        table = np.full((*counts.shape, unit.layout.total_slots), GARBAGE_SLOT, np.int32)
        for layer, expert in np.ndindex(counts.shape):
            count, mine = counts[layer, expert], next(free)
            table[layer, expert, :count] = mine
            origin[mine] = first + (expert % len(slots)) * slots.shape[1] + np.arange(count)
        tables.append(jnp.asarray(table))
    return jnp.take(jnp.asarray(source), jnp.asarray(origin), axis=0), tables


def _ends(resident: Sequence[np.ndarray]) -> np.ndarray:
    """Where each linear-block's share of the permuted slots ends."""
    return np.cumsum(np.concatenate([counts.reshape(-1) for counts in resident]))
