"""From words of planes to weights, inside a kernel: a block of rows of one linear-block.

A thread decodes whole words, 32 columns of a row, into sixteen float16 tiles of one pair of columns a word. Integer
instructions bind the kernel (the memory delivers a 4-bit weight in the time of two), so up to 6 bits a LUT is a set of
byte tables in registers, looked up four weights at a time (see `layout`). Above, entries are loaded one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.bytes import join_bytes, permute_bytes, spread_signs
from pallas_kernels.bitplane_moe.layout import MAX_BYTE_TABLE_BITS, MIN_BITS, BlockLayout

Words = tuple[jax.Array, ...]
"""int32 `[block_n, block_words]` of some planes."""
Add = Callable[[jax.Array, "jax.Array | int", jax.Array], jax.Array]

UNROLLED_BITS = 4
"""Up to here half of a word's groups are unrolled; above, all are a loop: the compiler's time grows with the square."""


@dataclasses.dataclass(frozen=True)
class Block:
    """`block_n` rows of one linear-block, from row `first_row` on.

    Attributes:
        slots_ref: `[E, total_slots]`; row `expert` is the linear-block's.
        arena_ref: `[num_slots, slot_words]`.
        row: int32 `[block_n]`, the rows of W; those past its end read zeros.
    """

    slots_ref: object
    arena_ref: object
    expert: jax.Array
    layout: BlockLayout
    block: jax.Array
    block_n: int
    interpret: bool

    @property
    def row(self) -> jax.Array:
        return self.block * self.block_n + jnp.arange(self.block_n, dtype=jnp.int32)

    def fold_tiles(self, bits: int, block_words: int) -> Callable[[jax.Array, Add, jax.Array], jax.Array]:
        """A function `fold(index, add, total)`: `total = add(total, d, tile)` for the sixteen tiles of a block.

        Tile d holds weights without the row scale, float16 `[block_n, 2 * block_words]`; its element `[n, 2 * w + j]`
        is column `32 * w + 2 * d + j`.
        """
        if bits <= MAX_BYTE_TABLE_BITS:
            tables = self._byte_tables(bits)
            decode = lambda *group: self._permuted(*group, tables)  # noqa: E731
        else:
            lookup = self._lookup(bits)
            decode = lambda *group: self._loaded(*group, lookup)  # noqa: E731

        def fold(index: jax.Array, add: Add, total: jax.Array) -> jax.Array:
            words = tuple(self._plane(plane, index, block_words) for plane in range(bits))

            def add_group(quarter, half, total):
                group = 2 * quarter + half
                for second, tile in enumerate(decode(_top_indices(words, quarter, half), words[3:], group)):
                    total = add(total, 2 * group + second, tile)
                return total

            def add_half(half, total):
                for quarter in range(4):
                    total = add_group(quarter, half, total)
                return total

            if bits <= UNROLLED_BITS:
                return lax.fori_loop(jnp.int32(0), jnp.int32(2), add_half, total)
            add_any = lambda group, total: add_group(group >> 1, group & 1, total)  # noqa: E731
            return lax.fori_loop(jnp.int32(0), jnp.int32(8), add_any, total)

        return fold

    def row_scales(self) -> jax.Array:
        """float32 `[block_n]`, 0 past the end of W."""
        words = self._read(self.layout.scale_offset_words + self.row, self.row < self.layout.rows)
        return lax.bitcast_convert_type(words, jnp.float32)

    def _plane(self, plane: int, index: jax.Array, block_words: int) -> jax.Array:
        """int32 `[block_n, block_words]`; a slot is looked up once for rows and words that can't lie in two."""
        layout, width = self.layout, self.layout.slot_words
        run = layout.run_words
        together = math.gcd(layout.rows, width // run, self.block_n)  # of rows; block_n is a power of two
        rows = self.block * (self.block_n // together) + _axis(0, self.block_n // together)
        runs = index * (block_words // run) + _axis(2, block_words // run)
        page, offset = layout.plane_offset_words(plane)
        start = layout.page_offset_slots(page) * width + offset
        first = start + runs * (layout.rows * run) + rows * (together * run)
        exists = (rows * together < layout.rows) & (runs * run < layout.words_per_row)
        slot = plt.load(self.slots_ref.at[self.expert, lax.div(first, jnp.int32(width))], mask=exists, other=0)
        column = lax.rem(first, jnp.int32(width)) + _axis(1, together) * run + _axis(3, run)
        mask = jnp.broadcast_to(exists, column.shape)
        words = plt.load(self.arena_ref.at[jnp.broadcast_to(slot, column.shape), column], mask=mask, other=0)
        return lax.bitcast_convert_type(words, jnp.int32).reshape(self.block_n, block_words)

    def _read(self, word: jax.Array, mask: jax.Array) -> jax.Array:
        """uint32 words of the linear-block, numbered from its first slot; 0 where masked."""
        width = jnp.int32(self.layout.slot_words)
        slot = plt.load(self.slots_ref.at[self.expert, lax.div(word, width)], mask=mask, other=0)
        return plt.load(self.arena_ref.at[slot, lax.rem(word, width)], mask=mask, other=0)

    def _lut_start(self, bits: int) -> tuple[jax.Array, jax.Array]:
        """First word of each row's LUT, int32 `[block_n, 1]` counted from the first slot, and which rows exist."""
        layout = self.layout
        start = layout.page_offset_slots(bits) * layout.slot_words + layout.lut_offset_words(bits)
        group = lax.div(self.row, jnp.int32(layout.lut_rows))
        return (start + group * 2 ** (bits - 1))[:, None], (self.row < layout.rows)[:, None]

    def _byte_tables(self, bits: int) -> list[tuple[jax.Array, ...]]:
        """For each value of the bits below the top three: four words int32 `[block_n, 1]`, low bytes and high bytes."""
        layout = self.layout
        start, exists = self._lut_start(bits)
        first = layout.page_offset_slots(bits) * layout.slot_words + layout.lut_offset_words(bits)
        width = jnp.int32(layout.slot_words)

        def words(table: int) -> tuple[jax.Array, ...]:
            word = start + 4 * table
            if first % 4 or layout.slot_words % 4:
                return tuple(self._read(word + i, exists) for i in range(4))
            slot = plt.load(self.slots_ref.at[self.expert, lax.div(word, width)], mask=exists, other=0)
            column = lax.rem(word, width)
            return tuple(plt.load(self.arena_ref.at[slot, column + i], mask=exists, other=0) for i in range(4))

        to_signed = lambda word: lax.bitcast_convert_type(word, jnp.int32)  # noqa: E731
        return [tuple(map(to_signed, words(table))) for table in range(2 ** (bits - MIN_BITS))]

    def _permuted(self, top: jax.Array, planes: Words, group, tables) -> Iterator[jax.Array]:
        masks = [spread_signs(word << group, interpret=self.interpret) for word in planes]
        low, high = (self._select(tables, half, top, masks) for half in (0, 2))
        for second in (False, True):
            yield join_bytes(low, high, second, interpret=self.interpret)

    def _select(self, tables, half: int, top: jax.Array, masks: list[jax.Array]) -> jax.Array:
        """The low (`half` 0) or high (2) bytes of four entries a word."""
        values = [permute_bytes(t[half], t[half + 1], top, interpret=self.interpret) for t in tables]
        for mask in reversed(masks):
            values = [(one & mask) | (zero & ~mask) for zero, one in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def _loaded(self, top: jax.Array, planes: Words, group, lookup) -> Iterator[jax.Array]:
        spread = top & 0xFFFF
        spread = (spread | spread << 8) & 0x00FF00FF
        packed = (spread | spread << 4) & 0x0F0F0F0F
        for word in planes:
            packed = (packed << 1) | (lax.shift_right_logical(word, jnp.int32(7) - group) & 0x01010101)
        both = jnp.broadcast_to(packed[:, :, None], (*packed.shape, 2)).reshape(packed.shape[0], -1)
        odd = lax.broadcasted_iota(jnp.int32, both.shape, 1) & 1
        for second in range(2):
            yield lookup(lax.shift_right_logical(both, 8 * (2 * second + odd)) & 255)

    def _lookup(self, bits: int) -> Callable[[jax.Array], jax.Array]:
        """A function from int32 indices `[block_n, ..]` to float16 entries; two entries lie in a word."""
        start, exists = self._lut_start(bits)

        def entries(index: jax.Array) -> jax.Array:
            word = self._read(start + (index >> 1), jnp.broadcast_to(exists, index.shape))
            half = (word >> ((index & 1) * 16).astype(jnp.uint32)) & 0xFFFF
            return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)

        return entries


def _top_indices(words: Words, quarter: jax.Array | int, half: jax.Array) -> jax.Array:
    """int32 whose nibbles 0..3 are the top three bits of group `2 * quarter + half`; what is above is of no use."""
    base, shift = words[:3], lax.shift_right_logical
    last = jnp.int32(0)
    for q, word in enumerate(base):
        last = last | (shift(word, jnp.int32(3 - q)) & (0x11111111 << q))
    nibbles = [*(word & 0x77777777 for word in base), last]
    if isinstance(quarter, int):
        chosen = nibbles[quarter]
    else:
        even = jnp.where(quarter < 2, nibbles[0], nibbles[2])
        chosen = jnp.where(quarter & 1 == 0, even, jnp.where(quarter < 2, nibbles[1], nibbles[3]))
    return shift(chosen, jnp.int32(16) * half)


def _axis(dimension: int, size: int) -> jax.Array:
    """int32 0..size-1 along one of four dimensions."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if i == dimension else 1 for i in range(4)), dimension)
