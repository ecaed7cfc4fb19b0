"""From words of planes to weights, inside a kernel: a block of rows of one linear-block.

A thread decodes whole words, 32 columns of a row. Integer instructions bind the kernel (the memory delivers a 4-bit
weight in the time of two), so up to 6 bits a LUT is a set of byte tables in registers, looked up four weights at a time
(see `layout`). Above, entries are loaded one by one.

A *tile* is a quarter of a block of words, columns `8 * q .. 8 * q + 7` of each, as a float16 operand of the tensor
cores `[block_n, 8 * block_words]`. Its columns stand in the order in which threads hold such operands, four words side
by side, so that what a thread decodes never leaves its registers; `halves` brings activations into the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
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

    def decoder(self, bits: int) -> Callable[[Words, jax.Array | int], jax.Array]:
        """A function from words and the number of a quarter to that tile of weights, without the row scale."""
        if bits > MAX_BYTE_TABLE_BITS:
            lookup = self._lookup(bits)
            return lambda words, quarter: lookup(
                _tile_of_bytes([_packed_indices(*group) for group in _groups(words, quarter)])
            )
        tables = self._byte_tables(bits)

        def decode(words: Words, quarter: jax.Array | int) -> jax.Array:
            low, high = zip(*(self._permuted(*group, tables) for group in _groups(words, quarter)), strict=True)
            return _tile_of_halves(low, high, interpret=self.interpret)

        return decode

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
        """Each row's LUT: its first word int32 `[block_n, 1]` counted from the first slot, whether the row exists, and
        how many of its words can't lie in two slots."""
        layout, words = self.layout, 2 ** (bits - 1)
        first = layout.lut_start_words(bits)
        group = lax.div(self.row, jnp.int32(layout.lut_rows))
        together = math.gcd(first, layout.slot_words, words)
        return (first + group * words)[:, None], (self.row < layout.rows)[:, None], together

    def _byte_tables(self, bits: int) -> list[tuple[jax.Array, ...]]:
        """For each value of the bits below the top three: four words int32 `[block_n, 1]`, low bytes and high bytes."""
        start, exists, together = self._lut(bits)
        words = []
        for offset in range(0, 2 ** (bits - 1), together):
            slot = self._slot(start + offset, exists)
            column = lax.rem(start + offset, jnp.int32(self.layout.slot_words))
            places = (self.arena_ref.at[slot, column + i] for i in range(together))
            words += [lax.bitcast_convert_type(plt.load(at, mask=exists, other=0), jnp.int32) for at in places]
        return [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]

    def _permuted(self, top: jax.Array, planes: Words, group, tables) -> tuple[jax.Array, jax.Array]:
        """Low and high bytes of the four entries of a group, int32 `[block_n, block_words]`."""
        masks = [spread_signs(word << group, interpret=self.interpret) for word in planes]
        low, high = (self._select(tables, half, top, masks) for half in (0, 2))
        return low, high

    def _select(self, tables, half: int, top: jax.Array, masks: list[jax.Array]) -> jax.Array:
        """The low (`half` 0) or high (2) bytes of four entries a word."""
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


def _top_indices(base: Words, quarter: jax.Array | int) -> jax.Array:
    """int32 whose eight nibbles are the top three bits of the indices of a quarter's columns."""
    last = jnp.int32(0)
    for q, word in enumerate(base):
        last = last | (lax.shift_right_logical(word, jnp.int32(3 - q)) & (0x11111111 << q))
    nibbles = [*(word & 0x77777777 for word in base), last]
    if isinstance(quarter, int):
        return nibbles[quarter]
    even = jnp.where(quarter < 2, nibbles[0], nibbles[2])
    return jnp.where(quarter & 1 == 0, even, jnp.where(quarter < 2, nibbles[1], nibbles[3]))


def _groups(words: Words, quarter: jax.Array | int) -> Iterator[tuple[jax.Array, Words, jax.Array | int]]:
    """Both groups of a quarter: their top indices (in the low half), the planes below, their number."""
    top = _top_indices(words[:3], quarter)
    yield top, words[3:], 2 * quarter
    yield lax.shift_right_logical(top, jnp.int32(16)), words[3:], 2 * quarter + 1


def _packed_indices(top: jax.Array, planes: Words, group: jax.Array | int) -> jax.Array:
    """int32 whose four bytes are the indices of a group's columns."""
    spread = top & 0xFFFF
    spread = (spread | spread << 8) & 0x00FF00FF
    packed = (spread | spread << 4) & 0x0F0F0F0F
    for word in planes:
        packed = (packed << 1) | (lax.shift_right_logical(word, jnp.int32(7) - group) & 0x01010101)
    return packed


def _in_order(groups: Sequence[jax.Array]) -> jax.Array:
    """`[N, W]` of both groups of a quarter to `[N, W / 4, group, second, word]`, twice the same along `second`."""
    rows, words = groups[0].shape
    both = jnp.stack([group.reshape(rows, words // 4, 4) for group in groups], axis=-1)
    both = both.transpose(0, 1, 3, 2).reshape(rows, words // 4, 2, 1, 4)
    return jnp.broadcast_to(both, (rows, words // 4, 2, 2, 4))


def _tile_of_halves(low: Sequence[jax.Array], high: Sequence[jax.Array], *, interpret: bool) -> jax.Array:
    """A tile from the low and high bytes of both groups, int32 `[N, W]` each: float16 `[N, 8 * W]`."""
    lows, highs = _in_order(low), _in_order(high)
    second = lax.broadcasted_iota(jnp.int32, lows.shape, 3)
    # Bytes 0 (or 2) of both make the low half of a word, bytes 1 (or 3) the high one.
    selector = jnp.where(second == 0, jnp.int32(0x5140), jnp.int32(0x7362))
    return as_halves(permute_bytes(lows, highs, selector, interpret=interpret)).reshape(lows.shape[0], -1)


def _tile_of_bytes(packed: Sequence[jax.Array]) -> jax.Array:
    """A tile of indices from the packed ones of both groups: int32 `[N, 8 * W]`."""
    ordered = _in_order(packed)
    pair = lax.shift_right_logical(ordered, 16 * lax.broadcasted_iota(jnp.int32, ordered.shape, 3))
    members = jnp.stack([pair & 255, lax.shift_right_logical(pair, jnp.int32(8)) & 255], axis=-1)
    return members.reshape(ordered.shape[0], -1)


def _axis(dimension: int, size: int) -> jax.Array:
    """int32 0..size-1 along one of four dimensions."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if i == dimension else 1 for i in range(4)), dimension)
