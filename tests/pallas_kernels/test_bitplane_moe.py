"""`bitplane_moe` against float64 NumPy, on every implementation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe import api, triton
from pallas_kernels.bitplane_moe.layout import dequantize_pages, pack_page
from pallas_kernels.bitplane_moe.reference import decode_block
from pallas_kernels.testing.moe_cases import LAYER, TAILS, MoECase, MoEInputs, build, expected, lowered

# Largest error over the largest value. float32 sums of up to 704 terms, which a GPU's tensor cores truncate rather than
# round (6e-6 over 4,096 terms on an H200); then one rounding to bfloat16.
SUM_TOLERANCE = 2e-6 if jax.default_backend() == "cpu" else 2e-5
TOLERANCE = {"float32": SUM_TOLERANCE, "bfloat16": 2**-8}


def run(bind, inputs: MoEInputs, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    op = bind(api.bitplane_moe, triton.bitplane_moe, layer=LAYER, geometry=inputs.geometry)
    x, *rest = inputs.operands
    y, norms = op(jnp.asarray(x, dtype), *map(jnp.asarray, rest))
    assert y.dtype == dtype and norms.dtype == jnp.float32
    return np.asarray(y, np.float32), np.asarray(norms)


def assert_matches(result: tuple[np.ndarray, np.ndarray], inputs: MoEInputs, dtype: str = "float32") -> None:
    """float16 holds bfloat16 inputs exactly, and rounds what goes into down; norms come before it."""
    (y, norms), (want_y, want_norms) = result, expected(inputs)
    assert np.abs(y - want_y).max() <= TOLERANCE[dtype] * np.abs(want_y).max()
    assert np.abs(norms - want_norms).max() <= (SUM_TOLERANCE if dtype == "float32" else 1e-4) * want_norms.max()


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_matches_float64(bind, case: MoECase) -> None:
    inputs = build(case)
    assert_matches(run(bind, inputs, case.dtype), inputs, case.dtype)


def test_token_that_chooses_an_expert_twice_gets_it_twice(bind) -> None:
    inputs = build(MoECase(tokens=20, experts=4, top_k=3, max_bits=4, dtype="bfloat16", seed=21))
    inputs.expert_ids[:, 2] = inputs.expert_ids[:, 0]
    assert_matches(run(bind, inputs, "bfloat16"), inputs, "bfloat16")


def test_every_token_on_one_expert(bind) -> None:
    inputs = build(MoECase(tokens=70, experts=4, top_k=2, max_bits=3, dtype="bfloat16", seed=22))
    inputs.expert_ids[:] = [3, 4]  # and one choice of padding
    assert_matches(run(bind, inputs, "bfloat16"), inputs, "bfloat16")


@pytest.mark.parametrize("tokens", [2, 6, 70, 140])
def test_rows_do_not_depend_on_their_batch_mates(bind, tokens: int) -> None:
    """Bit for bit, in another order and with NaN in the rows that became padding."""
    inputs = build(MoECase(tokens=tokens, experts=6, top_k=2, max_bits=4, dtype="bfloat16", seed=23))
    y, norms = run(bind, inputs, "bfloat16")
    rng = np.random.default_rng(0)
    order = rng.permutation(tokens)
    dropped = rng.random(tokens) < 0.5
    x = np.where(dropped[:, None], np.float32(np.nan), inputs.x[order])
    ids = np.where(dropped[:, None], 6, inputs.expert_ids[order])
    other = dataclasses.replace(inputs, x=x, expert_ids=ids, expert_weights=inputs.expert_weights[order])
    other_y, other_norms = run(bind, other, "bfloat16")
    np.testing.assert_array_equal(other_y[~dropped], y[order][~dropped])
    np.testing.assert_array_equal(other_norms[~dropped], norms[order][~dropped])
    assert not other_y[dropped].any() and not other_norms[dropped].any()


def test_bits_fall_without_recompilation(implementation: str, bind) -> None:
    """From 5 bits to mixed ones: other numbers, the same executable, and nothing above q is read."""
    inputs = build(MoECase(tokens=5, bits=5, max_bits=5, seed=24))
    op = bind(api.bitplane_moe, triton.bitplane_moe, layer=LAYER, geometry=inputs.geometry)
    mixed = lowered(inputs, np.random.default_rng(1).integers(3, 5, inputs.bits.shape).astype(np.int32))
    sizes = []
    for state in (inputs, inputs, mixed):  # JAX 0.11 and later compile once more after the first Pallas kernel
        y, norms = op(*map(jnp.asarray, state.operands))
        assert_matches((np.asarray(y), np.asarray(norms)), state)
        sizes.append(op._cache_size())
    assert sizes[2] == sizes[1]


def test_where_pages_lie_changes_nothing(bind) -> None:
    """The same experts in other slots: bit-identical."""
    inputs = build(MoECase(tokens=5, lut_rows=32, max_bits=4, seed=25))
    order = np.random.default_rng(2).permutation(len(inputs.arena)).astype(np.int32)
    arena = np.empty_like(inputs.arena)
    arena[order] = inputs.arena
    tables = [
        np.where(table < len(order), order[np.minimum(table, len(order) - 1)], table)
        for table in (inputs.gate_up_slots, inputs.down_slots)
    ]
    moved = dataclasses.replace(inputs, arena=arena, gate_up_slots=tables[0], down_slots=tables[1])
    for before, after in zip(run(bind, inputs), run(bind, moved), strict=True):
        np.testing.assert_array_equal(before, after)


def test_extreme_scales_and_subnormal_entries_survive() -> None:
    layout = build(MoECase()).geometry.gate_up
    rng = np.random.default_rng(3)
    indices = rng.integers(0, 256, (1, layout.rows, layout.cols)).astype(np.uint8)
    lut = (rng.normal(size=(1, layout.groups, 8)) * 2.0**-20).astype(np.float16)  # subnormal in float16
    assert (np.abs(lut[lut != 0]) < 2.0**-14).all()
    scale = np.where(np.arange(layout.rows) % 2, 1e5, 1e-9).astype(np.float32)[None]
    page = pack_page(layout, 3, indices, lut, scale)[0]
    want = dequantize_pages(layout, {3: page}, 3)
    slots = np.zeros(layout.total_slots, np.int32)
    slots[: layout.page_slots(3)] = np.arange(layout.page_slots(3))
    arena = jnp.asarray(page.reshape(-1, layout.slot_words))
    got = jax.jit(functools.partial(decode_block, layout=layout))(jnp.asarray(slots), jnp.int32(3), arena)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_one_expert_at_a_time() -> None:
    """Temporary memory of the reference stays far below the dense weights of all experts."""
    inputs = build(MoECase(tokens=8, hidden=128, inner=128, experts=48, lut_rows=32, seed=26))
    op = jax.jit(functools.partial(api.bitplane_moe, layer=LAYER, geometry=inputs.geometry, implementation="xla"))
    analysis = op.lower(*map(jnp.asarray, inputs.operands)).compile().memory_analysis()
    dense_bytes = sum(weight.nbytes for unit in inputs.dense for weight in unit)
    assert analysis.temp_size_in_bytes < dense_bytes / 8


def test_explicit_triton_never_falls_back() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    inputs = build(MoECase())
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        static = dict(layer=LAYER, geometry=inputs.geometry)
        api.bitplane_moe(*map(jnp.asarray, inputs.operands), **static, implementation="triton")
    assert api.resolve_implementation("auto") == "xla"


def test_unsupported_input_is_refused_with_the_reason() -> None:
    inputs = build(MoECase())
    operands = list(map(jnp.asarray, inputs.operands))
    with pytest.raises(NotImplementedError, match="float16"):
        api.bitplane_moe(operands[0].astype(jnp.float16), *operands[1:], layer=0, geometry=inputs.geometry)
    relu = dataclasses.replace(inputs.geometry, activation="relu")
    with pytest.raises(NotImplementedError, match="relu"):
        api.bitplane_moe(*operands, layer=0, geometry=relu)
    with pytest.raises(ValueError, match="bits has shape"):
        api.bitplane_moe(*operands[:4], operands[4][..., :1], operands[5], layer=0, geometry=inputs.geometry)
    with pytest.raises(ValueError, match="layer is 2; the tables have 2"):
        api.bitplane_moe(*operands, layer=2, geometry=inputs.geometry)
