"""Streams of hidden states that walk through the model a layer at a time, while `prepare` quantizes it.

Streams, all float32 `[sequences, tokens, H]`:

* base: nothing quantized; over every calibration sequence, since importance wants many tokens;
* perturbed `(m, u)`, from MoE layer m on: only unit u of layer m is quantized, to 3 bits. Their loss gives kappa;
* uniform `b`: every layer so far is quantized to b bits. Their loss tells how many bits are enough.

The last two kinds cover the first `loss_sequences` sequences. With L MoE layers there are `2 L + 6` of them at the end,
`stream_bytes` in total, and they are what the walk holds besides one layer's weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.calibration.grouped_experts import RoutedSums
from pwjax.calibration.passes import (
    BeforeExperts,
    loss_sums,
    through_dense_layer,
    through_experts,
    through_moe_layer,
    to_experts,
)
from pwjax.config import ModelConfig
from pwjax.errors import UserError
from pwjax.models.decoder import DecoderLayer
from pwjax.models.forward import ExpertWeights
from pwjax.models.loading import TIED_HEAD, ModuleDef, load_layer

UNITS = (0, 1)
KAPPA_BITS = BITS[0]
# Sequences that go through a layer at once: enough tokens an expert to fill tiles, few enough for small memories.
CHUNK_SEQUENCES = 16

QuantizedWeights = Callable[[int, int], Any]
"""(unit, bits) to the dequantized weights `[E, N, K]` of the layer, a new NumPy or JAX array, float32 or bfloat16."""


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """What a layer's routed tokens say about its linear-blocks.

    Attributes:
        importance: float32 `[E, H]` for gate_up and `[E, I]` for down: mean over the expert's tokens of r^2 x_j^2.
        tokens_per_expert: int64 `[E]`.
        averaged_experts: experts with fewer than `min_tokens` tokens; their rows are the layer's mean over all tokens.
    """

    importance: tuple[np.ndarray, np.ndarray]
    tokens_per_expert: np.ndarray
    averaged_experts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CalibrationLosses:
    """Mean nats a token over the loss sequences.

    Attributes:
        perturbed: float64 `[L, 2]`, unit u of MoE layer l alone at 3 bits.
        uniform: bits (3..8) to the loss with all routed experts at that width.
    """

    base: float
    perturbed: np.ndarray
    uniform: dict[int, float]
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class _Routed:
    """A layer between `observe` and `advance`: the base stream of the loss sequences just before the experts."""

    layer: int
    definition: ModuleDef[DecoderLayer]
    leaves: tuple[jax.Array, ...]
    chunks: tuple[BeforeExperts, ...]


class CalibrationWalker:
    """Call `observe` then `advance` for every MoE layer and `pass_dense_layer` for the others, in order; then `losses`.

    Args:
        config: the model.
        tokens: int32 `[n, T]`, whole sequences without padding.
        embed_weight: `model.embed_tokens.weight` `[vocab, H]`.
        loss_sequences: how many of the sequences, from the first, the losses are measured on.
        min_tokens: an expert with fewer tokens takes its layer's mean importance.

    Raises:
        UserError: no sequences, or sequences of fewer than 2 tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: np.ndarray,
        embed_weight: Any,
        *,
        loss_sequences: int = 16,
        min_tokens: int = 8,
    ):
        if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
            raise UserError(f"calibration tokens have shape {list(tokens.shape)}; at least one sequence of 2 is needed")
        self.config = config
        self.min_tokens = min_tokens
        self._next_layer = 0
        self._routed: _Routed | None = None
        self._num_losses = min(loss_sequences, len(tokens))
        self._tokens = jnp.array(tokens[: self._num_losses], jnp.int32)
        # The loss sequences are chunks of their own, so that the other streams start from whole chunks.
        self._base = [
            jnp.asarray(_embed(embed_weight, part))
            for part in (*_split(tokens[: self._num_losses]), *_split(tokens[self._num_losses :]))
        ]
        self._loss_chunks = len(_split(tokens[: self._num_losses]))
        self._perturbed: dict[tuple[int, int], list[jax.Array]] = {}
        self._uniform = {bits: list(self._base[: self._loss_chunks]) for bits in BITS}

    @property
    def stream_bytes(self) -> int:
        """Bytes of hidden states that the walk holds at its end."""
        sequences = sum(len(part) for part in self._base)
        sequences += self._num_losses * (len(BITS) + len(UNITS) * self.config.num_moe_layers)
        return sequences * self._tokens.shape[1] * self.config.hidden_size * 4

    def pass_dense_layer(self, layer: int, dense: Mapping[str, Any]) -> None:
        """Takes every stream through a layer without experts.

        Args:
            dense: hub name to array; those of other layers are ignored.
        """
        definition, leaves = self._enter(layer, dense, is_moe=False)
        move = functools.partial(through_dense_layer, definition, leaves)
        for stream in (self._base, *self._perturbed.values(), *self._uniform.values()):
            stream[:] = [move(x) for x in stream]
        self._next_layer += 1

    def observe(self, layer: int, dense: Mapping[str, Any], experts: ExpertWeights) -> LayerStatistics:
        """Takes the base stream through an MoE layer and reports what its experts saw.

        Args:
            dense: hub name to array; those of other layers are ignored.
            experts: gate_up `[E, 2I, H]` and down `[E, H, I]`.
        """
        definition, leaves = self._enter(layer, dense, is_moe=True)
        experts = _on_device(experts)
        self._check_shapes(layer, experts)
        total: RoutedSums | None = None
        kept = []
        for index, x in enumerate(self._base):
            before_experts = to_experts(definition, leaves, x)
            self._base[index], sums = through_experts(definition, leaves, before_experts, experts)
            total = sums if total is None else RoutedSums(*(a + b for a, b in zip(total, sums, strict=True)))
            if index < self._loss_chunks:
                kept.append(before_experts)
        assert total is not None
        self._routed = _Routed(layer, definition, leaves, tuple(kept))
        return _statistics(total, self.min_tokens)

    def advance(self, experts: ExpertWeights, quantized: QuantizedWeights) -> None:
        """Takes the other streams through the layer just observed.

        Args:
            experts: as given to `observe`.
            quantized: called once for each unit and each bit-width, 3 first; at most two of its results are held.
        """
        if self._routed is None:
            raise RuntimeError("advance() follows observe()")
        routed, self._routed = self._routed, None
        experts = _on_device(experts)
        for stream in self._perturbed.values():
            stream[:] = [through_moe_layer(routed.definition, routed.leaves, x, experts) for x in stream]
        moe_layer = self.config.moe_layer_indices.index(routed.layer)
        for bits in BITS:
            pair = _on_device((quantized(0, bits), quantized(1, bits)))
            if bits == KAPPA_BITS:
                self._perturb(moe_layer, routed, experts, pair)
            stream = self._uniform[bits]
            stream[:] = [through_moe_layer(routed.definition, routed.leaves, x, pair) for x in stream]
            jax.block_until_ready(stream)  # dispatch must not run ahead and pile up six widths of weights
        self._next_layer += 1

    def losses(self, dense: Mapping[str, Any]) -> CalibrationLosses:
        """Losses at the end of the walk.

        Args:
            dense: with `model.norm.weight`, and `lm_head.weight` or, when tied, `model.embed_tokens.weight`.
        """
        if self._next_layer != self.config.num_layers:
            raise RuntimeError(f"losses() after layer {self._next_layer} of {self.config.num_layers}")
        norm = jnp.asarray(dense["model.norm.weight"], jnp.float32)
        head = jnp.asarray(dense["model.embed_tokens.weight" if self.config.tie_word_embeddings else TIED_HEAD])
        targets = _split(self._tokens)
        num_tokens = self._tokens.shape[0] * (self._tokens.shape[1] - 1)

        def loss(stream: list[jax.Array]) -> float:
            sums = [
                loss_sums(x, part, norm, head, self.config.rms_norm_eps)
                for x, part in zip(stream, targets, strict=True)
            ]
            return float(np.concatenate([np.asarray(part, np.float64) for part in sums]).sum() / num_tokens)

        perturbed = [[loss(self._perturbed[m, u]) for u in UNITS] for m in range(self.config.num_moe_layers)]
        return CalibrationLosses(
            base=loss(self._base[: self._loss_chunks]),
            perturbed=np.array(perturbed),
            uniform={bits: loss(stream) for bits, stream in self._uniform.items()},
            num_tokens=num_tokens,
        )

    def _enter(
        self, layer: int, dense: Mapping[str, Any], *, is_moe: bool
    ) -> tuple[ModuleDef[DecoderLayer], tuple[jax.Array, ...]]:
        if self._routed is not None or layer != self._next_layer or self.config.moe_layers[layer] != is_moe:
            raise RuntimeError(f"layer {layer} is out of order: layer {self._next_layer} is next")
        return load_layer(self.config, layer, dense, jnp.float32)

    def _check_shapes(self, layer: int, experts: ExpertWeights) -> None:
        for unit, weight in zip(UNITS, experts, strict=True):
            wanted = (self.config.num_experts, *self.config.unit_shape(unit))
            if weight.shape != wanted:
                raise UserError(f"experts of layer {layer} have shape {list(weight.shape)}; expected {list(wanted)}")

    def _perturb(self, moe_layer: int, routed: _Routed, experts: ExpertWeights, pair: ExpertWeights) -> None:
        """Starts the two streams of this layer from the base stream: attention and routing are those of `observe`."""
        for unit in UNITS:
            weights = (pair[0], experts[1]) if unit == 0 else (experts[0], pair[1])
            self._perturbed[moe_layer, unit] = [
                through_experts(routed.definition, routed.leaves, before_experts, weights)[0]
                for before_experts in routed.chunks
            ]


def _split(sequences: Any) -> list[Any]:
    return [sequences[i : i + CHUNK_SEQUENCES] for i in range(0, len(sequences), CHUNK_SEQUENCES)]


def _on_device(experts: ExpertWeights) -> ExpertWeights:
    return jnp.asarray(experts[0]), jnp.asarray(experts[1])


def _embed(embed_weight: Any, tokens: np.ndarray) -> np.ndarray:
    """On the host: the table of a large vocabulary need not go to the device for a few rows."""
    return np.asarray(embed_weight)[np.asarray(tokens)].astype(np.float32)


def _statistics(sums: RoutedSums, min_tokens: int) -> LayerStatistics:
    counts = np.asarray(sums.tokens, np.int64)
    few = counts < min_tokens
    importance = []
    for total in (np.asarray(sums.gate_up, np.float64), np.asarray(sums.down, np.float64)):
        mean = total / np.maximum(counts, 1)[:, None]
        mean[few] = total.sum(0) / counts.sum()
        importance.append(mean.astype(np.float32))
    return LayerStatistics((importance[0], importance[1]), counts, tuple(np.flatnonzero(few).tolist()))
