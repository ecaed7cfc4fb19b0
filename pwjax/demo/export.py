"""Between the training parameters and a Qwen2-MoE checkpoint in the hub's per-expert layout."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from pwjax.demo.model import DemoConfig, DemoMoe

_LINEARS = {
    "self_attn.q_proj": ("attention", "q_proj"),
    "self_attn.k_proj": ("attention", "k_proj"),
    "self_attn.v_proj": ("attention", "v_proj"),
    "self_attn.o_proj": ("attention", "o_proj"),
    "mlp.gate": ("moe", "gate"),
    "mlp.shared_expert.gate_proj": ("moe", "shared_gate_proj"),
    "mlp.shared_expert.up_proj": ("moe", "shared_up_proj"),
    "mlp.shared_expert.down_proj": ("moe", "shared_down_proj"),
    "mlp.shared_expert_gate": ("moe", "shared_expert_gate"),
}
_EXPERTS = {"gate_proj": "experts_gate", "up_proj": "experts_up", "down_proj": "experts_down"}


def hub_tensors(params: nnx.State) -> dict[str, np.ndarray]:
    """bf16 tensors under hub names; matrices turn from `[in, out]` to the hub's `[out, in]`."""
    tree = nnx.to_pure_dict(jax.device_get(params))
    tensors = {"model.embed_tokens.weight": tree["embed"], "model.norm.weight": tree["norm"]["weight"]}
    blocks = tree["blocks"]
    num_layers, num_experts = blocks["moe"]["experts_gate"].shape[:2]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = blocks[norm]["weight"][layer]
        for name, (part, leaf) in _LINEARS.items():
            linear = blocks[part][leaf]
            tensors[f"{prefix}.{name}.weight"] = linear["kernel"][layer].T
            if linear.get("bias") is not None:
                tensors[f"{prefix}.{name}.bias"] = linear["bias"][layer]
        for expert in range(num_experts):
            for name, leaf in _EXPERTS.items():
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = blocks["moe"][leaf][layer, expert].T
    return {name: np.ascontiguousarray(value).astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def load_params(directory: Path, config: DemoConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The inverse of `save_checkpoint`: float32 parameters, every value exactly the bf16 one on disk."""
    from safetensors import safe_open

    hub = {}
    for path in sorted(directory.glob("model-*.safetensors")):
        with safe_open(path, framework="flax") as shard:
            hub |= {name: np.asarray(shard.get_tensor(name), np.float32) for name in shard.keys()}  # noqa: SIM118
    layers, experts = range(config.num_layers), range(config.num_experts)
    blocks: dict = {"attention": {}, "moe": {}}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        blocks[norm] = {"weight": np.stack([hub[f"model.layers.{i}.{norm}.weight"] for i in layers])}
    for name, (part, leaf) in _LINEARS.items():
        kernel = np.stack([hub[f"model.layers.{i}.{name}.weight"].T for i in layers])
        blocks[part][leaf] = {"kernel": kernel}
        if f"model.layers.0.{name}.bias" in hub:
            blocks[part][leaf]["bias"] = np.stack([hub[f"model.layers.{i}.{name}.bias"] for i in layers])
    for name, leaf in _EXPERTS.items():
        rows = [[hub[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"].T for e in experts] for i in layers]
        blocks["moe"][leaf] = np.stack([np.stack(row) for row in rows])
    graph, state = nnx.split(nnx.eval_shape(lambda: DemoMoe(config, nnx.Rngs(0))))
    values = {"embed": hub["model.embed_tokens.weight"], "norm": {"weight": hub["model.norm.weight"]}, "blocks": blocks}
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    return graph, state


def hub_config(config: DemoConfig, eos_token_id: int) -> dict:
    """`config.json` in the hub's spelling, which transformers 4 and 5 both read."""
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.num_experts_per_tok * config.moe_intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "qkv_bias": True,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": 0.02,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": False,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0001,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": "bfloat16",
    }


def save_checkpoint(params: nnx.State, config: DemoConfig, eos_token_id: int, directory: Path, shards: int = 4) -> None:
    """Writes config, generation config and `shards` safetensors files of about equal size with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = hub_tensors(params)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    seen = 0
    for name, tensor in tensors.items():
        parts[min(shards - 1, seen * shards // total_bytes)][name] = tensor
        seen += tensor.nbytes
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    generation = {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id, "do_sample": False, "max_new_tokens": 128}
    for file, content in (
        ("model.safetensors.index.json", index),
        ("config.json", hub_config(config, eos_token_id)),
        ("generation_config.json", generation),
    ):
        (directory / file).write_text(json.dumps(content, indent=2) + "\n")
