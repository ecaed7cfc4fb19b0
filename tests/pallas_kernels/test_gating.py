"""What lies between both products of an expert, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from pallas_kernels.bitplane_moe.gating import gate_rows
from pallas_kernels.bitplane_moe.halves import column_of, row_scale
from pallas_kernels.bitplane_moe.layout import BlockLayout


def _activated(gate: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return gate * expit(gate)
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("splits, inner", [(1, 40), (3, 352)])
def test_rows_of_the_second_product(activation: str, exact: bool, splits: int, inner: int) -> None:
    rng = np.random.default_rng(0)
    sums = rng.standard_normal((5, splits, 2 * inner)).astype(np.float32)
    sums[1] *= 300  # far past what the activation saturates at
    sums[2] = 0
    layout = BlockLayout(rows=8, cols=inner, lut_rows=1, slot_words=64)
    rows = jax.jit(lambda sums: gate_rows(sums, layout, 4, activation=activation, exact=exact, interpret=True))(sums)

    gate, up = np.split(sums.astype(np.float64).sum(axis=1), 2, axis=1)
    want = _activated(gate, activation) * up
    norms = np.linalg.norm(want, axis=1)
    np.testing.assert_allclose(rows.bounds, norms, rtol=1e-5)

    width = rows.columns.shape[-1]
    columns = np.asarray(column_of(jnp.arange(width)))
    scale = np.asarray(row_scale(rows.bounds, inverse=True), np.float64)
    found = np.asarray(rows.columns, np.float64).sum(axis=1) * scale[:, None]
    assert rows.columns.shape == (5, 3 if exact else 1, width)
    assert sorted(columns) == list(range(width))
    assert not found[:, columns >= inner].any()
    error = np.abs(found[:, columns < inner] - want[:, columns[columns < inner]])
    assert (error <= norms[:, None] * (2e-6 if exact else 2**-11)).all()
