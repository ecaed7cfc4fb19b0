"""The jitted passes of the walk: one chunk of sequences through one layer, and its loss.

The definition of a layer is a static argument, its weights are not: equal layers compile once a chunk shape.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pwjax.calibration.grouped_experts import RoutedSums, grouped_experts
from pwjax.models.decoder import DecoderLayer
from pwjax.models.forward import ExpertWeights, attend
from pwjax.models.layers import matmul_f32, rms_norm
from pwjax.models.loading import ModuleDef, merge

BeforeExperts = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Residual x, and h, ids, weights of `DecoderLayer.route`."""


@functools.partial(jax.jit, static_argnums=0)
def to_experts(definition: ModuleDef[DecoderLayer], leaves: tuple[jax.Array, ...], x: jax.Array) -> BeforeExperts:
    """Attention and routing."""
    layer = merge(definition, leaves)
    x = attend(layer, x)
    return x, *layer.route(x)


@functools.partial(jax.jit, static_argnums=0)
def through_experts(
    definition: ModuleDef[DecoderLayer],
    leaves: tuple[jax.Array, ...],
    before_experts: BeforeExperts,
    experts: ExpertWeights,
) -> tuple[jax.Array, RoutedSums]:
    """The second half of an MoE layer: `[B, T, H]` after it, and the sums that importance is made of."""
    x, h, ids, weights = before_experts
    routed, sums = grouped_experts(h, ids, weights, experts)
    return merge(definition, leaves).add_experts(x, h, routed), sums


def through_moe_layer(
    definition: ModuleDef[DecoderLayer], leaves: tuple[jax.Array, ...], x: jax.Array, experts: ExpertWeights
) -> jax.Array:
    """A whole MoE layer: `[B, T, H]` to `[B, T, H]`."""
    return through_experts(definition, leaves, to_experts(definition, leaves, x), experts)[0]


@functools.partial(jax.jit, static_argnums=0)
def through_dense_layer(definition: ModuleDef[DecoderLayer], leaves: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    """A whole layer without experts: `[B, T, H]` to `[B, T, H]`."""
    layer = merge(definition, leaves)
    return layer.add_mlp(attend(layer, x))


@functools.partial(jax.jit, static_argnames="eps")
def loss_sums(x: jax.Array, tokens: jax.Array, norm: jax.Array, head: jax.Array, eps: float) -> jax.Array:
    """Sum of nats of every sequence, float32 `[B]`; one sequence's logits `[T, vocab]` at a time."""

    def sequence(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        states, targets = args
        logits = matmul_f32(rms_norm(states[:-1], norm, eps), head)
        picked = jnp.take_along_axis(logits, targets[1:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)

    return jax.lax.map(sequence, (x, tokens))
