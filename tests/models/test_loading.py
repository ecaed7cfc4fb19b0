"""Names, shapes and errors of loading; no copy of what already fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.config import ModelConfig
from pwjax.errors import UserError
from pwjax.models import dense_weight_shapes, load_dense, load_layer, merge

HF_CONFIG = {
    "model_type": "qwen2_moe", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 11, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
    "intermediate_size": 20, "mlp_only_layers": [10],
}  # fmt: skip


def config(**overrides):
    return ModelConfig.from_hf(HF_CONFIG | overrides)


def dense_of(model_config):
    return {name: np.full(shape, 1.0, np.float32) for name, shape in dense_weight_shapes(model_config).items()}


def test_names_and_shapes_are_the_hubs():
    shapes = dense_weight_shapes(config())
    assert shapes["model.embed_tokens.weight"] == (32, 16)
    assert shapes["model.layers.0.mlp.gate.weight"] == (4, 16)
    assert shapes["model.layers.9.mlp.shared_expert_gate.weight"] == (1, 16)
    assert shapes["model.layers.10.mlp.gate_proj.weight"] == (20, 16)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (8,)
    assert shapes["model.norm.weight"] == (16,)
    assert shapes["lm_head.weight"] == (32, 16)
    assert not any(".experts." in name for name in shapes)
    assert "lm_head.weight" not in dense_weight_shapes(config(tie_word_embeddings=True))


def test_names_equal_those_of_transformers():
    pytest.importorskip("torch")
    from tests.hf_models import dense_and_experts, tiny_model

    for family, overrides in (("qwen2_moe", {"mlp_only_layers": [0]}), ("mixtral", {"tie_word_embeddings": True})):
        hf_model, config_dict = tiny_model(family, 0, **overrides)
        dense, _ = dense_and_experts(hf_model)
        want = {name: array.shape for name, array in dense.items()}
        assert dense_weight_shapes(ModelConfig.from_hf(config_dict)) == want


def test_every_weight_arrives_under_its_own_name():
    """Twelve layers, so that sorting names as text (layer 10 before layer 2) would show."""
    dense = dense_of(config())
    for index, name in enumerate(dense):
        dense[name] = dense[name] * index
    definition, leaves = load_dense(config(), dense.items(), jnp.float32)
    model = merge(definition, leaves)
    index = list(dense).index("model.layers.2.self_attn.o_proj.weight")
    assert float(model.layers[2].self_attn.o_proj.weight[0, 0]) == index
    for name, leaf in zip(definition.names, leaves, strict=True):
        parts = [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        stored = np.concatenate([dense[part] for part in parts]) if "qkv_proj" in name else dense[name]
        np.testing.assert_array_equal(np.asarray(leaf), stored)


def test_weights_may_come_in_any_order_and_all_are_counted():
    dense = {name: np.random.default_rng(len(name)).normal(size=a.shape) for name, a in dense_of(config()).items()}
    _, leaves = load_dense(config(), dense.items(), jnp.bfloat16)
    _, reverse = load_dense(config(), reversed(dense.items()), jnp.bfloat16)
    for one, other in zip(leaves, reverse, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert sum(leaf.nbytes for leaf in leaves) == 2 * sum(a.size for a in dense.values())


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
    (lambda d: d.pop("model.layers.3.self_attn.k_proj.bias"), r"no tensor '\S*3.self_attn.k_proj.bias'; it"),
    (lambda d: d.update({"model.layers.3.mlp.experts.0.up_proj.weight": np.ones(1)}), "experts.0.up_proj.weight"),
    (lambda d: d.update({"model.norm.weight": np.ones(8, np.float32)}), r"'model.norm.weight' has shape \[8\].*\[16\]"),
])  # fmt: skip
def test_bad_checkpoints_are_refused_by_name(change, message):
    dense = dense_of(config())
    change(dense)
    with pytest.raises(UserError, match=message):
        load_dense(config(), dense.items(), jnp.float32)


def test_tied_head_may_be_present_or_absent():
    tied = config(tie_word_embeddings=True)
    dense = dense_of(tied)
    load_dense(tied, dense.items(), jnp.float32)
    load_dense(tied, [*dense.items(), ("lm_head.weight", np.ones((32, 16), np.float32))], jnp.float32)
    untied = dense_of(config())
    del untied["lm_head.weight"]
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load_dense(config(), untied.items(), jnp.float32)


def test_arrays_of_the_right_dtype_are_not_copied():
    dense = {name: jnp.asarray(array, jnp.bfloat16) for name, array in dense_of(config()).items()}
    definition, leaves = load_dense(config(), dense.items(), jnp.bfloat16)
    pairs = [pair for pair in zip(definition.names, leaves, strict=True) if "qkv_proj" not in pair[0]]
    assert all(leaf is dense[name] for name, leaf in pairs)


def test_equal_layers_share_one_definition():
    """So that functions jitted over a layer compile once a kind of layer, not once a layer."""
    dense = dense_of(config())
    definitions = [load_layer(config(), layer, dense, jnp.float32)[0] for layer in range(11)]
    assert len(set(definitions)) == 2
    assert definitions[0] == definitions[9] != definitions[10]


def test_merge_inside_jit():
    definition, leaves = load_dense(config(), dense_of(config()).items(), jnp.float32)
    embed = jax.jit(lambda leaves, tokens: merge(definition, leaves).embed(tokens))
    np.testing.assert_array_equal(np.asarray(embed(leaves, jnp.arange(3))), np.ones((3, 16)))
