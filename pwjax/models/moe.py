"""The Mixture-of-Experts block without its routed experts: router and shared expert.

Routed experts are no parameters of the model: they live in the arena as bit-planes, and whoever runs the model computes
their output between `DecoderLayer.route` and `DecoderLayer.add_experts`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.platform import Implementation
from pallas_kernels.top_experts.api import top_experts
from pwjax.config import ModelConfig
from pwjax.models.layers import GatedMlp, Linear, matmul_f32


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
        self.num_experts = config.num_experts
        self.weights_in_hidden_dtype = config.router_weights_in_hidden_dtype

    def route(
        self, h: jax.Array, valid: jax.Array | None = None, implementation: Implementation = "xla"
    ) -> tuple[jax.Array, jax.Array]:
        """Experts of every token.

        Logits are rounded to the dtype of `h`, softmax over all experts is float32, then the top k are taken (of equal
        ones the lowest expert first) and, if the configuration says so, divided by their sum. Qwen2-MoE rounds the
        weights to the dtype of `h` again; Mixtral does not.

        Args:
            h: normed hidden states `[..., H]`.
            valid: bool `[...]`, the tokens that are not padding; None for all.
            implementation: of `top_experts`.

        Returns:
            ids int32 `[..., k]`, `num_experts` ("no expert") for padding; weights float32 `[..., k]`.
        """
        tokens = h.shape[:-1]
        ids, weights = top_experts(
            matmul_f32(h, self.gate.weight[...]).reshape(-1, self.num_experts),
            jnp.ones(math.prod(tokens), bool) if valid is None else valid.reshape(-1),
            top_k=self.top_k,
            normalise=self.normalise,
            logits_dtype=h.dtype,
            weights_dtype=h.dtype if self.weights_in_hidden_dtype else jnp.float32,
            implementation=implementation,
        )
        return ids.reshape(*tokens, -1), weights.reshape(*tokens, -1)

    def add_shared(self, h: jax.Array, routed: jax.Array) -> jax.Array:
        """Output of the block: `routed [..., H]` plus `sigmoid(gate(h)) * shared_expert(h)` where there is one."""
        if self.shared_expert is None or self.shared_expert_gate is None:
            return routed
        return routed + jax.nn.sigmoid(self.shared_expert_gate(h)) * self.shared_expert(h)
