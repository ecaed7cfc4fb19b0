"""One decoder for every family; a family differs by fields of `ModelConfig` only.

The caller runs the layers, because attention and routed experts need state that is no parameter (KV and weight pages):

    x = model.embed(tokens)
    for layer in model.layers:
        q, k, v = layer.qkv(x, positions)
        x = layer.add_attention(x, attention(q, k, v))
        if layer.is_moe:
            h, ids, weights = layer.route(x)
            x = layer.add_experts(x, h, experts(h, ids, weights))
        else:
            x = layer.add_mlp(x)
    logits = model.logits(x)

Shapes have any number of leading axes `[...]`, usually `[sequences, tokens]`.
Activations have the dtype of the weights.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.platform import Implementation
from pwjax.config import ModelConfig
from pwjax.models.attention import Attention
from pwjax.models.layers import Embedding, GatedMlp, Linear, RMSNorm, matmul_f32
from pwjax.models.moe import SparseMoe


class DecoderLayer(nnx.Module):
    """Pre-norm attention, then experts (`is_moe`) or a dense MLP. It does not know its index, so equal layers share
    one graph definition and compile once.

    Attributes:
        is_moe: whether the MLP is a Mixture of Experts.
        window: sliding-window size in tokens, 0 for full attention.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, is_moe: bool, window: int):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = (
            SparseMoe(config, dtype) if is_moe else GatedMlp(config.hidden_size, config.dense_intermediate_size, dtype)
        )
        self.is_moe = is_moe
        self.window = window

    def qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`x [..., H]`, int `positions [...]` to rotated q `[..., heads, D]`, rotated k and v `[..., kv_heads, D]`."""
        return self.self_attn.qkv(self.input_layernorm(x), positions)

    def add_attention(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        """Residual `x [..., H]` plus the projected attention output `heads [..., heads, D]`."""
        return x + self.self_attn.output(heads)

    def route(
        self, x: jax.Array, valid: jax.Array | None = None, implementation: Implementation = "xla"
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the routed experts need of `x [..., H]`; see `SparseMoe.route` for `valid` and `implementation`.

        Returns:
            h: `[..., H]`, the normed residual: input of router and experts.
            ids: int32 `[..., k]`; `num_experts` ("no expert") where not `valid`.
            weights: float32 `[..., k]`.
        """
        assert isinstance(self.mlp, SparseMoe)
        h = self.post_attention_layernorm(x)
        return h, *self.mlp.route(h, valid, implementation)

    def add_experts(self, x: jax.Array, h: jax.Array, routed: jax.Array) -> jax.Array:
        """Residual `x` plus the weighted sum of the routed experts, `routed [..., H]`, plus the shared one of `h`."""
        assert isinstance(self.mlp, SparseMoe)
        return x + self.mlp.add_shared(h, routed)

    def add_mlp(self, x: jax.Array) -> jax.Array:
        """Residual `x` plus the dense MLP of a layer without experts."""
        assert isinstance(self.mlp, GatedMlp)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output head; weights are zeros until `loading.load_dense` fills them.

    Build it under `nnx.eval_shape` to get shapes without memory.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dtype, is_moe=is_moe, window=window)
            for is_moe, window in zip(config.moe_layers, config.windows, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int `[...]` to `[..., H]`."""
        return self.embed_tokens(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and output head: `x [..., H]` to float32 `[..., vocab]`, never rounded to the weights' dtype."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return matmul_f32(self.norm(x), head.weight[...])
