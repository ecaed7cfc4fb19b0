"""A random model is one that the engine can serve, and whose figures mean something."""

import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.bench.geometries import model_config
from pwjax.bench.synthetic import SyntheticModel
from pwjax.errors import UserError
from pwjax.models import load_dense, merge


@pytest.mark.parametrize(
    ("name", "layers", "weights"),
    [("qwen1.5-moe", None, 12_457_082_880), ("mixtral", None, 45_097_156_608), ("mixtral", 4, 5_637_144_576)],
)
def test_geometries_have_the_real_models_routed_weights(name, layers, weights):
    config = model_config(name, layers)
    assert config.num_linear_blocks // 2 * sum(np.prod(config.unit_shape(unit)) for unit in range(2)) == weights


def test_the_same_seed_gives_the_same_model():
    config = model_config("tiny")
    first, again, other = (SyntheticModel(config, max_bits=4, seed=seed) for seed in (1, 1, 2))
    dense = [dict(model.iter_dense())["model.layers.0.self_attn.q_proj.weight"] for model in (first, again, other)]
    pages = [model.load_layer(0)["down"][4] for model in (first, again, other)]
    for values in (dense, pages):
        np.testing.assert_array_equal(values[0], values[1])
        assert (np.asarray(values[0]) != np.asarray(values[2])).any()


def test_only_the_pages_asked_for_are_made():
    model = SyntheticModel(model_config("tiny"), max_bits=5)
    layout, pages = model.geometry().gate_up, model.load_layer(1)["gate_up"]
    assert list(pages) == [3, 4, 5]
    assert pages[3].shape == (model.config.num_experts, layout.page_slots(3) * layout.slot_words)
    with pytest.raises(UserError, match="--max-bits is 9"):
        SyntheticModel(model.config, max_bits=9)


def test_routing_spreads_and_logits_have_a_scale():
    config = model_config("tiny")
    model = SyntheticModel(config, max_bits=3)
    decoder = merge(*load_dense(config, model.iter_dense(), jnp.float32))
    x = decoder.embed(jnp.arange(config.vocab_size)[None])
    _, ids, _ = decoder.layers[0].route(x)
    shares = np.bincount(np.asarray(ids).ravel(), minlength=config.num_experts) / ids.size
    assert shares.min() > 0.2 / config.num_experts and shares.max() < 4 / config.num_experts
    assert 0.5 < float(jnp.std(decoder.logits(x))) < 2


@pytest.mark.parametrize("prompt", ["text", [], [256], [-1]])
def test_prompts_are_ids(prompt):
    with pytest.raises(UserError):
        SyntheticModel(model_config("tiny"), max_bits=3).tokenizer.prompt_ids(prompt)
