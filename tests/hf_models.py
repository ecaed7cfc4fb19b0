"""Tiny random Hugging Face models and checkpoints for tests: the independent reference that pwjax is compared with.

A test module that imports this one is skipped where torch is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

END_OF_TEXT = "<|endoftext|>"
NUM_BYTE_TOKENS = 257  # 256 bytes and END_OF_TEXT, whose id is 256

QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def tiny_qwen2_moe(seed: int, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """A float32 model with random weights and its `config.json` as a dict in the hub's spelling."""
    config = QWEN2_MOE | overrides
    return _random_model("Qwen2Moe", config, seed), config


def tiny_mixtral(seed: int, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """As `tiny_qwen2_moe`, for Mixtral."""
    config = MIXTRAL | overrides
    return _random_model("Mixtral", config, seed), config


def tiny_model(family: str, seed: int, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """`tiny_qwen2_moe` or `tiny_mixtral`."""
    return {"qwen2_moe": tiny_qwen2_moe, "mixtral": tiny_mixtral}[family](seed, **overrides)


def dense_and_experts(model: Any) -> tuple[dict[str, np.ndarray], dict[int, tuple[np.ndarray, np.ndarray]]]:
    """The weights of an HF model in pwjax's terms, float32.

    Returns:
        dense: hub name (Mixtral's router as `mlp.gate`) to array, no routed experts, no tied `lm_head.weight`.
        experts: decoder layer index to gate_up `[E, 2I, H]` and down `[E, H, I]`, for MoE layers, in order.
    """
    dense: dict[str, np.ndarray] = {}
    pairs: dict[int, dict[str, np.ndarray]] = {}
    for name, parameter in model.named_parameters():  # tied parameters come once
        array = parameter.detach().float().numpy().copy()
        if ".experts." in name:
            pairs.setdefault(int(name.split(".")[2]), {})[name.rsplit(".", 1)[1]] = array
        else:
            dense[name] = array
    experts = {layer: (pair["gate_up_proj"], pair["down_proj"]) for layer, pair in sorted(pairs.items())}
    return dense, experts


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits `[B, T, vocab]` of int `[B, T]`."""
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens), dtype=torch.long), use_cache=False).logits.float().numpy()


def save_tiny_checkpoint(
    path: Path | str,
    family: str,
    seed: int,
    layout: str = "hub",
    shards: int = 1,
    with_tokenizer: bool = True,
    dtype: str = "bfloat16",
    **overrides: Any,
) -> Any:
    """Writes a Hugging Face folder.

    Args:
        family: "qwen2_moe" or "mixtral".
        layout: "hub" (a tensor an expert, config in the hub's spelling) or "fused" (transformers 5's own).
        shards: at least this many weight files where the model has enough tensors; 1 is a lone `model.safetensors`.
        with_tokenizer: adds a byte-level tokenizer: one id a byte (0..255), END_OF_TEXT is 256.
        dtype: of the saved weights.
        overrides: fields of `config.json`.

    Returns:
        The HF model in float32 with exactly the weights that were saved.
    """
    path = Path(path)
    model, config = tiny_model(family, seed, **overrides)
    saved_dtype = getattr(torch, dtype)
    # Parameters only: `model.to` would round the rotary frequencies too, which a reader of the folder never does.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(saved_dtype)
    model.config.dtype = saved_dtype
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shard_bytes = total_bytes * 2 if shards == 1 else total_bytes // shards
    model.save_pretrained(path, max_shard_size=shard_bytes, save_original_format=layout == "hub")
    if layout == "hub":
        (path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2))
    if with_tokenizer:
        save_byte_tokenizer(path)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def save_byte_tokenizer(path: Path | str) -> None:
    """A byte-level BPE without merges, as `tokenizer.json` and `tokenizer_config.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(path)


def _random_model(family: str, fields: dict[str, Any], seed: int) -> Any:
    """Weights of unit gain (HF's own 0.02 makes tiny models linear, and routing flat); norms and biases vary too."""
    fields = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = 1 + 0.1 * values
            elif name.endswith("bias"):
                values = 0.2 * values
            elif "embed_tokens" not in name:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(values)
    return model
