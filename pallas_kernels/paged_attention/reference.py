"""`paged_attention` in plain jnp: the oracle of the kernel, and what runs where there is no NVIDIA GPU.

Softmax is taken online over chunks of KV blocks, so the largest intermediate is `[chunk of queries x chunk of keys]`,
and the number of chunks follows the longest context of the call. The loop closes over the arena: carrying it would make
XLA copy it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.paged_attention.packing import unpack_rows

CHUNK_BLOCKS = 8
_MASKED = -1e30  # finite, so that differences of two masked scores are 0 and not NaN


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
) -> jax.Array:
    """See `api.paged_attention`."""
    sequences, queries, heads, head_dim = q.shape
    kv_heads, group = geometry.num_kv_heads, heads // geometry.num_kv_heads
    chunk_tokens = CHUNK_BLOCKS * geometry.block_size
    # [S, kv_heads, Q * group, D]: the queries that share keys are rows of one matrix.
    grouped = (q.astype(jnp.float32) * scale).reshape(sequences, queries, kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(sequences, kv_heads, queries * group, head_dim)

    offset = jnp.arange(queries, dtype=jnp.int32)
    last = jnp.where(offset < length[:, None], start[:, None] + offset, -1)  # [S, Q]: the last key that a query sees
    first = jnp.maximum(last - window + 1, 0) if window else jnp.zeros_like(last)
    oldest = jnp.maximum(start - window + 1, 0) if window else jnp.zeros_like(start)  # [S]: what any query sees
    end = jnp.where(length > 0, start + length, 0)
    tables = kv_table.at[rows].get(mode="fill", fill_value=0)  # [S, max_blocks, block_slots]
    last_row, first_row = (jnp.repeat(bound, group, axis=1)[:, None, :, None] for bound in (last, first))

    def add_chunk(chunk: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, sums = carry
        positions = chunk * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        keys, values = _read_chunk(arena, tables, chunk, oldest, end, layer, geometry)
        scores = _batched("shmd,sthd->shmt", grouped, keys)
        seen = (positions <= last_row) & (positions >= first_row)
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        sums = sums * decay[..., None] + _batched("shmt,sthd->shmd", weights, values)
        return new_peak, total * decay + jnp.sum(weights, axis=-1), sums

    shape = grouped.shape[:3]
    init = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(grouped.shape))
    chunks = (jnp.max(end) + chunk_tokens - 1) // chunk_tokens
    first_chunk = jnp.min(jnp.where(length > 0, oldest, jnp.max(end))) // chunk_tokens
    _, total, sums = lax.fori_loop(first_chunk, chunks, add_chunk, init)
    # A padded query saw nothing: its sums are zero, and so is its output.
    out = sums / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(sequences, kv_heads, queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape).astype(q.dtype)


def _batched(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST)


def _read_chunk(arena, tables, chunk, oldest, end, layer: int, geometry: KVGeometry) -> tuple[jax.Array, jax.Array]:
    """float32 keys and values `[S, chunk_tokens, kv_heads, D]`; zeros where a sequence has no visible token.

    Slots of blocks that no query sees are not used, nor is what lies in a block's tail past the context.
    """
    width, rows_words = geometry.slot_words, geometry.block_size * geometry.row_words
    begin = geometry.row_offset_words(layer, 0)  # keys of the layer, and right behind them its values
    slots = slice(begin // width, -(-(begin + 2 * rows_words) // width))

    block = chunk * CHUNK_BLOCKS + jnp.arange(CHUNK_BLOCKS, dtype=jnp.int32)
    begins = block * geometry.block_size
    live = (begins < end[:, None]) & (begins + geometry.block_size > oldest[:, None])  # [S, blocks]
    ids = tables.at[:, block, slots].get(mode="fill", fill_value=0)
    ids = jnp.where(live[..., None], ids, 0)  # slot 0: a valid address whose words are masked below
    words = arena.at[ids].get(mode="promise_in_bounds")  # [S, blocks, slots, slot_words]
    words = words.reshape(*words.shape[:2], -1)[..., begin % width :][..., : 2 * rows_words]
    words = words.reshape(-1, CHUNK_BLOCKS, 2, geometry.block_size, geometry.row_words)

    positions = (begins[:, None] + jnp.arange(geometry.block_size, dtype=jnp.int32))[..., None]
    real = (positions < end[:, None, None, None]) & (positions >= oldest[:, None, None, None])
    keys_values = jnp.where(real[:, :, None], words, jnp.uint32(0))
    keys_values = unpack_rows(keys_values, geometry)  # [S, blocks, 2, block_size, kv_heads, D]
    flat = (keys_values.shape[0], -1, geometry.num_kv_heads, geometry.head_dim)
    return keys_values[:, :, 0].reshape(flat), keys_values[:, :, 1].reshape(flat)
