"""Small Hugging Face folders written tensor by tensor, with names spelled out (not taken from the code under test)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, INNER, EXPERTS, LAYERS, VOCAB = 16, 12, 3, 2, 24
SHARED = 20

QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": SHARED,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CONFIGS = {"qwen2_moe": QWEN2_MOE, "mixtral": MIXTRAL}


def tensors(family: str, layout: str, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Every tensor of a folder, "hub" or "fused"; both layouts of one seed hold the same weights."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    found = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "model.norm.weight": weight(HIDDEN)}
    found["lm_head.weight"] = weight(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = weight(HIDDEN)
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = weight(rows, HIDDEN)
            if family == "qwen2_moe":
                found[f"{prefix}self_attn.{name}_proj.bias"] = weight(rows)
        found[f"{prefix}self_attn.o_proj.weight"] = weight(HIDDEN, HIDDEN)
        module = "block_sparse_moe" if family == "mixtral" and layout == "hub" else "mlp"
        found[f"{prefix}{module}.gate.weight"] = weight(EXPERTS, HIDDEN)
        if family == "qwen2_moe":
            for name in ("gate_proj", "up_proj"):
                found[f"{prefix}mlp.shared_expert.{name}.weight"] = weight(SHARED, HIDDEN)
            found[f"{prefix}mlp.shared_expert.down_proj.weight"] = weight(HIDDEN, SHARED)
            found[f"{prefix}mlp.shared_expert_gate.weight"] = weight(1, HIDDEN)
        gate, up = weight(EXPERTS, INNER, HIDDEN), weight(EXPERTS, INNER, HIDDEN)
        down = weight(EXPERTS, HIDDEN, INNER)
        found |= expert_tensors(family, layout, f"{prefix}{module}.experts", gate, up, down)
    return found


def expert_tensors(
    family: str, layout: str, prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> dict[str, np.ndarray]:
    if layout == "fused":
        return {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    return {
        f"{prefix}.{expert}.{name}.weight": np.ascontiguousarray(stack[expert])
        for name, stack in zip(names, (gate, up, down), strict=True)
        for expert in range(len(gate))
    }


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], *, shards: int = 1, index: bool = True
) -> Path:
    """Writes config and weights: one `model.safetensors`, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {name: shard_name(i % shards, shards) for i, name in enumerate(weights)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def shard_name(number: int, shards: int) -> str:
    return f"model-{number + 1:05d}-of-{shards:05d}.safetensors"


def standard_folder(folder: Path, family: str = "qwen2_moe", layout: str = "hub", **options: Any) -> Path:
    """A valid folder."""
    return write_folder(folder, CONFIGS[family], tensors(family, layout), **options)
