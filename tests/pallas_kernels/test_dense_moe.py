"""`dense_moe` against float64 NumPy, in the form for CPUs and in the ones for GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe import dense
from pallas_kernels.testing.moe_cases import MoECase, build, expected, round_to

CASES = [
    MoECase(),
    MoECase(tokens=1, top_k=1, seed=1),
    MoECase(tokens=4, hidden=80, inner=22, top_k=6, padding=0.4, seed=2),
    MoECase(tokens=3, padding=1.0, seed=3),
    MoECase(tokens=130, experts=5, padding=0.2, seed=4),
]


def _grouped(*operands):
    return dense._grouped(*operands, "silu")


@pytest.mark.parametrize("op", [dense.dense_moe, _grouped], ids=["loop", "grouped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: MoECase, dtype: str, op) -> None:
    inputs = build(case)
    units = [np.stack([round_to(w, dtype) for w in unit]) for unit in inputs.dense]
    for unit, rounded in zip(inputs.dense, units, strict=True):
        unit[:] = list(rounded)
    inputs.x[:] = round_to(inputs.x, dtype)
    operands = (inputs.x, inputs.expert_ids, inputs.expert_weights, *units)
    x, ids, weights, gate_up, down = map(jnp.asarray, operands)
    y, norms = jax.jit(op)(x.astype(dtype), ids, weights, gate_up.astype(dtype), down.astype(dtype))
    want_y, want_norms = expected(inputs)
    # bfloat16 rounds the down input and the output, each by at most 2**-9.
    bound = 2e-6 if dtype == "float32" else 2**-7
    assert y.dtype == dtype
    assert np.abs(np.asarray(y, np.float32) - want_y).max() <= bound * np.abs(want_y).max()
    assert np.abs(np.asarray(norms) - want_norms).max() <= 2e-6 * want_norms.max()


def test_float32_activations_on_bfloat16_experts_compute_in_float32() -> None:
    inputs = build(MoECase(seed=5))
    for unit in inputs.dense:
        unit[:] = [round_to(w, "bfloat16") for w in unit]
    gate_up, down = (jnp.asarray(np.stack(unit), jnp.bfloat16) for unit in inputs.dense)
    x, ids, weights = map(jnp.asarray, (inputs.x, inputs.expert_ids, inputs.expert_weights))
    y, _ = jax.jit(functools.partial(dense.dense_moe, implementation="xla"))(x, ids, weights, gate_up, down)
    want, _ = expected(inputs)
    assert np.abs(np.asarray(y) - want).max() <= 2e-6 * np.abs(want).max()


def test_triton_is_refused_with_the_reason() -> None:
    inputs = build(MoECase())
    operands = (inputs.x, inputs.expert_ids, inputs.expert_weights, *(np.stack(unit) for unit in inputs.dense))
    with pytest.raises(NotImplementedError, match="no Triton kernel"):
        dense.dense_moe(*map(jnp.asarray, operands), implementation="triton")
