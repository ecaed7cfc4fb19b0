"""`bitplane_moe` for NVIDIA GPUs: Pallas, Triton backend.

One kernel, called for gate_up and for down: rows of x times the decoded weights of their expert. It has two bodies.
*vector*: a tile is one pair, weights are decoded and multiplied in registers (few pairs, bound by memory and integer
work). *matrix*: a tile is up to `block_m` sorted pairs of one expert, so that a decoded weight serves all of them
through `dot`. Activation, norms and the weighted sum over choices are XLA's.

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
from pallas_kernels.bitplane_moe.layout import BITS, MIN_BITS, BlockLayout, MoEGeometry
from pallas_kernels.bitplane_moe.routing import SortedPairs, Tiles, sort_pairs, tile_pairs

_LANES = 32  # columns in a word of a plane


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of the kernel, all powers of two. `block_m` 1 is the vector body, otherwise it is at least 16."""

    block_m: int
    block_n: int
    block_words: int  # words of a plane that the vector body takes at a time
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n, self.block_words)
        if any(size < 1 or size & (size - 1) for size in sizes) or 1 < self.block_m < 16:
            raise ValueError(f"{self}: sizes must be powers of two, and block_m 1 or at least 16")


def default_config(pairs: int, num_experts: int) -> Config:
    """Vectors while most experts would see one pair, then tiles of about as many pairs as an expert gets."""
    if pairs <= max(8, num_experts // 2):
        return Config(block_m=1, block_n=16, block_words=4)
    mean = pairs // num_experts
    return Config(block_m=16 if mean <= 16 else 32 if mean <= 32 else 64, block_n=64, block_words=1)


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
    num_experts, top_k = bits.shape[0], expert_ids.shape[1]
    config = config or default_config(expert_ids.size, num_experts)
    pairs, tiles = _plan(expert_ids, num_experts, config.block_m)
    matmul = functools.partial(_grouped_matmul, tiles=tiles, arena=arena, config=config, interpret=interpret)
    exact = x.dtype == jnp.float32
    gate_up = matmul(x, pairs.order // top_k, gate_up_slots, bits[:, 0], layout=geometry.gate_up, exact=exact)
    hidden = gated(gate_up, geometry.activation)
    every_row = jnp.arange(expert_ids.size, dtype=jnp.int32)
    out = matmul(hidden, every_row, down_slots, bits[:, 1], layout=geometry.down, exact=exact)
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
    tile, first = pl.program_id(0), pl.program_id(1) * config.block_n
    active = rows_ref[tile] > 0
    pair = starts_ref[tile]
    expert = jnp.where(active, experts_ref[tile], 0)
    read = _reader(slots_ref, arena_ref, expert, layout)
    bits, source = bits_ref[expert], source_ref[pair]
    row = first + jnp.arange(config.block_n, dtype=jnp.int32)
    lane = jnp.arange(_LANES, dtype=jnp.int32)

    def step(index, total):
        word = index * config.block_words + jnp.arange(config.block_words, dtype=jnp.int32)
        column = word[:, None] * _LANES + lane[None, :]
        x = plt.load(x_ref.at[source, column], mask=column < layout.cols, other=0.0).astype(jnp.float32)
        mask = (row < layout.rows)[:, None] & (word < layout.words_per_row)[None, :]
        return total + _decode(read, row[:, None], word[None, :], mask, bits, layout) * x[None]

    total = jnp.zeros((config.block_n, config.block_words, _LANES), jnp.float32)
    steps = jnp.where(active, jnp.int32(pl.cdiv(layout.words_per_row, config.block_words)), 0)
    total = lax.fori_loop(0, steps, step, total)
    total = jnp.sum(jnp.sum(total, axis=2), axis=1)
    mask = (row < layout.rows) & active
    plt.store(out_ref.at[pair, row], total * _row_scales(read, row, mask, layout), mask=mask)


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
    tile, first = pl.program_id(0), pl.program_id(1) * config.block_n
    rows = rows_ref[tile]
    expert = jnp.where(rows > 0, experts_ref[tile], 0)
    read = _reader(slots_ref, arena_ref, expert, layout)
    bits = bits_ref[expert]
    member = jnp.arange(config.block_m, dtype=jnp.int32)
    pair = starts_ref[tile] + member
    source = plt.load(source_ref.at[pair], mask=member < rows, other=0)
    row = first + jnp.arange(config.block_n, dtype=jnp.int32)
    lane = jnp.arange(_LANES, dtype=jnp.int32)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT

    def step(word, total):
        column = word * _LANES + lane
        mask = (member < rows)[:, None] & (column < layout.cols)[None, :]
        x = plt.load(x_ref.at[source[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        weights = _decode(read, row, word, row < layout.rows, bits, layout)
        return total + jnp.dot(x, weights.T, precision=precision, preferred_element_type=jnp.float32)

    steps = jnp.where(rows > 0, jnp.int32(layout.words_per_row), 0)
    total = lax.fori_loop(0, steps, step, jnp.zeros((config.block_m, config.block_n), jnp.float32))
    real_row = (row < layout.rows) & (rows > 0)
    total = total * _row_scales(read, row, real_row, layout)[None, :]
    plt.store(out_ref.at[pair[:, None], row[None, :]], total, mask=(member < rows)[:, None] & real_row[None, :])


_Reader = Callable[[jax.Array, jax.Array], jax.Array]
"""Word numbers of a linear-block (from its first slot) and a mask to uint32 words; 0 where masked."""


def _reader(slots_ref, arena_ref, expert, layout: BlockLayout) -> _Reader:
    def read(word: jax.Array, mask: jax.Array) -> jax.Array:
        slot = plt.load(slots_ref.at[expert, lax.div(word, jnp.int32(layout.slot_words))], mask=mask, other=0)
        return plt.load(arena_ref.at[slot, lax.rem(word, jnp.int32(layout.slot_words))], mask=mask, other=0)

    return read


def _decode(read: _Reader, row, word, mask, bits, layout: BlockLayout) -> jax.Array:
    """LUT entries, without the row scale, of the 32 columns of each word: float32 `[*mask.shape, 32]`.

    Columns past K decode to an entry of the LUT (their index is 0): finite, to be multiplied by a zero.
    """
    shape = (*mask.shape, _LANES)
    lane = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    address = row * layout.words_per_row + word

    def add_plane(plane, index):
        packed = read(_plane_start(plane, layout) + address, mask)
        bit = (lax.broadcast_in_dim(packed, shape, tuple(range(mask.ndim))) >> lane) & 1
        return index * 2 + bit.astype(jnp.int32)

    index = lax.fori_loop(0, bits, add_plane, jnp.zeros(shape, jnp.int32))
    half_bits = bits - 1
    group = jnp.broadcast_to(lax.div(row, jnp.int32(layout.lut_rows)), mask.shape)
    group = lax.broadcast_in_dim(group, shape, tuple(range(mask.ndim)))
    entry = _lut_start(bits, layout) + (group << half_bits) + (index & ((1 << half_bits) - 1))
    words = read(entry, lax.broadcast_in_dim(mask, shape, tuple(range(mask.ndim))))
    half = (words >> ((index >> half_bits) * 16).astype(jnp.uint32)) & 0xFFFF
    return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _row_scales(read: _Reader, row, mask, layout: BlockLayout) -> jax.Array:
    return lax.bitcast_convert_type(read(layout.scale_offset_words + row, mask), jnp.float32)


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
