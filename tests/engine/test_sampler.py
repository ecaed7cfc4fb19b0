"""The sampler against float64 NumPy (which tokens stay), against the exact distribution, and row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from pwjax.engine.sampler import ERROR_TOKEN, kept_tokens, sample, token_nats

VOCAB = 300
sample_jit = jax.jit(sample)


def arguments(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    """Everything after the logits, broadcast to `rows`."""
    fields = [(temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (min_p, np.float32)]
    fields += [(seed, np.uint32), (position, np.int32)]
    return [jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,))) for value, dtype in fields]


def draw(logits, **fields):
    return np.asarray(sample_jit(jnp.asarray(logits, jnp.float32), *arguments(len(logits), **fields)))


def reference_kept(logits, temperature, top_k, top_p, min_p):
    """The documented rule for one row, in float64: min-p, top-k, top-p; ties go to the lower id."""
    scaled = np.asarray(logits, np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    kept = [token for token in order if probability[token] >= min_p * probability.max()]
    if top_k >= 1:
        kept = kept[:top_k]
    total, mass, result = probability[kept].sum(), 0.0, []
    for token in kept:
        if top_p < 1 and result and mass / total >= top_p:
            break
        result.append(token)
        mass += probability[token]
    return set(result)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, -1, 0.9, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1e-4, 0, 1e-4, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 1.0),
        (2.0, 40, 0.8, 0.02),
        (0.5, 10 * VOCAB, 0.99, 0.001),
        (1e-5, 0, 1.0, 0.0),
    ],
)
def test_the_kept_set_equals_float64(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(size=(8, VOCAB)) * 4
    logits = logits.astype(np.float32)
    scaled = (logits - logits.max(-1, keepdims=True)) / np.float32(temperature)
    _, *filters = arguments(len(logits), top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(kept_tokens(jnp.asarray(scaled), *filters[:3]))
    for row in range(len(logits)):
        expected = reference_kept(logits[row], temperature, top_k, top_p, min_p)
        assert set(np.flatnonzero(kept[row])) == expected
        assert expected


def test_equal_logits_keep_exactly_k_lowest_ids_first():
    logits = np.array([[1.0, 2.0, 2.0, 2.0, -np.inf, 2.0]], np.float32)
    _, *filters = arguments(1, top_k=3)
    kept = np.asarray(kept_tokens(jnp.asarray(logits - 2), *filters[:3]))
    assert np.flatnonzero(kept[0]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_is_argmax_whatever_the_other_fields_say(temperature):
    logits = np.random.default_rng(0).normal(size=(6, VOCAB))
    for fields in ({}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"seed": 5, "position": 9}):
        assert (draw(logits, temperature=temperature, **fields) == logits.argmax(-1)).all()


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-40}, {"min_p": 1.0}])
def test_the_tightest_filters_leave_the_argmax(fields):
    logits = np.random.default_rng(1).normal(size=(20, VOCAB))
    assert (draw(logits, temperature=5.0, seed=np.arange(20), **fields) == logits.argmax(-1)).all()


def test_absent_top_k_is_no_filter_so_samples_vary():
    logits = np.zeros((20, VOCAB))
    assert len(set(draw(logits, position=np.arange(20)))) > 10


def test_small_temperatures_and_large_logits_stay_finite():
    logits = np.array([[1e30, -1e30, 3.0], [1e4, 1e4 - 1, 0.0]])
    assert draw(logits, temperature=2e-5).tolist() == [0, 0]


def test_rows_without_a_distribution_return_the_error_token_and_spare_the_others():
    logits = np.random.default_rng(2).normal(size=(5, VOCAB))
    good = logits.copy()
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    for temperature in (0.0, 1.0, np.array([0, 1, 0, 1, 0.7])):
        tokens = draw(logits, temperature=temperature, seed=4)
        assert tokens[[1, 2, 3]].tolist() == [ERROR_TOKEN] * 3
        assert tokens[[0, 4]].tolist() == draw(good, temperature=temperature, seed=4)[[0, 4]].tolist()


@pytest.mark.parametrize("fields", [{}, {"top_k": 4}, {"top_p": 0.9999}])
def test_masked_tokens_never_win(fields):
    logits = np.full((200, 50), -np.inf)
    logits[:, [3, 8]] = 0.0
    tokens = draw(logits, temperature=9.0, position=np.arange(200), **fields)
    assert set(tokens) == {3, 8}


def test_each_row_as_if_alone_in_mixed_batches():
    """Greedy, unfiltered and filtered rows together: each equals its own batch of one, in any order."""
    logits = np.random.default_rng(5).normal(size=(6, VOCAB)) * 2
    fields = {
        "temperature": np.array([0, 1, 0.7, 1.5, 0, 1]),
        "top_k": np.array([0, 0, 20, 0, 3, 0]),
        "top_p": np.array([1, 1, 1, 0.6, 0.5, 1]),
        "min_p": np.array([0, 0, 0, 0.01, 0.9, 0]),
        "seed": np.array([9, 1, 2, 2**32 - 1, 4, 1]),
        "position": np.array([0, 10, 20, 30, 40, 11]),
    }
    together = draw(logits, **fields)
    alone = [draw(logits[i : i + 1], **{k: v[i] for k, v in fields.items()})[0] for i in range(6)]
    assert together.tolist() == alone
    order = [3, 0, 5, 1, 4, 2]
    assert draw(logits[order], **{k: v[order] for k, v in fields.items()}).tolist() == together[order].tolist()


def test_seed_and_position_decide_and_both_matter():
    logits = np.zeros((1, VOCAB)).repeat(64, axis=0)
    first = draw(logits, seed=7, position=np.arange(64))
    assert (draw(logits, seed=7, position=np.arange(64)) == first).all()
    assert (draw(logits, seed=8, position=np.arange(64)) != first).mean() > 0.9
    assert len(set(first)) > 40


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9}],
)
def test_draws_follow_the_exact_distribution(fields):
    """Chi-square over 20,000 draws with fixed seeds; the limit is exceeded by chance once in a million."""
    count, rows = 20_000, 2_000
    logits = np.random.default_rng(8).normal(size=12).astype(np.float32)
    rule = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
    kept = sorted(reference_kept(logits, **rule))
    weights = np.exp(logits[kept].astype(np.float64) / rule["temperature"])
    batch = logits[None].repeat(rows, axis=0)
    tokens = np.concatenate(
        [draw(batch, seed=seed, position=np.arange(rows), **fields) for seed in range(count // rows)]
    )
    observed = np.bincount(tokens, minlength=12)
    assert observed[kept].sum() == count  # nothing outside the kept set
    expected = count * weights / weights.sum()
    statistic = ((observed[kept] - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(1e-6, len(kept) - 1)


def test_a_greedy_batch_runs_without_random_numbers_or_a_sort():
    """Both stand inside conditional branches of the compiled program, not on the common path."""
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((2, 9)), *arguments(2))
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert "cond" in names
    assert not names & {"sort", "random_bits", "random_fold_in", "threefry2x32"}


def test_token_nats_equal_float64_log_softmax():
    rng = np.random.default_rng(4)
    logits, targets = rng.normal(size=(3, 5, 40)) * 10, rng.integers(0, 40, size=(3, 5))
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    got = token_nats(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5)
