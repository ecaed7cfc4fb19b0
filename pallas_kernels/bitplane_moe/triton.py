"""`bitplane_moe` for NVIDIA GPUs: Pallas, Triton backend.

One kernel, called for gate_up and for down: rows of x times the decoded weights of their expert. A program takes up to
`block_m` sorted pairs of one expert and `block_n` rows of W, decodes W tile by tile into registers and multiplies with
tensor cores, so one decoding serves all its pairs, and a batch of one costs no more than its decoding. Few programs
share the columns of W between them (`splits`). `gating` is what lies between both calls; the weighted sum over choices
is XLA's.

Arena and tables are read by pointer loads (`.at[slot, column]`, never a flat index, which would pass 2**31 in a large
arena).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.configs import Config, default_config
from pallas_kernels.bitplane_moe.decoding import Block
from pallas_kernels.bitplane_moe.gating import gate_rows
from pallas_kernels.bitplane_moe.halves import HalfRows, row_scale, split_rows
from pallas_kernels.bitplane_moe.layout import BITS, MAX_BYTE_TABLE_BITS, BlockLayout, MoEGeometry
from pallas_kernels.bitplane_moe.routing import Tiles, plan_tiles


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
    static: dict[str, Any] = dict(tiles=tiles, tables=tables, interpret=interpret)
    first, second = (
        _Unit(index=unit, first_slot=start, layout=layout, config=config, max_bits=geometry.max_bits)
        for unit, (start, layout, config) in enumerate(
            zip((0, geometry.gate_up.total_slots), (geometry.gate_up, geometry.down), configs, strict=True)
        )
    )
    sums = _grouped_matmul(_rows_of(x, first, exact=exact), pairs.order // top_k, unit=first, **static)
    hidden = gate_rows(
        sums,
        geometry.down,
        second.config.block_words,
        activation=geometry.activation,
        exact=exact,
        interpret=interpret,
    )
    every_row = jnp.asarray(np.arange(expert_ids.size, dtype=np.int32))
    out = _grouped_matmul(hidden, every_row, unit=second, **static)
    # Rows of padding were never written: `where`, not a product with zero.
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    picked = jnp.where(real[..., None, None], out[pairs.position], 0.0)
    y = jnp.sum(picked * jnp.where(real, expert_weights, 0.0)[..., None, None], axis=(1, 2))
    return y.astype(x.dtype), jnp.where(real, hidden.bounds[pairs.position], 0.0)


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
    unit = _Unit(index=0, first_slot=0, layout=layout, config=config, max_bits=max_bits)
    rows = _rows_of(x, unit, exact=exact)
    return _grouped_matmul(rows, pairs.order, tiles=tiles, tables=tables, unit=unit, interpret=interpret).sum(axis=1)


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

    @property
    def part_rows(self) -> int:
        """Parts, up to a power of two."""
        return pl.next_power_of_2(self.parts)


def _rows_of(x: jax.Array, unit: _Unit, *, exact: bool) -> HalfRows:
    bounds = jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)
    return split_rows(x, bounds, unit.layout, unit.config.block_words, exact=exact)


def _grouped_matmul(
    rows: HalfRows, source: jax.Array, *, tiles: Tiles, tables: Tables, unit: _Unit, interpret: bool
) -> jax.Array:
    """float32 `[P, splits, N]`: row r, summed over splits, is `W[expert of r] @ x[source[r]]`; rows of no tile are not
    written."""
    layout, config = unit.layout, unit.config
    static = _Static(unit=unit, parts=rows.columns.shape[1], interpret=interpret)
    return pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pl.cdiv(layout.rows, config.block_n), tiles.experts.shape[0], config.splits),
        out_shape=jax.ShapeDtypeStruct((source.shape[0], config.splits, layout.rows), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="bitplane_matmul",
    )(*tiles, source, *rows, *tables)


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
        x = _Activations.load(x_ref, source_ref, starts_ref[tile], count, static)
        # Loaded here, where other loads hide them.
        bounds = plt.load(bounds_ref.at[source], mask=member < count, other=0.0)
        scales = block.row_scales()
        branches = [functools.partial(_sum_columns, block, x, split, bits, static) for bits in _branches(static)]
        total = lax.switch(bits_ref[layer, expert, unit.index] - BITS[0], branches)
        if static.part_rows > 1:
            total = total.reshape(config.block_n, static.part_rows, config.block_m).sum(axis=1)
        total = total * scales[:, None] * row_scale(bounds, inverse=True)[None, :]
        mask = (block.row < unit.layout.rows)[:, None] & (member < count)[None, :]
        plt.store(out_ref.at[pair[None, :], split, block.row[:, None]], total, mask=mask)


def _branches(static: _Static) -> range:
    return range(BITS[0], static.unit.max_bits + 1)


def _sum_columns(block: Block, x: _Activations, split: jax.Array, bits: int, static: _Static) -> jax.Array:
    """float32 `[block_n, part_rows * block_m]`: the split's columns of W times x."""
    config = static.unit.config
    size = config.words_at(bits)
    decode = block.decoder(bits)
    steps = pl.cdiv(static.unit.layout.words_per_row, size)
    share = pl.cdiv(steps, config.splits)
    first = split * share
    last = jnp.minimum(first + share, steps)
    zeros = jnp.zeros((config.block_n, static.part_rows * config.block_m), jnp.float32)

    def add(weights, index, total):
        return total + jnp.dot(weights, x.tile(index, size).T, preferred_element_type=jnp.float32)

    def tile(index):
        return decode(block.words(bits, index, size))

    if bits <= MAX_BYTE_TABLE_BITS:
        return lax.fori_loop(first, last, lambda index, total: add(tile(index), index, total), zeros)

    # Entries are looked up a step ahead: those that a product of the same step waits for, Triton would copy to shared
    # memory one by one.
    def step(index, carry):
        weights, total = carry
        return tile(index + 1), add(weights, index, total)

    return lax.fori_loop(first, last, step, (tile(first), zeros))[1]


@dataclasses.dataclass(frozen=True)
class _Activations:
    """The rows of x that a tile multiplies. Parts of a row are rows of their own, so that W is decoded once for all."""

    x_ref: Any
    source: jax.Array
    part: jax.Array
    real: jax.Array

    @classmethod
    def load(cls, x_ref, source_ref, start: jax.Array, count: jax.Array, static: _Static) -> _Activations:
        """Of `count` pairs from sorted position `start` on."""
        block_m = static.unit.config.block_m
        row = jnp.arange(static.part_rows * block_m, dtype=jnp.int32)
        member, part = row & (block_m - 1), row // block_m
        real = (member < count) & (part < static.parts)
        return cls(x_ref, plt.load(source_ref.at[start + member], mask=real, other=0), part, real)

    def tile(self, index: jax.Array, words: int) -> jax.Array:
        """float16 `[part_rows * block_m, 32 * words]`, the columns of a tile of weights."""
        column = 32 * words * index + jnp.arange(32 * words, dtype=jnp.int32)
        where = self.x_ref.at[self.source[:, None], self.part[:, None], column[None, :]]
        mask = jnp.broadcast_to(self.real[:, None], (self.source.shape[0], 32 * words))
        return plt.load(where, mask=mask, other=0.0)
