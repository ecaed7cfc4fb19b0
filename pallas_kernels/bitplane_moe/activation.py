"""The gated activation of an expert: `act(gate) * up`, and the norm that the planner's features use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ACTIVATIONS = ("silu", "gelu_tanh")


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """`activate` of float32 `[.., 2I]`, gate first."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activate(gate, up, activation)


def activate(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """`act(gate) * up`, float32: the input of the down projection.

    Raises:
        NotImplementedError: an activation that is not in `ACTIVATIONS`.
    """
    if activation == "silu":
        return gate * jax.nn.sigmoid(gate) * up
    if activation == "gelu_tanh":  # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
        return gate * jax.nn.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate**3)) * up
    raise NotImplementedError(f"activation {activation!r}: supported are {', '.join(ACTIVATIONS)}")


def row_norms(x: jax.Array) -> jax.Array:
    """L2 norm of every row of float32 `[.., I]`."""
    return jnp.sqrt(jnp.sum(x * x, axis=-1))
