"""Routing: rounding, normalisation and ties, against torch where torch defines them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pwjax.config import ModelConfig
from pwjax.models import load_layer, merge
from tests import hf_models
from tests.hf_models import dense_and_experts, tiny_mixtral, tiny_qwen2_moe


def layer_of(hf_model, config_dict, dtype):
    dense, _ = dense_and_experts(hf_model)
    return merge(*load_layer(ModelConfig.from_hf(config_dict), 0, dense, dtype))


@pytest.mark.parametrize(("build", "overrides"), [
    (tiny_qwen2_moe, {"num_experts": 60, "num_experts_per_tok": 4}),
    (tiny_qwen2_moe, {"norm_topk_prob": True}),
    (tiny_mixtral, {}),
])  # fmt: skip
def test_bfloat16_routing_equals_torch(build, overrides):
    """In bfloat16 the roundings of logits and weights decide; Qwen2-MoE rounds its weights, Mixtral keeps float32."""
    hf_model, config_dict = build(11, **overrides)
    layer = layer_of(hf_model, config_dict, jnp.bfloat16)
    h = np.random.default_rng(0).standard_normal((256, 64)).astype(ml_dtypes.bfloat16)
    ids, weights = layer.mlp.route(jnp.asarray(h))
    gate = hf_model.model.layers[0].mlp.gate.to(hf_models.torch.bfloat16)
    with hf_models.torch.no_grad():
        _, want_weights, want_ids = gate(hf_models.torch.tensor(h.astype(np.float32)).to(hf_models.torch.bfloat16))
    ids, weights = np.asarray(ids), np.asarray(weights)
    # A logit may round differently where the two sums differ in the last bit: compare the tokens where none did.
    same = (ids == want_ids.numpy()).all(-1)
    assert same.mean() > 0.9
    np.testing.assert_allclose(weights[same], want_weights.float().numpy()[same], rtol=2**-7)
    is_bfloat16 = np.array_equal(weights, weights.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert is_bfloat16 == (build is tiny_qwen2_moe)


def test_equal_logits_take_the_lowest_expert():
    hf_model, config_dict = tiny_qwen2_moe(3)
    layer = layer_of(hf_model, config_dict, jnp.float32)
    layer.mlp.gate.weight[...] = jnp.zeros_like(layer.mlp.gate.weight[...])
    ids, weights = layer.mlp.route(jnp.ones((5, 64)))
    np.testing.assert_array_equal(np.asarray(ids), np.tile([0, 1, 2], (5, 1)))
    np.testing.assert_allclose(np.asarray(weights), 1 / 8, rtol=1e-6)
