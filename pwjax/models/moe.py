"""The Mixture-of-Experts block without its routed experts: router and shared expert.

Routed experts are no parameters of the model: they live in the arena as bit-planes, and whoever runs the model computes
their output between `DecoderLayer.route` and `DecoderLayer.add_experts`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pwjax.config import ModelConfig
from pwjax.models.layers import GatedMlp, Linear, linear


class SparseMoe(nnx.Module):
    """Router, and for Qwen2-MoE the shared expert that every token passes."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.gate = Linear(config.hidden_size, config.num_experts, dtype)
        has_shared = config.shared_intermediate_size > 0
        self.shared_expert = (
            GatedMlp(config.hidden_size, config.shared_intermediate_size, dtype) if has_shared else None
        )
        self.shared_expert_gate = Linear(config.hidden_size, 1, dtype) if has_shared else None
        self.top_k = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.weights_in_hidden_dtype = config.router_weights_in_hidden_dtype

    def route(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts of every token.

        Logits are rounded to the dtype of `h`, softmax over all experts is float32, then the top k are taken (of equal
        ones the lowest expert first) and, if the configuration says so, divided by their sum. Qwen2-MoE rounds the
        weights to the dtype of `h` again; Mixtral does not.

        Args:
            h: normed hidden states `[..., H]`.

        Returns:
            ids int32 `[..., k]`, weights float32 `[..., k]`.
        """
        logits = _rounded_to(linear(h, self.gate.weight[...]).astype(jnp.float32), h.dtype)
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        if self.weights_in_hidden_dtype:
            weights = _rounded_to(weights, h.dtype)
        return ids.astype(jnp.int32), weights

    def add_shared(self, h: jax.Array, routed: jax.Array) -> jax.Array:
        """Output of the block: `routed [..., H]` plus `sigmoid(gate(h)) * shared_expert(h)` where there is one."""
        if self.shared_expert is None or self.shared_expert_gate is None:
            return routed
        return routed + jax.nn.sigmoid(self.shared_expert_gate(h)) * self.shared_expert(h)


def _rounded_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Float32 values rounded to what `dtype` can hold.

    XLA may drop a cast to bfloat16 and back, and does so or not by what it fuses; routing must not depend on that.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
