"""Writes keys and values into arena slots: one scatter of whole pieces of rows, in place when the arena is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.paged_attention.packing import pack_rows


def write_kv(
    arena: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_table: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    layer: int,
    geometry: KVGeometry,
) -> jax.Array:
    """Stores the keys and values of new tokens.

    Args:
        arena: uint32 `[num_slots, slot_words]`; donate it, or XLA copies it.
        k: `[S, Q, kv_heads, D]`, already rotated; token j of sequence s goes to position `start[s] + j` of the sequence
            in row `rows[s]` of `kv_table`, and is dropped where `j >= length[s]`.
        v: like `k`.
        kv_table: int32 `[R, max_blocks, block_slots]`: arena slots of every KV block of every row.
        rows, start, length: int32 `[S]`.
        layer: index of the layer among those of its attention type.

    Returns:
        The arena.
    """
    slots, columns = _destinations(kv_table, rows, start, length, k.shape[1], layer, geometry, arena.shape[0])
    words = jnp.stack([pack_rows(k, geometry), pack_rows(v, geometry)], axis=2)  # [S, Q, 2, row_words]
    where = jnp.stack([slots, columns], axis=-1).reshape(-1, 2)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(
        arena,
        where,
        words.reshape(-1, geometry.chunk_words),
        dimensions,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _destinations(kv_table, rows, start, length, queries: int, layer: int, geometry: KVGeometry, num_slots: int):
    """Slot and column of every piece of `chunk_words`, int32 `[S, Q, 2, pieces]`; slot `num_slots` is dropped."""
    pieces = geometry.row_words // geometry.chunk_words
    offset = jnp.arange(queries, dtype=jnp.int32)
    position = start[:, None] + offset  # [S, Q]
    row_starts = jnp.array([geometry.row_offset_words(layer, side) for side in (0, 1)], jnp.int32)
    word = (position % geometry.block_size)[..., None, None] * geometry.row_words + row_starts[:, None]
    word = word + jnp.arange(pieces, dtype=jnp.int32) * geometry.chunk_words
    index = (rows[:, None, None, None], (position // geometry.block_size)[..., None, None], word // geometry.slot_words)
    slot = kv_table.at[index].get(mode="fill", fill_value=num_slots)
    real = (offset < length[:, None])[..., None, None]
    return jnp.where(real, slot, num_slots), word % geometry.slot_words
