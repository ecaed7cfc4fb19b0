"""`paged_attention` for NVIDIA GPUs: Pallas, Triton backend.

One program computes a tile of queries of one sequence for all the heads that share one KV head, and walks over the
context in blocks of keys with an online softmax. Keys and values are read straight from their slots by pointer loads
(`.at[slot, column]`, never a flat index, which would pass 2**31 in a large arena).

A bfloat16 word holds elements d and d + D/2 of a head, so heads are handled as two halves: the score is the sum of two
products, and the output has two accumulators. float32 heads are one part.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.layout import KVGeometry

_MASKED = -1e30  # finite, so that differences of two masked scores are 0 and not NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, powers of two from 16: rows (queries x heads of a group) and keys a step."""

    block_rows: int
    block_keys: int = 32
    num_warps: int = 4
    num_stages: int = 1


def default_config(queries: int, group: int, head_dim: int) -> Config:
    """As many rows as there are, up to what the accumulators leave room for in registers."""
    limit = 64 if head_dim <= 128 else 32
    return Config(block_rows=max(pl.next_power_of_2(group), min(limit, max(16, pl.next_power_of_2(queries * group)))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    geometry: KVGeometry
    config: Config
    layer: int
    scale: float
    window: int
    group: int
    precision: lax.Precision

    @property
    def tile_queries(self) -> int:
        return self.config.block_rows // self.group

    @property
    def parts(self) -> int:
        return 2 if self.geometry.dtype == "bfloat16" else 1

    @property
    def width(self) -> int:
        """`head_words` padded to what `dot` takes."""
        return max(16, pl.next_power_of_2(self.geometry.head_words))


def paged_attention(
    q: jax.Array,
    arena: jax.Array,
    kv_table: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    layer: int,
    geometry: KVGeometry,
    scale: float,
    window: int,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `api.paged_attention`. bfloat16 q multiplies in TF32, which holds bfloat16 keys and values exactly."""
    sequences, queries, heads, head_dim = q.shape
    group = heads // geometry.num_kv_heads
    static = _Static(
        geometry=geometry,
        config=config or default_config(queries, group, head_dim),
        layer=layer,
        scale=scale,
        window=window,
        group=group,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
    return pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(sequences, geometry.num_kv_heads, pl.cdiv(queries, static.tile_queries)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=static.config.num_warps, num_stages=static.config.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(rows, start, length, kv_table, q, arena)


def _kernel(rows_ref, start_ref, length_ref, table_ref, q_ref, arena_ref, out_ref, *, static: _Static):
    sequence, kv_head = pl.program_id(0), pl.program_id(1)
    first_query = pl.program_id(2) * static.tile_queries
    start, length = start_ref[sequence], length_ref[sequence]
    member = jnp.arange(static.config.block_rows, dtype=jnp.int32)
    query = first_query + lax.div(member, jnp.int32(static.group))
    head = kv_head * static.group + lax.rem(member, jnp.int32(static.group))
    inside = (member < static.tile_queries * static.group) & (query < q_ref.shape[1])
    last = jnp.where(inside & (query < length), start + query, -1)  # the last key that a row sees
    first = jnp.maximum(last - static.window + 1, 0) if static.window else jnp.zeros_like(last)

    def place(ref, part):
        """Where part `part` of every row's head lies in q or out, and which elements exist."""
        word = jnp.arange(static.width, dtype=jnp.int32)
        exists = inside[:, None] & (word < static.geometry.head_words)[None, :]
        element = part * static.geometry.head_words + word
        return ref.at[sequence, query[:, None], head[:, None], element[None, :]], exists

    q = []
    for part in range(static.parts):
        where, exists = place(q_ref, part)
        q.append(plt.load(where, mask=exists, other=0.0).astype(jnp.float32))
    read = _reader(table_ref, arena_ref, rows_ref[sequence], kv_head, static)

    # A tile without a real query makes no trip, so its row of the table, which may not exist, is not read.
    stop = jnp.where(first_query < length, start + jnp.minimum(first_query + static.tile_queries, length), 0)
    begin = jnp.maximum(start + first_query - static.window + 1, 0) if static.window else jnp.int32(0)

    def step(index, carry):
        peak, total, sums = carry
        position = index * static.config.block_keys + jnp.arange(static.config.block_keys, dtype=jnp.int32)
        live = (position >= begin) & (position < stop)
        keys = read(0, position[None, :], live[None, :], word_axis=0)
        scores = sum(_dot(a, b, static) for a, b in zip(q, keys, strict=True)) * static.scale
        seen = (position[None, :] <= last[:, None]) & (position[None, :] >= first[:, None])
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[:, None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        values = read(1, position[:, None], live[:, None], word_axis=1)
        sums = tuple(s * decay[:, None] + _dot(weights, v, static) for s, v in zip(sums, values, strict=True))
        return new_peak, total * decay + jnp.sum(weights, axis=1), sums

    rows = static.config.block_rows
    zeros = tuple(jnp.zeros((rows, static.width), jnp.float32) for _ in range(static.parts))
    init = (jnp.full((rows,), _MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32), zeros)
    keys_a_step = static.config.block_keys
    steps = lax.div(stop + (keys_a_step - 1), jnp.int32(keys_a_step))
    _, total, sums = lax.fori_loop(lax.div(begin, jnp.int32(keys_a_step)), steps, step, init)
    # A padded query saw nothing: its sums are zero, and so is its output.
    total = jnp.where(total > 0, total, 1.0)
    for part in range(static.parts):
        where, exists = place(out_ref, part)
        plt.store(where, (sums[part] / total[:, None]).astype(out_ref.dtype), mask=exists)


def _dot(left: jax.Array, right: jax.Array, static: _Static) -> jax.Array:
    return jnp.dot(left, right, precision=static.precision, preferred_element_type=jnp.float32)


def _reader(table_ref, arena_ref, row, kv_head, static: _Static):
    geometry = static.geometry

    def read(side: int, position: jax.Array, live: jax.Array, *, word_axis: int) -> tuple[jax.Array, ...]:
        """The float32 parts of keys (side 0) or values (1): words along `word_axis`, positions along the other."""
        shape = (static.width, 1) if word_axis == 0 else (1, static.width)
        column = lax.broadcasted_iota(jnp.int32, shape, word_axis)
        token = lax.rem(position, jnp.int32(geometry.block_size))
        block = lax.div(position, jnp.int32(geometry.block_size))
        offset = geometry.row_offset_words(static.layer, side) + kv_head * geometry.head_words
        word = offset + token * geometry.row_words + column
        mask = live & (column < geometry.head_words)
        width = jnp.int32(geometry.slot_words)
        slot = plt.load(table_ref.at[row, block, lax.div(word, width)], mask=mask, other=0)
        words = plt.load(arena_ref.at[slot, lax.rem(word, width)], mask=mask, other=0)
        if geometry.dtype == "float32":
            return (lax.bitcast_convert_type(words, jnp.float32),)
        low, high = words << 16, words & jnp.uint32(0xFFFF0000)
        return lax.bitcast_convert_type(low, jnp.float32), lax.bitcast_convert_type(high, jnp.float32)

    return read
