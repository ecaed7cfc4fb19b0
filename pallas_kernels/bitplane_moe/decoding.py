"""From words of planes to weights, inside a kernel: a block of rows of one linear-block.

A thread decodes whole words, 32 columns of a row. Integer instructions bind the kernel (the memory delivers a 4-bit
weight in the time of two), so up to 6 bits a LUT is a set of byte tables in registers, looked up four weights at a time
(see `layout`). Above, entries are loaded one by one.

A *tile* is a block of words as a float16 operand of the tensor cores, `[block_n, 32 * block_words]`. Its columns
stand in the order in which threads hold such operands, four words side by side, so that what a thread decodes never
leaves its registers; `halves` brings activations into the same order. All eight groups of a word are one tensor axis:
the compiler unrolls it late, and its time grows with the square of the number of operations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.bytes import as_halves, permute_bytes, spread_signs
from pallas_kernels.bitplane_moe.layout import MAX_BYTE_TABLE_BITS, BlockLayout

Words = tuple[jax.Array, ...]
"""int32 `[block_n, block_words]` of some planes."""


@dataclasses.dataclass(frozen=True)
class Block:
    """`block_n` rows of one linear-block.

    Attributes:
        slots_ref: `[L, E, slots]`; those of the linear-block start at `[layer, expert, first_slot]`.
        arena_ref: `[num_slots, slot_words]`.
        number: which block of rows; rows past the end of W read zeros.
    """

    slots_ref: Any
    arena_ref: Any
    layer: jax.Array
    expert: jax.Array
    first_slot: int
    layout: BlockLayout
    number: jax.Array
    block_n: int
    interpret: bool

    @property
    def row(self) -> jax.Array:
        """int32 `[block_n]`, the rows of W."""
        return self.number * self.block_n + jnp.arange(self.block_n, dtype=jnp.int32)

    def words(self, bits: int, index: jax.Array, block_words: int) -> Words:
        """Block `index` of `block_words` words of every row, of every plane."""
        return tuple(self._plane(plane, index, block_words) for plane in range(bits))

    def decoder(self, bits: int) -> Callable[[Words], jax.Array]:
        """A function from words to their tile of weights, without the row scale."""
        if bits > MAX_BYTE_TABLE_BITS:
            lookup = self._lookup(bits)
            return lambda words: lookup(_tile_of_bytes(_packed_indices(words)))
        tables = self._byte_tables(bits)
        return lambda words: _tile_of_halves(*self._permuted(words, tables), interpret=self.interpret)

    def row_scales(self) -> jax.Array:
        """float32 `[block_n]`, 0 past the end of W."""
        words = self._read(self.layout.scale_offset_words + self.row, self.row < self.layout.rows)
        return lax.bitcast_convert_type(words, jnp.float32)

    def _plane(self, plane: int, index: jax.Array, block_words: int) -> jax.Array:
        """int32 `[block_n, block_words]`; a slot is looked up once for rows and words that can't lie in two."""
        layout, width = self.layout, self.layout.slot_words
        run = layout.run_words
        together = math.gcd(layout.rows, width // run, self.block_n)  # of rows; block_n is a power of two
        rows = self.number * (self.block_n // together) + _axis(0, self.block_n // together)
        runs = index * (block_words // run) + _axis(2, block_words // run)
        first = layout.plane_start_words(plane) + runs * (layout.rows * run) + rows * (together * run)
        exists = (rows * together < layout.rows) & (runs * run < layout.words_per_row)
        slot = self._slot(first, exists)
        column = lax.rem(first, jnp.int32(width)) + _axis(1, together) * run + _axis(3, run)
        mask = jnp.broadcast_to(exists, column.shape)
        words = plt.load(self.arena_ref.at[jnp.broadcast_to(slot, column.shape), column], mask=mask, other=0)
        return lax.bitcast_convert_type(words, jnp.int32).reshape(self.block_n, block_words)

    def _read(self, word: jax.Array, mask: jax.Array) -> jax.Array:
        """uint32 words of the linear-block, numbered from its first slot; 0 where masked."""
        width = jnp.int32(self.layout.slot_words)
        return plt.load(self.arena_ref.at[self._slot(word, mask), lax.rem(word, width)], mask=mask, other=0)

    def _slot(self, word: jax.Array, mask: jax.Array) -> jax.Array:
        """The arena slot of words of the linear-block; 0 where masked."""
        number = self.first_slot + lax.div(word, jnp.int32(self.layout.slot_words))
        return plt.load(self.slots_ref.at[self.layer, self.expert, number], mask=mask, other=0)

    def _lut(self, bits: int) -> tuple[jax.Array, jax.Array, int]:
        """Each row's LUT: its first word counted from the first slot and whether the row exists, both `[block_n, 1]`;
        and how many of its words can't lie in two slots."""
        layout, words = self.layout, 2 ** (bits - 1)
        first = layout.lut_start_words(bits)
        together = math.gcd(first, layout.slot_words, words)
        start = first + lax.div(self.row, jnp.int32(layout.lut_rows)) * words
        return start[:, None], (self.row < layout.rows)[:, None], together

    def _byte_tables(self, bits: int) -> list[tuple[jax.Array, ...]]:
        """For each value of the bits below the top three: low bytes (two words) and high bytes (two words), as int32
        `[block_n, 1, 1]`."""
        start, exists, together = self._lut(bits)
        words = []
        for offset in range(0, 2 ** (bits - 1), together):
            slot = self._slot(start + offset, exists)
            column = lax.rem(start + offset, jnp.int32(self.layout.slot_words))
            places = (self.arena_ref.at[slot, column + i] for i in range(together))
            loaded = [plt.load(at, mask=exists, other=0) for at in places]
            words += [lax.bitcast_convert_type(word, jnp.int32)[..., None] for word in loaded]
        return [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]

    def _permuted(self, words: Words, tables) -> tuple[jax.Array, jax.Array]:
        """Low and high bytes of the four entries of every group, int32 `[block_n, block_words, 8]`."""
        top = _top_indices(words[:3])
        masks = [spread_signs(word[..., None] << _axis(2, 8, 3), interpret=self.interpret) for word in words[3:]]
        low, high = (self._select(tables, half, top, masks) for half in (0, 2))
        return low, high

    def _select(self, tables, half: int, top: jax.Array, masks: list[jax.Array]) -> jax.Array:
        """The low (`half` 0) or high (2) bytes of four entries a group."""
        values = [permute_bytes(t[half], t[half + 1], top, interpret=self.interpret) for t in tables]
        for mask in reversed(masks):
            values = [(one & mask) | (zero & ~mask) for zero, one in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def _lookup(self, bits: int) -> Callable[[jax.Array], jax.Array]:
        """A function from int32 indices `[block_n, ..]` to float16 entries; two entries lie in a word."""
        start, exists, together = self._lut(bits)
        width = jnp.int32(self.layout.slot_words)
        slot, column = self._slot(start, exists), lax.rem(start, width)

        def entries(index: jax.Array) -> jax.Array:
            mask, word = jnp.broadcast_to(exists, index.shape), index >> 1
            if together == 2 ** (bits - 1):
                at = self.arena_ref.at[jnp.broadcast_to(slot, index.shape), column + word]
                pair = plt.load(at, mask=mask, other=0)
            else:
                pair = self._read(start + word, mask)
            half = (pair >> ((index & 1) * 16).astype(jnp.uint32)) & 0xFFFF
            return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)

        return entries


def _top_indices(base: Words) -> jax.Array:
    """int32 `[.., 8]` whose low four nibbles are the top three bits of the indices of a group's columns."""
    last = jnp.int32(0)
    for q, word in enumerate(base):
        last = last | (lax.shift_right_logical(word, jnp.int32(3 - q)) & (0x11111111 << q))
    quarters = [*(word & 0x77777777 for word in base), last]
    even, odd = (jnp.stack(quarters[parity::2], axis=-1) for parity in (0, 1))
    both = jnp.stack([even, odd], axis=-1)  # quarter 2 * a + b at [.., a, b]
    groups = lax.shift_right_logical(both[..., None], 16 * _axis(4, 2, 5))
    return groups.reshape(*base[0].shape, 8)


def _packed_indices(words: Words) -> jax.Array:
    """int32 `[.., 8]` whose four bytes are the indices of a group's columns."""
    spread = _top_indices(words[:3]) & 0xFFFF
    spread = (spread | spread << 8) & 0x00FF00FF
    packed = (spread | spread << 4) & 0x0F0F0F0F
    for word in words[3:]:
        packed = (packed << 1) | (lax.shift_right_logical(word[..., None], 7 - _axis(2, 8, 3)) & 0x01010101)
    return packed


def _in_order(groups: jax.Array) -> jax.Array:
    """`[N, W, 8]` of all groups to `[N, W / 4, group, second, word]`, twice the same along `second`."""
    rows, words, _ = groups.shape
    ordered = groups.reshape(rows, words // 4, 4, 8).transpose(0, 1, 3, 2)[:, :, :, None]
    return jnp.broadcast_to(ordered, (rows, words // 4, 8, 2, 4))


def _tile_of_halves(low: jax.Array, high: jax.Array, *, interpret: bool) -> jax.Array:
    """A tile from the low and high bytes of all groups, int32 `[N, W, 8]`: float16 `[N, 32 * W]`."""
    lows, highs = _in_order(low), _in_order(high)
    # Bytes 0 (or 2) of both make the low half of a word, bytes 1 (or 3) the high one.
    selector = jnp.where(_axis(3, 2, 5) == 0, jnp.int32(0x5140), jnp.int32(0x7362))
    return as_halves(permute_bytes(lows, highs, selector, interpret=interpret)).reshape(lows.shape[0], -1)


def _tile_of_bytes(packed: jax.Array) -> jax.Array:
    """A tile of indices from the packed ones of all groups, int32 `[N, W, 8]`: int32 `[N, 32 * W]`."""
    ordered = _in_order(packed)
    pair = lax.shift_right_logical(ordered, 16 * _axis(3, 2, 5))
    members = jnp.stack([pair & 255, lax.shift_right_logical(pair, jnp.int32(8)) & 255], axis=-1)
    return members.reshape(ordered.shape[0], -1)


def _axis(dimension: int, size: int, dimensions: int = 4) -> jax.Array:
    """int32 0..size-1 along one of some dimensions."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if i == dimension else 1 for i in range(dimensions)), dimension)
