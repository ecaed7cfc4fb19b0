"""`bitplane_moe` for NVIDIA GPUs: Pallas, Triton backend.

One kernel, called for gate_up and for down: rows of x times the decoded weights of their expert. A program takes up to
`block_m` sorted pairs of one expert and `block_n` rows of W, decodes W tile by tile into registers and multiplies with
tensor cores, so one decoding serves all its pairs, and a batch of one costs no more than its decoding. Few programs
share the columns of W between them (`splits`). Activation, norms and the weighted sum over choices are XLA's.

Arena and tables are read by pointer loads (`.at[slot, column]`, never a flat index, which would pass 2**31 in a large
arena).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.activation import gated, row_norms
from pallas_kernels.bitplane_moe.decoding import Block
from pallas_kernels.bitplane_moe.halves import row_scale, split_rows
from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout, MoEGeometry
from pallas_kernels.bitplane_moe.routing import Tiles, plan_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of the kernel, all powers of two.

    Attributes:
        block_m: pairs of a tile, at least 16.
        block_n: rows of W, at least 16.
        block_words: words of a row decoded at a time, at least 8; half of it (but 8) above 4 bits.
        splits: programs that share the columns of a row; their sums are added afterwards.
    """

    block_m: int = 16
    block_n: int = 64
    block_words: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n, self.block_words, self.splits)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"{self}: sizes must be powers of two")
        if min(self.block_m, self.block_n, 2 * self.block_words) < 16:
            raise ValueError(f"{self}: tensor cores multiply blocks of at least 16")

    def words_at(self, bits: int) -> int:
        """Words decoded at a time: more planes and tables leave room for fewer."""
        return self.block_words if bits <= 4 else max(8, self.block_words // 2)


UNROLLED_BITS = 4
"""Above, quarters are a loop that loads the words again: the compiler's time grows with the square of the code."""
_PROGRAMS = 396  # three for each of the 132 multiprocessors of an H200


def default_config(pairs: int, num_experts: int, layout: BlockLayout, *, exact: bool) -> Config:
    """Tiles of about as many pairs as an expert gets, and enough programs to fill the chip."""
    mean = pairs // num_experts
    # The three parts of float32 rows fill shared memory.
    block_m = 16 if mean <= 16 or exact else 32 if mean <= 32 else 64
    # Eight warps hold the sums of many pairs without spilling, and share their tiles of x.
    block_n, num_warps = (64, 4) if block_m == 16 else (128, 8)
    block_words = 16 if layout.words_per_row >= 16 else 8
    tiles = min(pairs, num_experts + pairs // block_m)
    programs = tiles * pl.cdiv(layout.rows, block_n)
    splits = 1
    while 2 * splits * programs <= _PROGRAMS and 2 * splits * block_words <= layout.words_per_row:
        splits *= 2
    return Config(
        block_m=block_m,
        block_n=block_n,
        block_words=block_words,
        splits=splits,
        num_warps=num_warps,
        num_stages=3 if block_m == 16 and not exact else 2,
    )


def bitplane_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    slots: jax.Array,
    bits: jax.Array,
    arena: jax.Array,
    *,
    layer: int,
    geometry: MoEGeometry,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.bitplane_moe`."""
    num_experts, top_k, exact = bits.shape[1], expert_ids.shape[1], x.dtype == jnp.float32
    configs = [
        config or default_config(expert_ids.size, num_experts, layout, exact=exact)
        for layout in (geometry.gate_up, geometry.down)
    ]
    pairs, tiles = plan_tiles(expert_ids, num_experts, configs[0].block_m)
    tables = Tables(slots, bits, arena, jnp.asarray([layer], jnp.int32))
    static: dict[str, Any] = dict(tiles=tiles, tables=tables, exact=exact, interpret=interpret)
    first, second = (
        _Unit(index=unit, first_slot=start, layout=layout, config=config, max_bits=geometry.max_bits)
        for unit, (start, layout, config) in enumerate(
            zip((0, geometry.gate_up.total_slots), (geometry.gate_up, geometry.down), configs, strict=True)
        )
    )
    bounds = jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)
    hidden = gated(_grouped_matmul(x, bounds, pairs.order // top_k, unit=first, **static), geometry.activation)
    norms = row_norms(hidden)
    every_row = jnp.asarray(np.arange(expert_ids.size, dtype=np.int32))
    out = _grouped_matmul(hidden, norms, every_row, unit=second, **static)
    # Rows of padding were never written: `where`, not a product with zero.
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    picked = jnp.where(real[..., None], out[pairs.position], 0.0)
    y = jnp.sum(picked * jnp.where(real, expert_weights, 0.0)[..., None], axis=1)
    return y.astype(x.dtype), jnp.where(real, norms[pairs.position], 0.0)


def matmul(
    x: jax.Array,
    slots: jax.Array,
    bits: jax.Array,
    arena: jax.Array,
    *,
    layout: BlockLayout,
    config: Config | None = None,
    max_bits: int = BITS[-1],
    interpret: bool = False,
) -> jax.Array:
    """float32 `[T, N]`: `x @ W.T` for one linear-block.

    Args:
        x: `[T, K]`, bfloat16 or float32.
        slots: int32 `[total_slots]`.
        bits: int32 scalar.
        arena: uint32 `[num_slots, slot_words]`.
    """
    exact = x.dtype == jnp.float32
    config = config or default_config(x.shape[0], 1, layout, exact=exact)
    pairs, tiles = plan_tiles(jnp.zeros((x.shape[0], 1), jnp.int32), 1, config.block_m)
    tables = Tables(slots[None, None], bits[None, None, None], arena, jnp.zeros(1, jnp.int32))
    return _grouped_matmul(
        x,
        jnp.max(jnp.abs(x), axis=1).astype(jnp.float32),
        pairs.order,
        tiles=tiles,
        tables=tables,
        unit=_Unit(index=0, first_slot=0, layout=layout, config=config, max_bits=max_bits),
        exact=exact,
        interpret=interpret,
    )


class Tables(NamedTuple):
    """Where weights are, and at how many bits; `layer`, int32 `[1]`, is data so that layers share a kernel."""

    slots: jax.Array
    bits: jax.Array
    arena: jax.Array
    layer: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unit:
    """Which linear-blocks a call multiplies, and how."""

    index: int  # in the last axis of `Tables.bits`
    first_slot: int  # in the last axis of `Tables.slots`
    layout: BlockLayout
    config: Config
    max_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    unit: _Unit
    parts: int
    interpret: bool


def _grouped_matmul(
    x: jax.Array,
    bounds: jax.Array,
    source: jax.Array,
    *,
    tiles: Tiles,
    tables: Tables,
    unit: _Unit,
    exact: bool,
    interpret: bool,
) -> jax.Array:
    """float32 `[P, N]`: row r is `W[expert of r] @ x[source[r]]`; rows of no tile are not written."""
    layout, config = unit.layout, unit.config
    rows = split_rows(x, bounds, layout, config.block_words, exact=exact)
    static = _Static(unit=unit, parts=rows.quarters.shape[1], interpret=interpret)
    sums = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pl.cdiv(layout.rows, config.block_n), tiles.experts.shape[0], config.splits),
        out_shape=jax.ShapeDtypeStruct((source.shape[0], config.splits, layout.rows), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="bitplane_matmul",
    )(*tiles, source, *rows, *tables)
    return functools.reduce(operator.add, (sums[:, split] for split in range(config.splits)))


def _kernel(
    experts_ref, starts_ref, rows_ref, source_ref, x_ref, bounds_ref, slots_ref, bits_ref, arena_ref, layer_ref,
    out_ref, *, static: _Static,
):  # fmt: skip
    """Up to `block_m` sorted pairs of one expert, `block_n` rows of W, and a share of its columns."""
    unit = static.unit
    config = unit.config
    number, tile, split = (pl.program_id(axis) for axis in range(3))
    count = rows_ref[tile]

    @pl.when(count > 0)
    def _():
        layer, expert = layer_ref[0], experts_ref[tile]
        block = Block(
            slots_ref, arena_ref, layer, expert, unit.first_slot, unit.layout, number, config.block_n, static.interpret
        )
        member = jnp.arange(config.block_m, dtype=jnp.int32)
        pair = starts_ref[tile] + member
        source = plt.load(source_ref.at[pair], mask=member < count, other=0)
        x = _Activations(x_ref, source, member < count)
        branches = [functools.partial(_sum_columns, block, x, split, bits, static) for bits in _branches(static)]
        total = lax.switch(bits_ref[layer, expert, unit.index] - BITS[0], branches)
        bounds = plt.load(bounds_ref.at[source], mask=member < count, other=0.0)
        total = total * block.row_scales()[:, None] * row_scale(bounds, inverse=True)[None, :]
        mask = (block.row < unit.layout.rows)[:, None] & (member < count)[None, :]
        plt.store(out_ref.at[pair[None, :], split, block.row[:, None]], total, mask=mask)


def _branches(static: _Static) -> range:
    return range(BITS[0], static.unit.max_bits + 1)


def _sum_columns(block: Block, x: _Activations, split: jax.Array, bits: int, static: _Static) -> jax.Array:
    """float32 `[block_n, block_m]`: the split's columns of W times x."""
    config = static.unit.config
    size = config.words_at(bits)
    decode = block.decoder(bits)
    steps = pl.cdiv(static.unit.layout.words_per_row, size)
    share = pl.cdiv(steps, config.splits)

    def add_tile(words, index, quarter, total):
        weights = decode(words, quarter)
        for part in range(static.parts):
            columns = x.tile(part, quarter, index, size)
            total = total + jnp.dot(weights, columns.T, preferred_element_type=jnp.float32)
        return total

    def add_block(index, total):
        words = block.words(bits, index, size)
        for quarter in range(4):
            total = add_tile(words, index, quarter, total)
        return total

    def add_quarter(number, total):
        index = number >> 2
        return add_tile(block.words(bits, index, size), index, number & 3, total)

    first = split * share
    last = jnp.minimum(first + share, steps)
    zeros = jnp.zeros((config.block_n, config.block_m), jnp.float32)
    if bits <= UNROLLED_BITS:
        return lax.fori_loop(first, last, add_block, zeros)
    return lax.fori_loop(4 * first, 4 * last, add_quarter, zeros)


@dataclasses.dataclass(frozen=True)
class _Activations:
    """The rows of x that a tile multiplies."""

    x_ref: Any
    source: jax.Array
    real: jax.Array

    def tile(self, part: int, quarter: jax.Array | int, index: jax.Array, words: int) -> jax.Array:
        """float16 `[block_m, 8 * words]`, the columns of a tile of weights."""
        column = 8 * words * index + jnp.arange(8 * words, dtype=jnp.int32)
        where = self.x_ref.at[self.source[:, None], part, quarter, column[None, :]]
        mask = jnp.broadcast_to(self.real[:, None], (self.source.shape[0], 8 * words))
        return plt.load(where, mask=mask, other=0.0)
