"""Grouped experts against float64 NumPy, over counts on and around tile boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.calibration.grouped_experts import TILE_TOKENS, grouped_experts
from pwjax.models.forward import expert_loop

E, K, H, I = 5, 2, 16, 12


def problem(seed, tokens, ids=None):
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((tokens, H)).astype(np.float32)
    weights = rng.random((tokens, K)).astype(np.float32)
    if ids is None:
        ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)])
    experts = rng.standard_normal((E, 2 * I, H)) / 4, rng.standard_normal((E, H, I)) / 4
    return h, np.asarray(ids, np.int32), weights, tuple(w.astype(np.float32) for w in experts)


def reference(h, ids, weights, experts):
    gate_up, down = (w.astype(np.float64) for w in experts)
    out, sum_h, sum_a = np.zeros(h.shape), np.zeros((E, H)), np.zeros((E, I))
    for token, choice in np.ndindex(ids.shape):
        e, r, x = ids[token, choice], float(weights[token, choice]), h[token].astype(np.float64)
        gate, up = np.split(gate_up[e] @ x, 2)
        a = gate / (1 + np.exp(-gate)) * up
        out[token] += r * (down[e] @ a)
        sum_h[e] += (r * x) ** 2
        sum_a[e] += (r * a) ** 2
    return out, sum_h, sum_a, np.bincount(ids.ravel(), minlength=E)


def constant_ids(*pairs_and_counts):
    return np.concatenate([np.tile(pair, (count, 1)) for pair, count in pairs_and_counts])


CASES = {
    "one token": (1, None),
    "fewer than a tile": (37, None),
    "many": (700, None),
    "one pair takes a whole tile": (TILE_TOKENS, constant_ids(([3, 1], TILE_TOKENS))),
    "one more than a tile": (TILE_TOKENS + 1, constant_ids(([4, 0], TILE_TOKENS + 1))),
    "last expert only half": (9, constant_ids(([0, 1], 4), ([2, 4], 5))),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    tokens, ids = CASES[name]
    args = problem(len(name), tokens, ids)
    out, sums = jax.jit(grouped_experts)(*args)
    want_out, want_h, want_a, want_counts = reference(*args)
    np.testing.assert_array_equal(sums.tokens, want_counts)
    np.testing.assert_allclose(out, want_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums.gate_up, want_h, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums.down, want_a, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(expert_loop(*map(jnp.asarray, args[:3]), args[3]), want_out, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights_are_used_as_they_are():
    h, ids, weights, experts = problem(1, 50)
    low = tuple(jnp.asarray(w, jnp.bfloat16) for w in experts)
    out, _ = grouped_experts(h, ids, weights, low)
    want, *_ = reference(h, ids, weights, tuple(np.asarray(w, np.float32) for w in low))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
