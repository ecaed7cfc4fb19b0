"""The model over whole sequences with dense experts: the plain form that calibration and the parity tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pwjax.models.attention import causal_attention
from pwjax.models.decoder import Decoder, DecoderLayer
from pwjax.models.layers import linear

ExpertWeights = tuple[jax.Array, jax.Array]
"""gate_up `[E, 2I, H]` (gate rows first) and down `[E, H, I]` of one layer."""

ExpertFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(h `[..., H]`, ids `[..., k]`, weights `[..., k]`) to the routed output `[..., H]`."""


def attend(layer: DecoderLayer, x: jax.Array) -> jax.Array:
    """The attention half of a layer over whole sequences `x [B, T, H]` from position 0."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return layer.add_attention(x, causal_attention(*layer.qkv(x, positions), window=layer.window))


def expert_loop(h: jax.Array, ids: jax.Array, weights: jax.Array, experts: ExpertWeights) -> jax.Array:
    """Routed output by one expert after another over all tokens: simple, and E / k times too much work."""
    gate_up, down = experts

    def add(total: jax.Array, item: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, expert_gate_up, expert_down = item
        weight = jnp.where(ids == index, weights, 0.0).sum(-1, keepdims=True)
        gate, up = jnp.split(linear(h, expert_gate_up), 2, axis=-1)
        return total + (linear(jax.nn.silu(gate) * up, expert_down) * weight).astype(h.dtype), None

    return jax.lax.scan(add, jnp.zeros_like(h), (jnp.arange(gate_up.shape[0]), gate_up, down))[0]


def forward_dense(model: Decoder, tokens: jax.Array, experts: Sequence[ExpertWeights]) -> jax.Array:
    """Logits of whole sequences, no cache.

    Args:
        tokens: int `[B, T]`.
        experts: weights of every MoE layer, in order.

    Returns:
        float32 `[B, T, vocab]`.
    """
    x = model.embed(tokens)
    remaining = iter(experts)
    for layer in model.layers:
        x = attend(layer, x)
        if layer.is_moe:
            h, ids, weights = layer.route(x)
            x = layer.add_experts(x, h, expert_loop(h, ids, weights, next(remaining)))
        else:
            x = layer.add_mlp(x)
    return model.logits(x)
