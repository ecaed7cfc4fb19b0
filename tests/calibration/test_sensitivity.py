"""Equation 2 against float64, and the properties that kappa is fitted for."""

import ml_dtypes
import numpy as np
import pytest

from pwjax.calibration import CalibrationLosses, choose_max_bits, fit_kappa, raw_sensitivity, sensitivity


def losses(base, perturbed, uniform=None):
    uniform = uniform or dict.fromkeys(range(3, 9), base)
    return CalibrationLosses(base=base, perturbed=np.asarray(perturbed), uniform=uniform, num_tokens=1)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_raw_sensitivity_is_equation_2(dtype):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 10, 33)).astype(dtype)
    h = rng.random((4, 33)).astype(np.float32)
    noisy = {b: weights.astype(np.float32) + 2.0**-b * rng.standard_normal(weights.shape) for b in range(3, 9)}
    noisy = {b: w.astype(np.float32) for b, w in noisy.items()}
    got = raw_sensitivity(weights, noisy.__getitem__, h)
    assert got.shape == (4, 6) and got.dtype == np.float32
    for b in range(3, 9):
        delta = noisy[b].astype(np.float64) - weights.astype(np.float64)
        want = np.einsum("enk,ek->e", delta**2, h.astype(np.float64))
        np.testing.assert_allclose(got[:, b - 3], want, rtol=1e-5)


def random_raw(seed, shape=(3, 8, 2)):
    return np.random.default_rng(seed).random((*shape, 1)) * 4.0 ** -np.arange(6)


def test_sum_over_a_unit_is_the_measured_loss_increase():
    raw, base = random_raw(1), 2.5
    increase = np.random.default_rng(2).uniform(0.01, 0.02, (3, 2))
    kappa = fit_kappa(losses(base, base + increase), raw)
    assert kappa.clipped == ()
    table = sensitivity(kappa, raw)
    assert table.shape == (3, 8, 2, 6) and table.dtype == np.float32
    np.testing.assert_allclose(table[..., 0].sum(1), increase, rtol=1e-5)
    np.testing.assert_allclose(table / table[..., :1], raw / raw[..., :1], rtol=1e-5)


def test_small_rises_are_raised_and_reported():
    raw = np.ones((2, 4, 2, 6))
    raw[1, :, 0] *= 1000  # a layer of large activations: its kappa is small, its rise is not
    kappa = fit_kappa(losses(1.0, 1.0 + np.array([[0.01, -0.5], [0.03, 1e-5]])), raw)
    # Positive rises: 0.01, 0.03, 1e-5; median 0.01; floor 0.001.
    np.testing.assert_allclose(kappa.values, [[0.01 / 4, 0.001 / 4], [0.03 / 4000, 0.001 / 4]], rtol=1e-6)
    assert kappa.clipped == ((0, 1), (1, 1))


def test_kappa_without_any_rise_or_any_error():
    raw = np.ones((1, 4, 2, 6))
    kappa = fit_kappa(losses(1.0, [[1.0, 0.5]]), raw)
    np.testing.assert_array_equal(kappa.values, [[1.0, 1.0]])
    assert kappa.clipped == ((0, 0), (0, 1))
    raw[:, :, 1] = 0  # weights that 3 bits hold exactly
    kappa = fit_kappa(losses(1.0, [[1.4, 1.0]]), raw)
    np.testing.assert_allclose(kappa.values, [[0.1, 1.0]], rtol=1e-6)
    assert kappa.clipped == ()


def test_sensitivity_never_rises_with_bits():
    raw = random_raw(3)
    raw[..., 4] = raw[..., 3] * 1.5
    table = sensitivity(fit_kappa(losses(1.0, np.full((3, 2), 1.1)), raw), raw)
    assert (np.diff(table, axis=-1) <= 0).all()
    np.testing.assert_array_equal(table[..., 4], table[..., 3])


@pytest.mark.parametrize(("rises", "want"), [
    ([0.1, 0.02, 0.004, 0.0009, 0.0001, 0.0], 6),
    ([0.0009, 0.02, 0.0, 0.0, 0.0, 0.0], 3),
    ([-0.01, 0.0, 0.0, 0.0, 0.0, 0.0], 3),
    ([0.1, 0.1, 0.1, 0.1, 0.1, 0.0005], 8),
    ([0.1] * 6, 8),
])  # fmt: skip
def test_choose_max_bits(rises, want):
    uniform = {b: 3.0 + rise for b, rise in zip(range(3, 9), rises, strict=True)}
    assert choose_max_bits(losses(3.0, [[3.0, 3.0]], uniform)) == want
