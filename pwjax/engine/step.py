"""One step of the model as a pure function: tokens in, next tokens out, KV written, routing mass added up.

A step runs `S` sequences with up to `Q` tokens each: decode is `(S, 1)`, a prefill chunk `(1, Q)`, scoring `(S, Q)`.
Layers are unrolled. The arena, the KV block table, the last tokens and the routing mass are donated and updated in
place; the weight page tables are read only. Nothing goes to the host inside a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bitplane_moe.api import bitplane_moe, dense_moe
from pallas_kernels.bitplane_moe.layout import MoEGeometry
from pallas_kernels.paged_attention.api import paged_attention, write_kv
from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.platform import Implementation
from pwjax.config import ModelConfig
from pwjax.engine.sampler import sample, token_nats
from pwjax.engine.step_inputs import FROM_DEVICE, LENGTH, ROW, SEED, START, TOP_K, StepInputs, StepShape
from pwjax.models import merge

SCORE_TOKENS = 256  # tokens whose logits exist at one time while scoring


class StepState(NamedTuple):
    """Donated through every step.

    arena: uint32 `[num_slots, slot_words]`.
    kv_table: int32 `[max_num_seqs, max_blocks, block_slots]`.
    last_tokens: int32 `[max_num_seqs]`, the newest token of every row.
    mass: float32 `[max_num_seqs, moe_layers, experts]`, equation 1's sums since each request's first token.
    """

    arena: Any
    kv_table: Any
    last_tokens: Any
    mass: Any


class StepOutputs(NamedTuple):
    """tokens: int32 `[S]`, sampled (-1: logits were not finite). nats: float32 `[S, Q]`, minus log p of the targets."""

    tokens: jax.Array
    nats: jax.Array


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Everything static about a step."""

    config: ModelConfig
    graphdef: Any
    moe: MoEGeometry | None
    kv: KVGeometry
    implementation: Implementation


ExpertTables = tuple[jax.Array, jax.Array] | tuple[tuple[jax.Array, jax.Array], ...]


def make_step(spec: StepSpec, shape: StepShape) -> Callable[..., tuple[StepState, StepOutputs]]:
    """The step function `(params, experts, state, inputs) -> (state, outputs)` for one shape.

    `inputs` is the array of `shape.inputs(..)`; `experts` is `(slot_table, bits)` where weights are paged, and one
    `(gate_up, down)` a layer for method bf16.
    """
    config = spec.config
    scale = config.head_dim**-0.5

    layout = shape.inputs(spec.kv.block_size, spec.kv.block_slots)

    def step(params, experts, state: StepState, packed: jax.Array):
        inputs = layout.unpack(packed)
        model = merge(spec.graphdef, params)
        rows, start, length = (inputs.sequences[:, i] for i in (ROW, START, LENGTH))
        arena, kv_table = state.arena, _apply_kv_delta(state.kv_table, inputs.kv_delta)
        offsets = jnp.arange(shape.tokens, dtype=jnp.int32)
        positions = start[:, None] + offsets
        valid = offsets < length[:, None]
        tokens = _input_tokens(inputs, state.last_tokens)

        x = model.embed(tokens)
        routes = []
        moe_layer = 0
        for index, layer in enumerate(model.layers):
            q, k, v = layer.qkv(x, positions)
            arena = write_kv(arena, k, v, kv_table, rows, start, length, layer=index, geometry=spec.kv)
            o = paged_attention(
                q, arena, kv_table, rows, start, length, layer=index, geometry=spec.kv, scale=scale,
                window=config.windows[index], implementation=spec.implementation,
            )  # fmt: skip
            x = layer.add_attention(x, o)
            if not layer.is_moe:
                x = layer.add_mlp(x)
                continue
            # Padding chooses no expert: it costs nothing and leaves no trace in the statistics.
            h, ids, weights = layer.route(x, valid, spec.implementation)
            y = _routed_experts(spec, experts, moe_layer, arena, h, ids, weights)
            routes.append((ids, weights))
            x = layer.add_experts(x, h, y)
            moe_layer += 1

        nats = _score(model, x, inputs.targets) if shape.score else jnp.zeros((shape.sequences, 0), jnp.float32)
        last = jnp.take_along_axis(x, jnp.maximum(length - 1, 0)[:, None, None], axis=1)[:, 0]
        sampled = _sample(_logits(model, last), inputs, positions=start + length)
        state = StepState(
            arena,
            kv_table,
            state.last_tokens.at[rows].set(sampled, mode="drop"),
            _add_mass(state.mass, rows, start, _routing_mass(routes, config.num_experts)),
        )
        return state, StepOutputs(sampled, nats)

    return step


def _apply_kv_delta(kv_table: jax.Array, delta: jax.Array) -> jax.Array:
    return kv_table.at[delta[:, 0], delta[:, 1]].set(delta[:, 2:], mode="drop")


def _input_tokens(inputs: StepInputs, last_tokens: jax.Array) -> jax.Array:
    """Tokens `[S, Q]`; a decoding row takes its newest token from the device, so that no step waits for the host."""
    newest = last_tokens.at[inputs.sequences[:, ROW]].get(mode="fill", fill_value=0)
    return jnp.where(inputs.sequences[:, FROM_DEVICE, None] > 0, newest[:, None], inputs.tokens)


def _routed_experts(spec: StepSpec, experts, moe_layer: int, arena, h, ids, weights) -> jax.Array:
    """Routed output `[S, Q, H]` from pages in the arena, or from dense experts."""
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    routed = flat(h), flat(ids), flat(weights).astype(jnp.float32)
    if spec.moe is None:
        gate_up, down = experts[moe_layer]
        # Dense experts have no kernel of their own: XLA's products are the baseline that method bf16 stands for.
        y, _ = dense_moe(*routed, gate_up, down, activation="silu", implementation="xla")
    else:
        slots, bits = experts
        y, _ = bitplane_moe(
            *routed, slots, bits, arena, layer=moe_layer, geometry=spec.moe, implementation=spec.implementation
        )
    return y.reshape(h.shape)


def _routing_mass(routes: list[tuple[jax.Array, jax.Array]], num_experts: int) -> jax.Array:
    """Sums of routing weights by expert, `[S, L, E]` (numerator of equation 1), of each layer's ids and weights.

    One scatter for all layers. A sum over comparisons with every expert would be of size `[S, L, E, Q * k]` where XLA
    does not fuse it, as on a CPU.
    """
    sequences, layers = len(routes[0][0]), len(routes)
    ids, weights = (jnp.stack(a, axis=1).reshape(sequences * layers, -1) for a in zip(*routes, strict=True))
    owner = jnp.arange(sequences * layers, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((sequences * layers, num_experts), jnp.float32)
    return zeros.at[owner, ids].add(weights, mode="drop").reshape(sequences, layers, num_experts)


def _add_mass(mass: jax.Array, rows: jax.Array, start: jax.Array, new: jax.Array) -> jax.Array:
    """Adds `new` `[S, L, E]` to the rows; a sequence that starts at position 0 starts anew."""
    old = mass.at[rows].get(mode="fill", fill_value=0)
    return mass.at[rows].set(jnp.where(start[:, None, None] == 0, 0, old) + new, mode="drop")


def _logits(model, hidden: jax.Array) -> jax.Array:
    """Logits of `[S, H]`. A lone row gets company: with one, XLA's CPU backend converts the whole head to float32."""
    rows = hidden.shape[0]
    return model.logits(jnp.pad(hidden, ((0, max(0, 2 - rows)), (0, 0))))[:rows]


def _sample(logits: jax.Array, inputs: StepInputs, positions: jax.Array) -> jax.Array:
    temperature, top_p, min_p = (inputs.sampling[:, i] for i in range(3))
    seeds = inputs.sequences[:, SEED].astype(jnp.uint32)
    return sample(logits, temperature, inputs.sequences[:, TOP_K], top_p, min_p, seeds, positions)


def _score(model, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Minus log-probability of `targets` `[S, Q]` given the hidden states, a bounded number of tokens at a time."""
    sequences, tokens, width = x.shape
    count = sequences * tokens
    chunk = min(SCORE_TOKENS, count)
    padding = -count % chunk
    hidden = jnp.pad(x.reshape(count, width), ((0, padding), (0, 0))).reshape(-1, chunk, width)
    wanted = jnp.pad(targets.reshape(count), (0, padding)).reshape(-1, chunk)

    nats = jax.lax.map(lambda pair: token_nats(model.logits(pair[0]), pair[1]), (hidden, wanted))
    return nats.reshape(-1)[:count].reshape(sequences, tokens)
