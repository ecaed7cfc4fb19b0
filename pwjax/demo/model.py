"""Qwen2-MoE for training: every expert computed densely, layers stacked and scanned, bf16 compute on float32 weights.

With experts this small (128 wide) the dense form is one wide matrix product, `[tokens, hidden] x [hidden, experts *
width]`, whose activations are masked by the routing weights; on an H200 that beats any gather. It is the training model
only: serving reads the exported checkpoint.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Shape of the demo model; the defaults are the published checkpoint."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 256
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    attention: Literal["xla", "cudnn"] = "xla"
    """`implementation` of `jax.nn.dot_product_attention`: "cudnn" on a GPU, twice as fast here."""


def _normal(fan_in: int, scale: float = 1.0):
    return nnx.initializers.normal(scale * fan_in**-0.5)


class RMSNorm(nnx.Module):
    """Normalises in float32, casts, then multiplies by the weight: Llama's order."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(x.dtype) * wide.astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, with the kernel `[in, out]` cast to the dtype of `x`."""

    def __init__(self, size_in: int, size_out: int, *, rngs: nnx.Rngs, bias: bool = False, scale: float = 1.0):
        self.kernel = nnx.Param(_normal(size_in, scale)(rngs.params(), (size_in, size_out)))
        self.bias = nnx.Param(jnp.zeros(size_out)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def rope_tables(num_positions: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, `[positions, head_dim]` float32; rotate-half pairs d with d + head_dim/2."""
    inverse = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * inverse
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-right, left], axis=-1)
    return x * cos[:, None].astype(x.dtype) + turned * sin[:, None].astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with biases on q, k and v and none on o."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(hidden, heads, bias=True, rngs=rngs)
        self.k_proj = Linear(hidden, kv, bias=True, rngs=rngs)
        self.v_proj = Linear(hidden, kv, bias=True, rngs=rngs)
        self.o_proj = Linear(heads, hidden, scale=(2 * config.num_layers) ** -0.5, rngs=rngs)
        self.head_dim = config.head_dim
        self.implementation: Literal["xla", "cudnn"] = config.attention

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).reshape(batch, length, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = jax.nn.dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, implementation=self.implementation
        )
        return self.o_proj(out.reshape(batch, length, -1))


class SparseMoe(nnx.Module):
    """32 routed experts, top-4 without renormalisation, and a shared expert behind a sigmoid gate."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        shared = config.shared_expert_intermediate_size
        residual = (2 * config.num_layers) ** -0.5
        self.gate = Linear(hidden, experts, scale=0.5, rngs=rngs)
        self.experts_gate = nnx.Param(_normal(hidden)(rngs.params(), (experts, hidden, width)))
        self.experts_up = nnx.Param(_normal(hidden)(rngs.params(), (experts, hidden, width)))
        # Routing weights are about 1/32 at first and are not renormalised, hence no residual factor here.
        self.experts_down = nnx.Param(_normal(width)(rngs.params(), (experts, width, hidden)))
        self.shared_gate_proj = Linear(hidden, shared, rngs=rngs)
        self.shared_up_proj = Linear(hidden, shared, rngs=rngs)
        self.shared_down_proj = Linear(shared, hidden, scale=residual, rngs=rngs)
        self.shared_expert_gate = Linear(hidden, 1, rngs=rngs)
        self.top_k = config.num_experts_per_tok

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Float32 softmax over all experts, its logarithm, and the softmax with only the top-k kept."""
        log_probs = jax.nn.log_softmax(self.gate(x).astype(jnp.float32), axis=-1)
        probs = jnp.exp(log_probs)
        _, chosen = jax.lax.top_k(probs, self.top_k)
        mask = jax.nn.one_hot(chosen, probs.shape[-1], dtype=jnp.float32).sum(-2)
        return probs, log_probs, probs * mask

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        probs, log_probs, weights = self.route(x)
        dtype = x.dtype
        gate = jnp.einsum("btd,edf->btef", x, self.experts_gate[...].astype(dtype))
        up = jnp.einsum("btd,edf->btef", x, self.experts_up[...].astype(dtype))
        hidden = jax.nn.silu(gate) * up * weights[..., None].astype(dtype)
        routed = jnp.einsum("btef,efd->btd", hidden, self.experts_down[...].astype(dtype))
        shared = self.shared_down_proj(jax.nn.silu(self.shared_gate_proj(x)) * self.shared_up_proj(x))
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * shared
        stats = {
            "share": jnp.mean((weights > 0).astype(jnp.float32), axis=(0, 1)) / self.top_k,
            "prob": jnp.mean(probs, axis=(0, 1)),
            "log_prob": jnp.mean(log_probs, axis=(0, 1)),
            "mass": jnp.mean(weights, axis=(0, 1)),
        }
        return routed + shared, stats


class Block(nnx.Module):
    """Pre-norm attention and MoE."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe = SparseMoe(config, rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        routed, stats = self.moe(self.post_attention_layernorm(x))
        return x + routed, stats


class DemoMoe(nnx.Module):
    """The model. Parameters of the blocks are stacked: each has a leading `[layers]` axis."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.embed = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size)))
        self.blocks = stack(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.config = config

    def hidden(self, tokens: jax.Array, dtype=jnp.bfloat16) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Final normed states `[batch, length, hidden]` and routing statistics, each `[layers, experts]`."""
        cos, sin = rope_tables(tokens.shape[1], self.config.head_dim, self.config.rope_theta)
        graph, stacked = nnx.split(self.blocks)

        @jax.checkpoint
        def layer(x: jax.Array, state: nnx.State):
            return nnx.merge(graph, state)(x, cos, sin)

        x, stats = jax.lax.scan(layer, self.embed[...][tokens].astype(dtype), stacked)
        return self.norm(x), stats

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits from the tied embedding."""
        return jnp.einsum(
            "...d,vd->...v", hidden, self.embed[...].astype(hidden.dtype), preferred_element_type=jnp.float32
        )
