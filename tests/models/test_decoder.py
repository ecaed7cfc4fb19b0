"""The decoder against transformers' Qwen2-MoE and Mixtral in float32, with the same random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.config import ModelConfig
from pwjax.models import forward_dense, load_dense, merge
from tests.hf_models import dense_and_experts, hf_logits, tiny_mixtral, tiny_model, tiny_qwen2_moe


def logits_of(hf_model, config_dict, tokens, dtype=jnp.float32):
    config = ModelConfig.from_hf(config_dict)
    dense, experts = dense_and_experts(hf_model)
    definition, leaves = load_dense(config, dense.items(), dtype)
    pairs = [tuple(jnp.asarray(weight, dtype) for weight in pair) for pair in experts.values()]
    assert len(pairs) == config.num_moe_layers
    run = jax.jit(lambda leaves, tokens, pairs: forward_dense(merge(definition, leaves), tokens, pairs))
    return np.asarray(run(leaves, jnp.asarray(tokens), pairs))


def random_tokens(seed, batch=2, length=37, vocab=264):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


CASES = {
    "default": ("qwen2_moe", {}),
    "top-6 of 60": ("qwen2_moe", {"num_experts": 60, "num_experts_per_tok": 6, "moe_intermediate_size": 16}),
    "norm_topk_prob": ("qwen2_moe", {"norm_topk_prob": True}),
    "no qkv_bias, tied, MHA": (
        "qwen2_moe",
        {"qkv_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "mlp_only_layers": ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "decoder_sparse_step": ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "alternating windows": (
        "qwen2_moe",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    ),
    "head_dim is not hidden / heads": ("mixtral", {"head_dim": 8}),
    "mixtral": ("mixtral", {}),
    "mixtral top-3, tied": ("mixtral", {"num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "mixtral window": ("mixtral", {"sliding_window": 9}),
    "mixtral window of 1": ("mixtral", {"sliding_window": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name):
    family, overrides = CASES[name]
    hf_model, config_dict = tiny_model(family, seed=len(name), **overrides)
    tokens = random_tokens(len(name))
    want = hf_logits(hf_model, tokens)
    got = logits_of(hf_model, config_dict, tokens)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("build", [tiny_qwen2_moe, tiny_mixtral])
def test_long_sequences_and_seeds(build, seed):
    """200 tokens: attention goes over several blocks of keys, the last one partly filled."""
    hf_model, config_dict = build(seed)
    tokens = random_tokens(seed, batch=1, length=200)
    want = hf_logits(hf_model, tokens)
    got = logits_of(hf_model, config_dict, tokens)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_window_over_several_blocks():
    """A window that starts inside the second block of keys: earlier blocks are skipped, not miscounted."""
    hf_model, config_dict = tiny_mixtral(5, sliding_window=100)
    tokens = random_tokens(5, batch=1, length=300)
    want = hf_logits(hf_model, tokens)
    got = logits_of(hf_model, config_dict, tokens)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_bfloat16_stays_near_float32():
    hf_model, config_dict = tiny_qwen2_moe(7, num_hidden_layers=1)
    tokens = random_tokens(7)
    want = hf_logits(hf_model, tokens)
    got = logits_of(hf_model, config_dict, tokens, jnp.bfloat16)
    assert got.dtype == np.float32
    assert np.median(np.abs(got - want)) <= 0.02 * np.abs(want).max()
