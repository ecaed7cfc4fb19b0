"""`write_kv` word for word against NumPy, and in place through a whole step."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.api import bitplane_moe
from pallas_kernels.paged_attention.api import paged_attention, write_kv
from pallas_kernels.testing import attention_cases, moe_cases
from pallas_kernels.testing.attention_cases import AttentionCase

CASES = [
    AttentionCase(),
    AttentionCase(kv_dtype="bfloat16", seed=1),
    AttentionCase(lengths=(1, 0, 1, 0), seed=2),
    AttentionCase(queries=20, starts=(0, 7, 33, 0), lengths=(20, 13, 1, 0), kv_dtype="bfloat16", layer=0, seed=3),
    AttentionCase(queries=20, starts=(5, 12), lengths=(20, 20), slot_words=100, seed=4),  # rows straddle slots
    AttentionCase(heads=6, kv_heads=3, head_dim=24, slot_words=64, kv_dtype="bfloat16", queries=4, seed=5),
    AttentionCase(slot_words=2048, layers=3, layer=2, seed=6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_exactly_the_rows_of_real_tokens(case: AttentionCase) -> None:
    """Everything else in the arena keeps its words, the last slot and slot 0 too."""
    inputs = attention_cases.build(case)
    geometry, rng = case.geometry, np.random.default_rng(case.seed)
    shape = (len(case.starts), case.queries, case.kv_heads, case.head_dim)
    k, v = (attention_cases.round_to(rng.normal(size=shape), case.kv_dtype) for _ in "kv")
    want = inputs.arena.copy()
    for sequence, (start, length) in enumerate(zip(case.starts, case.lengths, strict=True)):
        for j in range(length):
            for side, tensor in enumerate((k, v)):
                blocks = inputs.kv_table[inputs.rows[sequence]]
                attention_cases.store_row(want, geometry, blocks, case.layer, side, start + j, tensor[sequence, j])
    operands = (inputs.arena, k, v, inputs.kv_table, inputs.rows, inputs.start, inputs.length)
    write = jax.jit(functools.partial(write_kv, layer=case.layer, geometry=geometry))
    np.testing.assert_array_equal(np.asarray(write(*map(jnp.asarray, operands))), want)


def test_bfloat16_rounds_to_nearest_even() -> None:
    case = AttentionCase(starts=(0,), lengths=(1,), kv_dtype="bfloat16", layer=0, seed=7)
    inputs = attention_cases.build(case)
    k = np.random.default_rng(7).normal(size=(1, 1, case.kv_heads, case.head_dim)).astype(np.float32)
    operands = (inputs.arena, k, k, inputs.kv_table, inputs.rows, inputs.start, inputs.length)
    arena = jax.jit(functools.partial(write_kv, layer=0, geometry=case.geometry))(*map(jnp.asarray, operands))
    rounded = np.asarray(jnp.asarray(k).astype(jnp.bfloat16), np.float32)[0, 0]
    slot = inputs.kv_table[inputs.rows[0], 0, 0]
    words = np.asarray(arena)[slot, : case.geometry.row_words]
    np.testing.assert_array_equal(words, attention_cases.row_words(rounded, "bfloat16"))


def test_tokens_past_the_table_are_dropped() -> None:
    """A row number or a block that doesn't exist must not wrap to the last one."""
    case = AttentionCase(starts=(0, 0), lengths=(1, 1), seed=8)
    inputs = attention_cases.build(case)
    k = np.ones((2, 1, case.kv_heads, case.head_dim), np.float32)
    rows = np.array([len(inputs.kv_table), inputs.rows[1]], np.int32)
    start = np.array([0, inputs.kv_table.shape[1] * case.block_size], np.int32)
    operands = (inputs.arena, k, k, inputs.kv_table, rows, start, inputs.length)
    arena = jax.jit(functools.partial(write_kv, layer=1, geometry=case.geometry))(*map(jnp.asarray, operands))
    np.testing.assert_array_equal(np.asarray(arena), inputs.arena)


def _step(attention: AttentionCase, moe: moe_cases.MoEInputs):
    """Two unrolled layers as the engine runs them, on one arena."""

    def step(arena, x, moe_operands, kv_table, rows, start, length):
        for layer in range(attention.layers):
            heads = x.reshape(x.shape[0], 1, attention.heads, attention.head_dim)
            kv = heads[:, :, : attention.kv_heads] * (layer + 1)
            arena = write_kv(arena, kv, kv, kv_table, rows, start, length, layer=layer, geometry=attention.geometry)
            out = paged_attention(
                heads, arena, kv_table, rows, start, length, layer=layer, geometry=attention.geometry, scale=0.2
            )
            x = x + out.reshape(x.shape)
            y, _ = bitplane_moe(x, *moe_operands, arena, layer=moe_cases.LAYER, geometry=moe.geometry)
            x = x + y
        return arena, x

    return jax.jit(step, donate_argnums=0)


def test_a_donated_arena_is_updated_in_place() -> None:
    """Invariant 5: same buffer pointer, and no copy of the arena in the optimized HLO."""
    moe = moe_cases.build(moe_cases.MoECase(tokens=4, hidden=128, inner=32, lut_rows=32, seed=9))
    case = AttentionCase(heads=4, head_dim=32, starts=(0, 0, 0, 0), seed=9)  # no context that was never written
    inputs = attention_cases.build(case)
    base = len(moe.arena)
    arena = jnp.asarray(np.concatenate([moe.arena, inputs.arena]))
    table = np.where(inputs.kv_table < len(inputs.arena), inputs.kv_table + base, inputs.kv_table)
    operands = (
        moe.x,
        moe.operands[1:-1],
        table,
        inputs.rows,
        inputs.start,
        inputs.length,
    )
    operands = jax.tree.map(lambda a: jnp.array(a, copy=True), operands)
    compiled = _step(case, moe).lower(arena, *operands).compile()
    shape = rf"u32\[{arena.shape[0]},{arena.shape[1]}\]"
    assert not re.search(rf"= {shape}\S* copy(-start)?\(", compiled.as_text())
    pointer = arena.unsafe_buffer_pointer()
    for _ in range(3):
        arena, x = compiled(arena, *operands)
        x.block_until_ready()
        assert arena.unsafe_buffer_pointer() == pointer
    assert np.isfinite(np.asarray(x)).all()
