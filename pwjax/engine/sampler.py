"""Choosing the next token on the device: greedy, or temperature with min-p, top-k and top-p, a seed a row.

Every row is drawn as if it were alone: its random numbers depend on its own seed and position only, and no branch that
the batch takes changes a row's result. Greedy-only batches skip the random numbers, unfiltered ones skip the sort.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pwjax.engine.sampling_params import GREEDY_BELOW_TEMPERATURE

ERROR_TOKEN = -1  # a row whose logits have NaN or +inf, or are -inf throughout


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The next token of each row.

    Args:
        logits: f32 [S, V]; -inf is a masked token.
        temperature: f32 [S]; below 1e-5 is greedy, whatever the filters say.
        top_k: i32 [S]; below 1 is off.
        top_p: f32 [S]; 1 is off.
        min_p: f32 [S]; 0 is off.
        seeds: u32 [S].
        positions: i32 [S], position of the token to choose; folded into the key, so that a preempted request that is
            computed again draws the same tokens.

    Returns:
        i32 [S]; `ERROR_TOKEN` for rows that have no valid distribution (argmax would rank NaN first).
    """
    peak = jnp.max(logits, axis=-1, keepdims=True)
    broken = jnp.any(jnp.isnan(logits), axis=-1) | ~jnp.isfinite(peak[:, 0])
    logits = jnp.where(broken[:, None], 0.0, logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_sampled = temperature >= GREEDY_BELOW_TEMPERATURE
    divisor = jnp.where(is_sampled, temperature, 1.0)[:, None]
    # Subtracting the peak first keeps every quotient at or below zero: no overflow to +inf at small temperatures.
    scaled = jnp.where(broken[:, None], 0.0, logits - peak) / divisor
    operands = (scaled, top_k, top_p, min_p, seeds, positions, is_sampled)
    drawn = jax.lax.cond(jnp.any(is_sampled), _draw, lambda *_: greedy, *operands)
    return jnp.where(broken, ERROR_TOKEN, jnp.where(is_sampled, drawn, greedy))


def kept_tokens(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """bool [S, V]: the tokens that min-p, then top-k, then top-p leave, never an empty set.

    Args:
        scaled: f32 [S, V], logits less their maximum, over the temperature.
        top_k, top_p, min_p: [S], as in `sample`. Of equal logits, the lower id counts as the more probable.
    """
    vocab = scaled.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    descending, order = jax.lax.sort((-scaled, ids), num_keys=2)
    descending = -descending
    rank = ids
    keep = descending >= jnp.log(min_p)[:, None]
    keep &= rank < jnp.where(top_k < 1, vocab, top_k)[:, None]
    probability = jax.nn.softmax(jnp.where(keep, descending, -jnp.inf), axis=-1)
    mass_before = jnp.pad(jnp.cumsum(probability, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    # Rounding may bring the mass to 1 before the last token, so 1 is "off", not a comparison.
    keep &= (mass_before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    num_kept = jnp.maximum(jnp.sum(keep, axis=-1, keepdims=True), 1)  # each filter keeps a prefix of the order
    last_value = jnp.take_along_axis(descending, num_kept - 1, axis=-1)
    last_id = jnp.take_along_axis(order, num_kept - 1, axis=-1)
    return (scaled > last_value) | ((scaled == last_value) & (ids <= last_id))


def token_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """f32 [...]: -log softmax(logits)[target] for logits f32 [..., V] and targets i32 [...]."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _draw(
    scaled: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    is_sampled: jax.Array,
) -> jax.Array:
    """i32 [S]: argmax of logits plus Gumbel noise over the kept tokens, which is a draw from their softmax."""
    filters = (top_k >= 1) | (top_p < 1.0) | (min_p > 0.0)
    masked = jax.lax.cond(
        jnp.any(filters & is_sampled),
        lambda values: jnp.where(kept_tokens(values, top_k, top_p, min_p), values, -jnp.inf),
        lambda values: values,
        scaled,
    )
    noise = jax.vmap(lambda seed, position: _row_noise(seed, position, scaled.shape[-1]))(seeds, positions)
    return jnp.argmax(masked + noise, axis=-1).astype(jnp.int32)


def _row_noise(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,), jnp.float32)
