"""Model shapes that the benchmarks know by name, as the `config.json` of their checkpoints gives them."""

from __future__ import annotations

from typing import Any

from pwjax.config import ModelConfig
from pwjax.errors import UserError

MAX_POSITIONS = 2**17  # positions cost nothing until they are used; Qwen1.5-MoE's own limit is 8192

_QWEN15_MOE: dict[str, Any] = dict(
    model_type="qwen2_moe",
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=5632,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts=60,
    num_experts_per_tok=4,
    norm_topk_prob=False,
    qkv_bias=True,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=MAX_POSITIONS,
)
_MIXTRAL: dict[str, Any] = dict(
    model_type="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    num_local_experts=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_position_embeddings=MAX_POSITIONS,
)
# To try the commands where there is no GPU.
_TINY = _QWEN15_MOE | dict(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=256,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
)
_HF_CONFIGS = {"qwen1.5-moe": _QWEN15_MOE, "mixtral": _MIXTRAL, "tiny": _TINY}
NAMES = tuple(_HF_CONFIGS)


def hf_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The fields of `config.json` of a geometry, with fewer layers if `layers` says so.

    Raises:
        UserError: an unknown name, or fewer than one layer.
    """
    if name not in _HF_CONFIGS:
        raise UserError(f"--geometry {name}: unknown; use {', '.join(NAMES)}")
    if layers is not None and layers < 1:
        raise UserError(f"--layers is {layers}; it must be at least 1")
    fields = dict(_HF_CONFIGS[name])
    return fields | ({} if layers is None else {"num_hidden_layers": layers})


def model_config(name: str, layers: int | None = None) -> ModelConfig:
    """`hf_config` as the engine reads it."""
    return ModelConfig.from_hf(hf_config(name, layers))
