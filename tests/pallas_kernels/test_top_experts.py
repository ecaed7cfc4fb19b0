"""`top_experts` against float64 NumPy, on every implementation, and its kernel lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.top_experts import api, triton
from tests.pallas_kernels.lowering import triton_modules

# [tokens, experts, top_k]: models that are served, and sizes that are no powers of two.
SHAPES = [(1, 60, 4), (37, 60, 4), (9, 8, 2), (5, 5, 1), (4, 5, 4), (6, 128, 8), (3, 64, 6)]


def run(bind, logits: np.ndarray, valid: np.ndarray | None = None, **static) -> tuple[np.ndarray, np.ndarray]:
    valid = np.ones(len(logits), bool) if valid is None else valid
    static = dict(normalise=False, logits_dtype=jnp.float32, weights_dtype=jnp.float32) | static
    op = bind(api.top_experts, triton.top_experts, **static)
    ids, weights = op(jnp.asarray(logits), jnp.asarray(valid))
    assert ids.shape == weights.shape == (len(logits), static["top_k"])
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def expected(logits: np.ndarray, top_k: int, normalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """In float64, from logits that are rounded already."""
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    ids = np.argsort(-powers, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(powers / powers.sum(-1, keepdims=True), ids, axis=-1)
    return ids, weights / weights.sum(-1, keepdims=True) if normalise else weights


@pytest.mark.parametrize("dtype, normalise", [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_matches_float64(bind, tokens: int, experts: int, top_k: int, dtype: str, normalise: bool) -> None:
    """Rounded to bfloat16, many logits are equal: the order among them is tested too."""
    logits = np.random.default_rng(experts).normal(0, 2, (tokens, experts)).astype(np.float32)
    ids, weights = run(bind, logits, top_k=top_k, normalise=normalise, logits_dtype=dtype, weights_dtype=dtype)
    want_ids, want = expected(logits.astype(dtype).astype(np.float32), top_k, normalise)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2**-8 if dtype == "bfloat16" else 5e-6)
    assert np.array_equal(weights, weights.astype(dtype).astype(np.float32))


def test_logits_alone_are_rounded(bind) -> None:
    """As in Mixtral: rounding makes experts 1 and 2 equal, and weights stay float32."""
    logits = np.array([[0.0, 1.0, 1.0 + 2**-10, -1.0]], np.float32)
    ids, weights = run(bind, logits, top_k=2, normalise=True, logits_dtype=ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ids, [[1, 2]])
    np.testing.assert_allclose(weights, 0.5, rtol=1e-6)
    ids, weights = run(bind, logits, top_k=2, normalise=True)
    np.testing.assert_array_equal(ids, [[2, 1]])
    assert weights[0, 0] > 0.5 + 2**-14


def test_equal_logits_take_the_lowest_expert(bind) -> None:
    logits = np.zeros((3, 60), np.float32)
    logits[1, [59, 31, 7]] = 1
    logits[2, 1:] = -np.inf  # the others have weight 0, and are equal
    ids, _ = run(bind, logits, top_k=4)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [7, 31, 59, 0], [0, 1, 2, 3]])


def test_padding_chooses_no_expert(bind) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    valid = np.array([True, False, True, True, False, False])
    logits[1] = np.nan
    ids, weights = run(bind, logits, valid, top_k=2)
    want_ids, want = expected(logits, 2, normalise=False)
    assert (ids[~valid] == 5).all()
    np.testing.assert_array_equal(ids[valid], want_ids[valid])
    np.testing.assert_allclose(weights[valid], want[valid], rtol=5e-6)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_ids_of_bad_logits_are_experts(bind, bad: float) -> None:
    """Distinct ones too; the weights say that something is wrong."""
    logits = np.zeros((2, 60), np.float32)
    logits[0], logits[1, 17] = bad, bad
    ids, weights = run(bind, logits, top_k=4)
    assert ids.min() >= 0 and ids.max() < 60
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert np.isnan(weights).all()


def test_contradictions_are_refused() -> None:
    logits, valid = jnp.zeros((3, 5)), jnp.ones(3, bool)
    choose = functools.partial(api.top_experts, normalise=False)
    with pytest.raises(ValueError, match="top_k is 6; there are 5 experts"):
        choose(logits, valid, top_k=6)
    with pytest.raises(ValueError, match=r"expected bool\[3\]"):
        choose(logits, valid[:2], top_k=1)
    with pytest.raises(ValueError, match="expected float32"):
        choose(logits.astype(jnp.bfloat16), valid, top_k=1)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            choose(logits, valid, top_k=1, implementation="triton")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_lowers_for_cuda(tokens: int, experts: int, top_k: int, dtype: str) -> None:
    """To a valid module, and layers share it."""
    choose = functools.partial(triton.top_experts, top_k=top_k, normalise=True, logits_dtype=dtype, weights_dtype=dtype)
    operands = (jax.ShapeDtypeStruct((tokens, experts), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.bool_))
    (kernel,) = triton_modules(choose, *operands)
    assert "tt.reduce" in kernel
    assert ("arith.truncf" in kernel) == (dtype == "bfloat16")

    def layers(logits, valid):
        _, weights = choose(logits, valid)
        return choose(logits + weights[:, :1], valid)

    assert set(triton_modules(layers, *operands)) == {kernel}
