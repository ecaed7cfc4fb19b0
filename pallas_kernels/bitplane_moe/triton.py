"""`bitplane_moe` for NVIDIA GPUs: Pallas, Triton backend.

One kernel, called for gate_up and for down: rows of x times the decoded weights of their expert. It has two bodies.
*vector*: a tile is one pair, weights are decoded and multiplied in registers (few pairs, bound by memory and integer
work). *matrix*: a tile is up to `block_m` sorted pairs of one expert, so that a decoded weight serves all of them
through `dot`. Activation, norms and the weighted sum over choices are XLA's.

A thread decodes whole words: the 32 columns of a word are 32 passes, not 32 threads, so what it costs to find a word in
the arena is paid once. x is laid out to match, `[row, column % 32, column // 32]`.

Tables are read by pointer loads (`.at[slot, column]`, never a flat index, which would pass 2**31 in a large arena).
Constants are `jnp.int32(..)` wherever both sides of a `where` are: the lowering takes two Python ints for booleans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.activation import gated, row_norms
from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, MIN_BITS, BlockLayout, MoEGeometry
from pallas_kernels.bitplane_moe.routing import SortedPairs, Tiles, sort_pairs, tile_pairs

_LANES = 32  # columns in a word of a plane


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of the kernel, all powers of two: `block_n` rows of W by `block_words` words of a plane at a time.

    `block_m` 1 is the vector body; otherwise it is at least 16, and so is `block_words`.
    """

    block_m: int
    block_n: int
    block_words: int
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n, self.block_words)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"{self}: sizes must be powers of two")
        if self.block_m > 1 and min(sizes) < 16:
            raise ValueError(f"{self}: the matrix body multiplies blocks of at least 16")


def default_config(pairs: int, num_experts: int, words_per_row: int, *, exact: bool) -> Config:
    """Vectors while an expert sees fewer than two pairs, then tiles of about as many pairs as an expert gets.

    Measured on an H200 at the shapes of Qwen1.5-MoE-A2.7B: 13 us a pair in the vector body, 24 us a tile in the other.
    """
    words = min(32, pl.next_power_of_2(words_per_row))
    if pairs <= max(8, num_experts + num_experts // 4):
        return Config(block_m=1, block_n=256 // words, block_words=words)
    words, mean = max(16, words), pairs // num_experts
    if exact:  # products of float32 are done one by one: small blocks, or they spill
        return Config(block_m=16, block_n=32, block_words=words)
    return Config(block_m=16 if mean <= 16 else 32 if mean <= 32 else 64, block_n=64, block_words=words, num_warps=8)


def bitplane_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up_slots: jax.Array,
    down_slots: jax.Array,
    bits: jax.Array,
    arena: jax.Array,
    *,
    geometry: MoEGeometry,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.bitplane_moe`. bfloat16 x multiplies in TF32, which holds bfloat16 and LUT entries exactly."""
    num_experts, top_k, exact = bits.shape[0], expert_ids.shape[1], x.dtype == jnp.float32
    configs = [
        config or default_config(expert_ids.size, num_experts, layout.words_per_row, exact=exact)
        for layout in (geometry.gate_up, geometry.down)
    ]
    pairs, tiles = _plan(expert_ids, num_experts, configs[0].block_m)
    matmul = functools.partial(_grouped_matmul, tiles=tiles, arena=arena, exact=exact, interpret=interpret)
    gate_up = matmul(x, pairs.order // top_k, gate_up_slots, bits[:, 0], layout=geometry.gate_up, config=configs[0])
    hidden = gated(gate_up, geometry.activation)
    every_row = jnp.arange(expert_ids.size, dtype=jnp.int32)
    out = matmul(hidden, every_row, down_slots, bits[:, 1], layout=geometry.down, config=configs[1])
    # Rows of padding were never written: `where`, not a product with zero.
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    picked = jnp.where(real[..., None], out[pairs.position], 0.0)
    y = jnp.sum(picked * jnp.where(real, expert_weights, 0.0)[..., None], axis=1)
    return y.astype(x.dtype), jnp.where(real, row_norms(hidden)[pairs.position], 0.0)


def _plan(expert_ids: jax.Array, num_experts: int, block_m: int) -> tuple[SortedPairs, Tiles]:
    if block_m > 1:
        pairs = sort_pairs(expert_ids, num_experts)
        return pairs, tile_pairs(pairs, num_experts, block_m)
    every_pair = jnp.arange(expert_ids.size, dtype=jnp.int32)
    ids = expert_ids.reshape(-1)
    real = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(real, ids, num_experts)
    pairs = SortedPairs(every_pair, ids, every_pair.reshape(expert_ids.shape))
    return pairs, Tiles(ids, every_pair, real.astype(jnp.int32))


def _grouped_matmul(x, source, slots, bits, *, tiles, arena, layout, exact, config, interpret) -> jax.Array:
    """float32 `[P, N]`: row r is `W[expert of r] @ x[source[r]]`; rows of no tile are not written."""
    body = _vector_kernel if config.block_m == 1 else _matrix_kernel
    kernel = functools.partial(body, layout=layout, config=config, exact=exact)
    words = layout.words_per_row
    x = jnp.pad(x, ((0, 0), (0, words * _LANES - layout.cols)))  # columns past K meet zeros
    x = x.reshape(x.shape[0], words, _LANES).swapaxes(1, 2)
    operands = (tiles.experts, tiles.starts, tiles.rows, source, slots, bits, x, arena)
    return pl.pallas_call(
        kernel,
        grid=(tiles.experts.shape[0], pl.cdiv(layout.rows, config.block_n)),
        out_shape=jax.ShapeDtypeStruct((source.shape[0], layout.rows), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=f"bitplane_{'vector' if config.block_m == 1 else 'matrix'}",
    )(*operands)


def _vector_kernel(
    experts_ref,
    starts_ref,
    rows_ref,
    source_ref,
    slots_ref,
    bits_ref,
    x_ref,
    arena_ref,
    out_ref,
    *,
    layout,
    config,
    exact,
):
    """One pair, `block_n` rows of W."""
    del exact  # products are float32 anyway
    tile = pl.program_id(0)
    active = rows_ref[tile] > 0
    pair = starts_ref[tile]
    expert = jnp.where(active, experts_ref[tile], 0)
    block = _Block(slots_ref, arena_ref, expert, bits_ref[expert], layout, config)
    source = source_ref[pair]

    def add(total, lane, word, weights):
        x = plt.load(x_ref.at[source, lane, word], mask=word < layout.words_per_row, other=0.0)
        return total + weights * x.astype(jnp.float32)[None, :]

    total = jnp.zeros((config.block_n, config.block_words), jnp.float32)
    total = jnp.sum(block.for_each_column(active, add, total), axis=1)
    mask = block.real_row & active
    plt.store(out_ref.at[pair, block.row], total * block.row_scales(mask), mask=mask)


def _matrix_kernel(
    experts_ref,
    starts_ref,
    rows_ref,
    source_ref,
    slots_ref,
    bits_ref,
    x_ref,
    arena_ref,
    out_ref,
    *,
    layout,
    config,
    exact,
):
    """Up to `block_m` sorted pairs of one expert, `block_n` rows of W."""
    tile = pl.program_id(0)
    rows = rows_ref[tile]
    expert = jnp.where(rows > 0, experts_ref[tile], 0)
    block = _Block(slots_ref, arena_ref, expert, bits_ref[expert], layout, config)
    member = jnp.arange(config.block_m, dtype=jnp.int32)
    pair = starts_ref[tile] + member
    source = plt.load(source_ref.at[pair], mask=member < rows, other=0)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT

    def add(total, lane, word, weights):
        mask = (member < rows)[:, None] & (word < layout.words_per_row)[None, :]
        x = plt.load(x_ref.at[source[:, None], lane, word[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        return total + jnp.dot(x, weights.T, precision=precision, preferred_element_type=jnp.float32)

    total = jnp.zeros((config.block_m, config.block_n), jnp.float32)
    total = block.for_each_column(rows > 0, add, total)
    real_row = block.real_row & (rows > 0)
    total = total * block.row_scales(real_row)[None, :]
    plt.store(out_ref.at[pair[:, None], block.row[None, :]], total, mask=(member < rows)[:, None] & real_row[None, :])


class _Block:
    """`block_n` rows of one linear-block, as a kernel sees them."""

    def __init__(self, slots_ref, arena_ref, expert, bits, layout: BlockLayout, config: Config):
        self._slots_ref, self._arena_ref, self._expert = slots_ref, arena_ref, expert
        self._bits, self._layout, self._config = bits, layout, config
        self.row = pl.program_id(1) * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
        self.real_row = self.row < layout.rows

    def for_each_column(self, active, add: Callable[..., jax.Array], total: jax.Array) -> jax.Array:
        """Folds `total = add(total, lane, word, weights)` over columns `word * 32 + lane`, 32 lanes a block of words.

        `word` is int32 `[block_words]`, `weights` float32 `[block_n, block_words]` without the row scale, finite past
        the ends of W too. Makes no trip where `active` is false.
        """
        layout, size = self._layout, self._config.block_words
        lookup = self._lut()

        def step(index, total):
            word = index * size + jnp.arange(size, dtype=jnp.int32)
            packed = self._packed_indices(word)

            def add_byte(byte, total):
                for nibble in range(8):
                    indices = ((packed[nibble] >> (8 * byte).astype(jnp.uint32)) & 255).astype(jnp.int32)
                    total = add(total, 4 * nibble + byte, word, lookup(indices))
                return total

            return lax.fori_loop(jnp.int32(0), jnp.int32(4), add_byte, total)

        steps = jnp.where(active, jnp.int32(pl.cdiv(layout.words_per_row, size)), 0)
        return lax.fori_loop(0, steps, step, total)

    def row_scales(self, mask: jax.Array) -> jax.Array:
        words = self._read(self._layout.scale_offset_words + self.row, mask)
        return lax.bitcast_convert_type(words, jnp.float32)

    def _read(self, word: jax.Array, mask: jax.Array) -> jax.Array:
        """uint32 words of the linear-block, numbered from its first slot; 0 where masked."""
        width = jnp.int32(self._layout.slot_words)
        slot = plt.load(self._slots_ref.at[self._expert, lax.div(word, width)], mask=mask, other=0)
        return plt.load(self._arena_ref.at[slot, lax.rem(word, width)], mask=mask, other=0)

    def _packed_indices(self, word: jax.Array) -> tuple[jax.Array, ...]:
        """Eight uint32 `[block_n, block_words]`: byte i of number j is the index of column `4 * j + i` of the word."""
        layout = self._layout
        address = self.row[:, None] * layout.words_per_row + word[None, :]
        mask = self.real_row[:, None] & (word < layout.words_per_row)[None, :]

        def add_plane(plane, packed):
            words = self._read(_plane_start(plane, layout) + address, mask)
            # The product puts bit i of a nibble in the lowest bit of byte i.
            spread = (((words >> (4 * j)) & 15) * 0x00204081 & 0x01010101 for j in range(8))
            return tuple((old << 1) | new for old, new in zip(packed, spread, strict=True))

        return lax.fori_loop(0, self._bits, add_plane, (jnp.zeros(mask.shape, jnp.uint32),) * 8)

    def _lut(self) -> Callable[[jax.Array], jax.Array]:
        """A function from int32 indices `[block_n, block_words]` to float32 LUT entries."""
        layout, half_bits = self._layout, self._bits - 1
        group = lax.div(self.row, jnp.int32(layout.lut_rows))
        start = (_lut_start(self._bits, layout) + (group << half_bits))[:, None]
        mask = self.real_row[:, None]
        if layout.slot_words >= 2 ** (MAX_BITS - 1):
            words_at = self._two_slots(start, 1 << half_bits, mask)
        else:  # a table may span any number of slots
            words_at = lambda entry: self._read(start + entry, jnp.broadcast_to(mask, entry.shape))  # noqa: E731

        def lookup(indices: jax.Array) -> jax.Array:
            words = words_at(indices & ((1 << half_bits) - 1))
            half = (words >> ((indices >> half_bits) * 16).astype(jnp.uint32)) & 0xFFFF
            return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32)

        return lookup

    def _two_slots(self, start: jax.Array, count: jax.Array, mask: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Reads the `count` words from `start` `[block_n, 1]`, which lie in one slot or two: looks those up once."""
        width = jnp.int32(self._layout.slot_words)
        number, column = lax.div(start, width), lax.rem(start, width)
        first = plt.load(self._slots_ref.at[self._expert, number], mask=mask, other=0)
        second = plt.load(self._slots_ref.at[self._expert, number + 1], mask=mask & (column + count > width), other=0)

        def words_at(entry: jax.Array) -> jax.Array:
            place = column + entry
            slot = jnp.where(place < width, first, second)
            place = jnp.where(place < width, place, place - width)
            return plt.load(self._arena_ref.at[slot, place], mask=jnp.broadcast_to(mask, entry.shape), other=0)

        return words_at


def _plane_start(plane, layout: BlockLayout):
    """First word of a plane, counted from the linear-block's first slot."""
    start = plane * layout.plane_words
    for b in BITS[1:]:
        start = jnp.where(plane == b - 1, jnp.int32(layout.page_offset_slots(b) * layout.slot_words), start)
    return start


def _lut_start(bits, layout: BlockLayout):
    """First word of LUT `bits`, counted from the linear-block's first slot."""
    start = jnp.int32(layout.lut_offset_words(MIN_BITS))
    for b in BITS[1:]:
        first = layout.page_offset_slots(b) * layout.slot_words + layout.lut_offset_words(b)
        start = jnp.where(bits == b, jnp.int32(first), start)
    return start
