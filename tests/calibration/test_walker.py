"""The walk against transformers: statistics from torch hooks in float64, losses of models with replaced weights."""

import numpy as np
import pytest

from pwjax.calibration import CalibrationWalker
from pwjax.calibration import walker as walker_module
from pwjax.config import ModelConfig
from pwjax.errors import UserError
from tests.hf_models import dense_and_experts, hf_logits, tiny_mixtral, tiny_model, torch

BITS = range(3, 9)


def rounded(weights, bits):
    """A crude quantizer of its own: 2**bits even steps a row."""
    top = np.abs(weights).max(-1, keepdims=True)
    step = 2 * top / (2**bits - 1)
    return (np.round((weights + top) / step) * step - top).astype(np.float32)


def walk(config, dense, experts, tokens, quantized=rounded, **options):
    """Returns the losses, the statistics by MoE layer, and the walker."""
    walker = CalibrationWalker(config, tokens, dense["model.embed_tokens.weight"], **options)
    statistics = []
    for layer in range(config.num_layers):
        own = {name: array for name, array in dense.items() if name.startswith(f"model.layers.{layer}.")}
        if not config.moe_layers[layer]:
            walker.pass_dense_layer(layer, own)
            continue
        pair = experts[layer]
        statistics.append(walker.observe(layer, own, pair))
        walker.advance(pair, lambda unit, bits, pair=pair: quantized(pair[unit], bits))
    return walker.losses(dense), statistics, walker


def random_tokens(seed, shape, vocab=264):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def hf_loss(hf_model, tokens):
    """Mean nats a token, float64 from the logits on."""
    logits = hf_logits(hf_model, tokens)[:, :-1].astype(np.float64)
    top = logits.max(-1)
    norm = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return (norm - np.take_along_axis(logits, tokens[:, 1:, None].astype(int), -1)[..., 0]).mean()


def hf_loss_with(hf_model, tokens, replaced):
    """`replaced`: {(decoder layer, unit): weights}; the model is restored afterwards."""
    names = ("gate_up_proj", "down_proj")
    saved = {}
    with torch.no_grad():
        for (layer, unit), weights in replaced.items():
            parameter = getattr(hf_model.model.layers[layer].mlp.experts, names[unit])
            saved[parameter] = parameter.clone()
            parameter.copy_(torch.tensor(weights))
        loss = hf_loss(hf_model, tokens)
        for parameter, weights in saved.items():
            parameter.copy_(weights)
    return loss


def hf_importance(hf_model, tokens, experts):
    """By decoder layer: h of gate_up, h of down, tokens an expert; float64 from what torch feeds the experts."""
    fed = {}
    hooks = [
        hf_model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: fed.__setitem__(layer, [a.numpy().copy() for a in args])
        )
        for layer in experts
    ]
    hf_logits(hf_model, tokens)
    for hook in hooks:
        hook.remove()
    result = {}
    for layer, (x, ids, weights) in fed.items():
        gate_up, down = (w.astype(np.float64) for w in experts[layer])
        x, weights = x.astype(np.float64), weights.astype(np.float64)
        counts = np.zeros(len(down), int)
        sums = np.zeros((len(down), x.shape[1])), np.zeros((len(down), down.shape[2]))
        for token, choice in np.ndindex(ids.shape):
            expert, r = ids[token, choice], weights[token, choice]
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            counts[expert] += 1
            sums[0][expert] += (r * x[token]) ** 2
            sums[1][expert] += (r * gate / (1 + np.exp(-gate)) * up) ** 2
        result[layer] = sums, counts
    return result


@pytest.mark.parametrize(("family", "overrides"), [
    ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ("mixtral", {"sliding_window": 20}),
])  # fmt: skip
def test_statistics_and_losses_equal_transformers(family, overrides):
    hf_model, config_dict = tiny_model(family, 21, **overrides)
    dense, experts = dense_and_experts(hf_model)
    config = ModelConfig.from_hf(config_dict)
    tokens = random_tokens(0, (5, 40))
    losses, statistics, _ = walk(config, dense, experts, tokens, loss_sequences=3)

    want = hf_importance(hf_model, tokens, experts)
    for own, layer in zip(statistics, config.moe_layer_indices, strict=True):
        sums, counts = want[layer]
        np.testing.assert_array_equal(own.tokens_per_expert, counts)
        assert counts.min() >= 8 and own.averaged_experts == ()
        for unit in (0, 1):
            np.testing.assert_allclose(own.importance[unit], sums[unit] / counts[:, None], rtol=2e-4, atol=1e-8)

    scored = tokens[:3]
    assert losses.num_tokens == 3 * 39
    assert losses.base == pytest.approx(hf_loss(hf_model, scored), rel=5e-6)
    for m, layer in enumerate(config.moe_layer_indices):
        for unit in (0, 1):
            replaced = {(layer, unit): rounded(experts[layer][unit], 3)}
            assert losses.perturbed[m, unit] == pytest.approx(hf_loss_with(hf_model, scored, replaced), rel=5e-6)
    for bits in BITS:
        replaced = {(layer, unit): rounded(w, bits) for layer, pair in experts.items() for unit, w in enumerate(pair)}
        assert losses.uniform[bits] == pytest.approx(hf_loss_with(hf_model, scored, replaced), rel=5e-6)
    # What a stream that skipped its replacement would miss is larger than the tolerance.
    assert np.abs(losses.perturbed - losses.base).min() > 1e-4
    assert abs(losses.uniform[3] - losses.base) > 1e-4


def test_experts_with_few_tokens_take_the_layers_mean():
    hf_model, config_dict = tiny_model("qwen2_moe", 5, num_experts=60, num_experts_per_tok=2, num_hidden_layers=1)
    dense, experts = dense_and_experts(hf_model)
    tokens = random_tokens(1, (2, 50))
    _, (own,), _ = walk(ModelConfig.from_hf(config_dict), dense, experts, tokens, min_tokens=4)
    sums, counts = hf_importance(hf_model, tokens, experts)[0]
    assert (counts == 0).any() and (counts == 3).any() and (counts >= 4).any()
    assert own.averaged_experts == tuple(np.flatnonzero(counts < 4))
    for unit in (0, 1):
        mean = sums[unit].sum(0) / counts.sum()
        want = np.where(counts[:, None] < 4, mean, sums[unit] / np.maximum(counts, 1)[:, None])
        np.testing.assert_allclose(own.importance[unit], want, rtol=2e-4, atol=1e-8)


@pytest.fixture(scope="module")
def mixtral():
    hf_model, config_dict = tiny_mixtral(2)
    return ModelConfig.from_hf(config_dict), *dense_and_experts(hf_model)


def test_chunks_do_not_matter(mixtral, monkeypatch):
    tokens = random_tokens(2, (6, 24))
    whole, whole_statistics, _ = walk(*mixtral, tokens, loss_sequences=3)
    monkeypatch.setattr(walker_module, "CHUNK_SEQUENCES", 2)
    parts, part_statistics, _ = walk(*mixtral, tokens, loss_sequences=3)
    np.testing.assert_allclose(parts.perturbed, whole.perturbed, rtol=1e-6)
    np.testing.assert_allclose(list(parts.uniform.values()), list(whole.uniform.values()), rtol=1e-6)
    for part, own in zip(part_statistics, whole_statistics, strict=True):
        np.testing.assert_array_equal(part.tokens_per_expert, own.tokens_per_expert)
        np.testing.assert_allclose(part.importance[1], own.importance[1], rtol=1e-5)


def test_a_second_walk_over_stored_weights_gives_the_same_losses(mixtral, tmp_path):
    """Resuming `prepare`: the first layers' quantized weights are read back instead of computed."""
    config, dense, experts = mixtral
    tokens = random_tokens(3, (2, 24))
    first, _, _ = walk(config, dense, experts, tokens)
    for layer, pair in experts.items():
        for unit, bits in np.ndindex(2, 6):
            np.save(tmp_path / f"{layer}-{unit}-{bits + 3}.npy", rounded(pair[unit], bits + 3))
    owner = {id(w): (layer, unit) for layer, pair in experts.items() for unit, w in enumerate(pair)}

    def stored(weights, bits):
        layer, unit = owner[id(weights)]
        return np.load(tmp_path / f"{layer}-{unit}-{bits}.npy")

    second, _, _ = walk(config, dense, experts, tokens, quantized=stored)
    assert second.base == first.base and second.uniform == first.uniform
    np.testing.assert_array_equal(second.perturbed, first.perturbed)


def test_stream_bytes_is_what_the_walk_holds(mixtral):
    config = mixtral[0]
    _, _, walker = walk(*mixtral, random_tokens(4, (3, 24)), loss_sequences=2)
    streams = [walker._base, *walker._perturbed.values(), *walker._uniform.values()]
    assert walker.stream_bytes == sum(chunk.nbytes for stream in streams for chunk in stream)
    assert len(streams) == 1 + 2 * config.num_moe_layers + 6


def test_bad_calls_are_refused(mixtral):
    config, dense, experts = mixtral
    embed = dense["model.embed_tokens.weight"]
    with pytest.raises(UserError, match="at least one sequence"):
        CalibrationWalker(config, np.zeros((0, 8), np.int32), embed)
    walker = CalibrationWalker(config, random_tokens(5, (1, 8)), embed)
    with pytest.raises(RuntimeError, match="out of order"):
        walker.observe(1, dense, experts[1])
    with pytest.raises(UserError, match=r"experts of layer 0 have shape"):
        walker.observe(0, dense, experts[0][::-1])
    with pytest.raises(RuntimeError, match=r"losses\(\) after layer 0 of 2"):
        walker.losses(dense)
    with pytest.raises(RuntimeError, match="follows observe"):
        walker.advance(experts[0], lambda unit, bits: experts[0][unit])
