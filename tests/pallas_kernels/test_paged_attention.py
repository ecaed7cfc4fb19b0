"""`paged_attention` against float64 NumPy, on every implementation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, triton
from pallas_kernels.paged_attention.configs import Config, Work, default_config
from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.testing.attention_cases import TAILS, AttentionCase, AttentionInputs, build, expected

# Largest error over the largest value: float32 throughout, or one rounding to bfloat16.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8}


def run(bind, inputs: AttentionInputs, **changes) -> np.ndarray:
    case = inputs.case
    op = bind(
        api.paged_attention,
        triton.paged_attention,
        layer=case.layer,
        geometry=case.geometry,
        scale=case.head_dim**-0.5,
        window=case.window,
    )
    operands = dict(
        q=inputs.q,
        arena=inputs.arena,
        kv_table=inputs.kv_table,
        rows=inputs.rows,
        start=inputs.start,
        length=inputs.length,
    )
    operands |= changes
    q, *rest = operands.values()
    out = op(jnp.asarray(q, case.dtype), *map(jnp.asarray, rest))
    assert out.dtype == case.dtype and out.shape == q.shape
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_matches_float64(bind, case: AttentionCase) -> None:
    inputs = build(case)
    out, want = run(bind, inputs), expected(inputs, case.head_dim**-0.5)
    assert np.abs(out - want).max() <= TOLERANCE[case.dtype] * max(np.abs(want).max(), 1e-6)


_SPECULATIVE = AttentionCase(queries=3, starts=(200, 17, 3, 9), lengths=(3, 1, 2, 0), kv_dtype="bfloat16", seed=35)
_CHUNK = AttentionCase(queries=20, starts=(150, 0), lengths=(20, 13), heads=6, kv_dtype="bfloat16", seed=36)
CONFIGS = [
    (_SPECULATIVE, Config(body="vector", splits=4, block_keys=32)),
    (dataclasses.replace(_SPECULATIVE, window=20), Config(body="vector", splits=2, block_keys=64)),
    (dataclasses.replace(_SPECULATIVE, window=1), Config(body="vector", block_keys=32, team_words=4, num_warps=1)),
    (AttentionCase(starts=(300,), lengths=(1,), seed=37), Config(body="vector", splits=8, block_keys=16, num_warps=1)),
    (_CHUNK, Config(body="matrix", splits=4, block_keys=16, block_rows=16)),
    (dataclasses.replace(_CHUNK, window=33), Config(body="matrix", splits=2, block_keys=32, block_rows=64)),
    (dataclasses.replace(_CHUNK, dtype="bfloat16"), Config(body="matrix", block_keys=64, block_rows=128, num_stages=2)),
]


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case, config", CONFIGS, ids=str)
def test_every_way_to_cut_the_work(case: AttentionCase, config: Config, interpret: bool) -> None:
    inputs = build(case)
    static = dict(layer=case.layer, geometry=case.geometry, scale=case.head_dim**-0.5, window=case.window)
    op = jax.jit(functools.partial(triton.paged_attention, **static, config=config, interpret=interpret))
    operands = (inputs.arena, inputs.kv_table, inputs.rows, inputs.start, inputs.length)
    out = np.asarray(op(jnp.asarray(inputs.q, case.dtype), *map(jnp.asarray, operands)), np.float32)
    want = expected(inputs, case.head_dim**-0.5)
    assert np.abs(out - want).max() <= TOLERANCE[case.dtype] * np.abs(want).max()


@pytest.mark.parametrize("group", [1, 3, 4, 71])
@pytest.mark.parametrize("queries", [1, 4, 256, 8192])
@pytest.mark.parametrize("exact", [True, False])
def test_a_default_configuration_for_every_shape(group: int, queries: int, exact: bool) -> None:
    """Tiles hold a group, and one long sequence fills a device that 64 short ones don't overflow."""
    for head_dim in (32, 80, 128, 256):
        geometry = KVGeometry(num_layers=2, num_kv_heads=8, head_dim=head_dim, slot_words=4096)
        of = dict(queries=queries, heads=8 * group, max_context=32768, geometry=geometry, exact=exact)
        one, many = (default_config(Work(sequences=sequences, **of)) for sequences in (1, 64))
        assert one.body == "vector" or one.block_rows >= group
        assert one.splits >= many.splits
        if queries == 1:
            assert 64 < 8 * one.splits <= 132 * 16


def test_rows_do_not_depend_on_their_batch_mates(bind) -> None:
    """Bit for bit: a long neighbour adds trips to the loop, padding takes them away."""
    case = AttentionCase(starts=(21, 300, 40), lengths=(1, 1, 1), seed=31)
    inputs = build(case)
    alone = run(bind, inputs, length=np.array([1, 0, 1], np.int32))
    together = run(bind, inputs)
    np.testing.assert_array_equal(alone[[0, 2]], together[[0, 2]])
    assert not alone[1].any()


@pytest.mark.parametrize("kv_dtype, chunk", [("float32", 1), ("bfloat16", 7), ("float32", 16)])
def test_chunked_prefill_equals_one_shot(bind, kv_dtype: str, chunk: int) -> None:
    """The keys are stored already, so a chunk is a view of the same call. Sums may differ in order only."""
    case = AttentionCase(queries=37, starts=(0,), lengths=(37,), kv_dtype=kv_dtype, window=11, seed=32)
    inputs = build(case)
    whole = run(bind, inputs)
    for start in range(0, 37, chunk):
        length = min(chunk, 37 - start)
        q = np.zeros((1, chunk, *inputs.q.shape[2:]), np.float32)
        q[:, :length] = inputs.q[:, start : start + length]
        part = run(bind, inputs, q=q, start=np.array([start], np.int32), length=np.array([length], np.int32))
        np.testing.assert_allclose(part[:, :length], whole[:, start : start + length], rtol=0, atol=2e-6)
        assert not part[:, length:].any()
        if start + 2 * chunk < 37 and start > 2 * chunk:
            break  # the first chunks and a later one are enough


def test_scores_are_never_a_matrix_of_context_by_chunk() -> None:
    """Temporary memory of the reference does not grow with the context."""

    def temp_bytes(start: int) -> int:
        inputs = build(AttentionCase(queries=32, starts=(start,), lengths=(32,), kv_heads=1, seed=33))
        case = inputs.case
        op = jax.jit(
            lambda *operands: api.paged_attention(
                *operands, layer=1, geometry=case.geometry, scale=1.0, implementation="xla"
            )
        )
        operands = (inputs.q, inputs.arena, inputs.kv_table, inputs.rows, inputs.start, inputs.length)
        return op.lower(*map(jnp.asarray, operands)).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(1600) < temp_bytes(200) * 1.2


def test_large_scores_do_not_overflow(bind) -> None:
    inputs = build(AttentionCase(starts=(40,), lengths=(1,), seed=34))
    big = dataclasses.replace(inputs, q=inputs.q * 1e4)
    out, want = run(bind, big), expected(big, inputs.case.head_dim**-0.5)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, want, atol=1e-3)


def test_explicit_triton_never_falls_back() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    inputs = build(AttentionCase())
    operands = (inputs.q, inputs.arena, inputs.kv_table, inputs.rows, inputs.start, inputs.length)
    static = dict(layer=1, geometry=inputs.case.geometry, scale=1.0)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        api.paged_attention(*map(jnp.asarray, operands), **static, implementation="triton")
    with pytest.raises(ValueError, match="must be 'auto', 'triton' or 'xla'"):
        api.paged_attention(*map(jnp.asarray, operands), **static, implementation="mosaic")


def test_contradictions_with_the_geometry_are_refused() -> None:
    inputs = build(AttentionCase())
    geometry = inputs.case.geometry
    operands = [jnp.asarray(a) for a in (inputs.q, inputs.arena, inputs.kv_table, inputs.rows, inputs.start)]
    length = jnp.asarray(inputs.length)
    with pytest.raises(ValueError, match="layer is 2"):
        api.paged_attention(*operands, length, layer=2, geometry=geometry, scale=1.0)
    with pytest.raises(ValueError, match="slots a block"):
        api.paged_attention(
            *operands[:2], operands[2][:, :, :-1], *operands[3:], length, layer=0, geometry=geometry, scale=1.0
        )
