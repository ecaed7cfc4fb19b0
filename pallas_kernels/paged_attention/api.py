"""Attention of new tokens over keys and values in arena slots, and the write that precedes it.

`implementation`: `"triton"` is the Pallas kernel for NVIDIA GPUs, `"xla"` plain jnp, `"auto"` the kernel on an NVIDIA
GPU and jnp elsewhere. An explicit choice never falls back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.paged_attention.writing import write_kv
from pallas_kernels.platform import Implementation, resolve_implementation

__all__ = ["KVGeometry", "paged_attention", "resolve_implementation", "write_kv"]


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
    window: int = 0,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`softmax(scale * q K^T + mask) V` for decode (Q = 1) and chunks of prefill, in float32, blockwise over context.

    Query j of sequence s has position `start[s] + j` and is real where `j < length[s]`. It sees the keys at positions
    up to its own (the last `window` of them when `window > 0`). `write_kv` has stored them, the call's own too.

    Args:
        q: `[S, Q, heads, D]`, bfloat16 or float32, rotated.
        arena: uint32 `[num_slots, slot_words]`.
        kv_table: int32 `[R, max_blocks, block_slots]`: arena slots of every KV block of every row. Entries of blocks
            that no query sees are not looked at.
        rows: int32 `[S]`: row of the table of each sequence; R (out of range) for padding.
        start: int32 `[S]`, in tokens.
        length: int32 `[S]`; 0 for padding.
        layer: index of the layer among those of its attention type.
        scale: factor of the scores, positive, usually `D ** -0.5`.
        window: sliding window in tokens; 0 means none.

    Returns:
        `[S, Q, heads, D]` in `q.dtype`; zeros for queries that are not real.

    Raises:
        NotImplementedError: the implementation asked for can't do this here; the message says why.
        ValueError: shapes or dtypes that contradict `geometry`.
    """
    _check(q, arena, kv_table, geometry, layer, window)
    if scale <= 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if resolve_implementation(implementation) == "xla":
        implemented = reference.paged_attention
    else:  # the backend is optional and deprecated: load it when it is used
        from pallas_kernels.paged_attention import triton

        implemented = triton.paged_attention
    operands = (q, arena, kv_table, rows, start, length)
    return implemented(*operands, layer=layer, geometry=geometry, scale=scale, window=window)


def _check(q, arena, kv_table, geometry: KVGeometry, layer: int, window: int) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"q is {q.dtype}; supported are bfloat16 and float32")
    if arena.dtype != jnp.uint32 or arena.shape[1] != geometry.slot_words:
        raise ValueError(f"arena is {arena.dtype}{list(arena.shape)}; expected uint32[.., {geometry.slot_words}]")
    if q.shape[3] != geometry.head_dim or q.shape[2] % geometry.num_kv_heads:
        raise ValueError(
            f"q has {q.shape[2]} heads of {q.shape[3]}; the cache has {geometry.num_kv_heads} of {geometry.head_dim}"
        )
    if kv_table.shape[2] != geometry.block_slots:
        raise ValueError(
            f"kv_table has {kv_table.shape[2]} slots a block; the geometry's blocks have {geometry.block_slots}"
        )
    if not 0 <= layer < geometry.num_layers:
        raise ValueError(f"layer is {layer}; the geometry has {geometry.num_layers}")
    if window < 0:
        raise ValueError(f"window is {window}; 0 means none")
