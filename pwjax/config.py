"""Model configurations. `ModelConfig.from_hf` is the only place that knows the names in a Hugging Face `config.json`.

Sources: transformers `models/qwen2_moe/configuration_qwen2_moe.py`, `models/mixtral/configuration_mixtral.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pwjax.errors import UserError

Family = Literal["qwen2_moe", "mixtral"]
FAMILIES: tuple[Family, ...] = ("qwen2_moe", "mixtral")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only Mixture-of-Experts model.

    Attributes:
        windows: sliding-window size of every layer in tokens; 0 means full attention.
        moe_layers: for every layer, whether its MLP is a Mixture of Experts.
        shared_intermediate_size: width of the always-on shared expert; 0 means there is none.
        dense_intermediate_size: width of the MLP in layers that are not MoE.
        norm_topk_prob: divide the top-k routing weights by their sum.
        router_weights_in_hidden_dtype: round routing weights to the activation dtype (Qwen2-MoE does, Mixtral doesn't).
        eos_token_ids: end-of-sequence ids named by `config.json`; generation takes the union with the tokenizer's.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    dense_intermediate_size: int
    norm_topk_prob: bool
    router_weights_in_hidden_dtype: bool
    qkv_bias: bool
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    moe_layers: tuple[bool, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"config.json: {self.num_heads} query heads do not divide by {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise UserError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(f"config.json: top-{self.num_experts_per_tok} of only {self.num_experts} experts")
        if not (len(self.windows) == len(self.moe_layers) == self.num_layers):
            raise UserError(f"config.json: layer lists do not have {self.num_layers} entries")
        if not any(self.moe_layers):
            raise UserError("config.json: no layer has experts; pwjax serves Mixture-of-Experts models")

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)

    @property
    def moe_layer_indices(self) -> tuple[int, ...]:
        """Decoder layer index of every MoE layer, in order."""
        return tuple(index for index, is_moe in enumerate(self.moe_layers) if is_moe)

    @property
    def num_linear_blocks(self) -> int:
        """Linear-blocks `(layer, expert, unit)`, numbered `(moe_layer * num_experts + expert) * 2 + unit`."""
        return self.num_moe_layers * self.num_experts * 2

    def unit_shape(self, unit: int) -> tuple[int, int]:
        """`[N, K]` of a linear-block: unit 0 is gate_up `[2I, H]` (gate rows first), unit 1 is down `[H, I]`."""
        if unit == 0:
            return 2 * self.moe_intermediate_size, self.hidden_size
        return self.hidden_size, self.moe_intermediate_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` in either spelling (hub files and transformers 5).

        Raises:
            UserError: unknown `model_type`, a missing field, or a feature that is not supported, naming the field.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UserError(f"config.json: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
        try:
            fields: dict[str, Any] = {**_common_fields(config), **_FAMILY_FIELDS[family](config)}
            return cls(**fields)
        except KeyError as error:
            raise UserError(f"config.json: field {error.args[0]!r} is missing") from None
        except (TypeError, AttributeError) as error:
            raise UserError(f"config.json: a field has an unexpected type ({error})") from None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_dict` after a round trip through JSON."""
        tuples = ("windows", "moe_layers", "eos_token_ids")
        values: dict[str, Any] = {n: tuple(value) if n in tuples else value for n, value in fields.items()}
        return cls(**values)


def _common_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act is {config['hidden_act']!r}; this family is supported with 'silu'")
    heads = config["num_attention_heads"]
    return dict(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_as_ids(config.get("eos_token_id")),
        num_experts_per_tok=config["num_experts_per_tok"],
    )


def _qwen2_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    sparse_step = config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    return dict(
        rope_theta=_rope_theta(config, default=10000.0),
        num_experts=config["num_experts"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["shared_expert_intermediate_size"],
        dense_intermediate_size=config["intermediate_size"],
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        router_weights_in_hidden_dtype=True,
        qkv_bias=bool(config.get("qkv_bias", True)),
        windows=_qwen2_moe_windows(config),
        moe_layers=tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(layers)),
    )


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return dict(
        rope_theta=_rope_theta(config, default=1e6),
        num_experts=config["num_local_experts"] if "num_local_experts" in config else config["num_experts"],
        moe_intermediate_size=config["intermediate_size"],
        shared_intermediate_size=0,
        dense_intermediate_size=config["intermediate_size"],
        norm_topk_prob=True,
        router_weights_in_hidden_dtype=False,
        qkv_bias=False,
        windows=(config.get("sliding_window") or 0,) * layers,
        moe_layers=(True,) * layers,
    )


_FAMILY_FIELDS = {"qwen2_moe": _qwen2_moe_fields, "mixtral": _mixtral_fields}


def _qwen2_moe_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every second layer slides below `max_window_layers`; an explicit `layer_types` overrides; off means all full."""
    layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False):
        return (0,) * layers
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if kinds is None:
        limit = config.get("max_window_layers", 28)
        return tuple(window if (i + 1) % 2 == 1 and i < limit else 0 for i in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope_theta(config: Mapping[str, Any], *, default: float) -> float:
    """`rope_theta` at the top level (hub) or inside `rope_parameters` (transformers 5); scaled variants are refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"config.json: rope type {kind!r} is not supported; supported is 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", default)))


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
