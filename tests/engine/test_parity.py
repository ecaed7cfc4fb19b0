"""The engine against the Hugging Face models in float32: scores, greedy text, and routing mass."""

import functools

import numpy as np
import pytest

from pwjax import LLM, SamplingParams
from tests.engine.conftest import prompt

torch = pytest.importorskip("torch")

LENGTHS = (70, 33, 2)
MODELS = {
    "qwen2_moe": ("qwen2_moe", {}),  # top-3 of 8, 4 heads on 2
    "qwen2_moe-60": ("qwen2_moe", {"num_experts": 60, "num_experts_per_tok": 6, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {}),  # 4 heads on 1
}
CASES = [("qwen2_moe", 0), ("qwen2_moe", 1), ("qwen2_moe-60", 0), ("mixtral", 0), ("mixtral", 1)]
FLOAT32 = {
    "dtype": "float32",
    "kv_dtype": "float32",
    "method": "bf16",
    "max_num_seqs": 2,
    "max_model_len": 96,
    "arena_bytes": 2**19,  # KV only; on a GPU the default would be nearly all of it
}


@pytest.fixture
def store(prepared):
    def make(name: str, seed: int):
        family, overrides = MODELS[name]
        return prepared(family, seed, pages=False, **overrides)

    return make


def windows() -> list[list[int]]:
    return [prompt(seed, length + 1) for seed, length in enumerate(LENGTHS)]


@functools.cache
def hf_run(model, tokens: tuple[int, ...]):
    """float64 nats `[T - 1]` and router logits, `[T - 1, E]` a layer, of a window."""
    with torch.no_grad():
        out = model(torch.tensor([tokens[:-1]]), use_cache=False, output_router_logits=True)
    logits = out.logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return nats.numpy(), [layer.double().numpy() for layer in out.router_logits]


@pytest.mark.parametrize("chunk", [16, 1], ids=["prefill", "step-by-step"])
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_scores_match_in_float32(store, name, seed, chunk):
    model = store(name, seed)
    llm = LLM(model.path, **FLOAT32, scoring=True, prefill_chunk_tokens=chunk)
    for window, nats in zip(windows(), llm.score(windows()), strict=True):
        expected, _ = hf_run(model.reference, tuple(window))
        assert nats.dtype == np.float32 and nats.shape == (len(window) - 1,)
        np.testing.assert_allclose(nats, expected, rtol=1e-4, atol=1e-4)
    assert llm.stats()["compilations_after_warmup"] == 0


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_scores_match_with_a_bfloat16_cache(store, name):
    model = store(name, 0)
    llm = LLM(model.path, **(FLOAT32 | {"kv_dtype": "bfloat16"}), scoring=True, prefill_chunk_tokens=16)
    scores = llm.score(windows())
    for window, nats in zip(windows(), scores, strict=True):
        expected, _ = hf_run(model.reference, tuple(window))
        assert np.abs(nats - expected).mean() <= 5e-3 * np.abs(expected).mean()


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen2_moe-60", "mixtral"])
def test_routing_mass_is_equation_1(store, name):
    """Sums of routing weights over a request's tokens, counted in NumPy from HF's router; padding adds nothing."""
    model = store(name, 0)
    config = model.reference.config
    llm = LLM(model.path, **FLOAT32, scoring=True, prefill_chunk_tokens=16)
    llm.score(windows()[:2])
    found = np.asarray(llm.engine.runner.snapshot_mass())
    for row, window in enumerate(windows()[:2]):
        for layer, logits in enumerate(hf_run(model.reference, tuple(window))[1]):
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            order = np.argsort(-weights, axis=-1)[:, : config.num_experts_per_tok]
            chosen = np.take_along_axis(weights, order, -1)
            if getattr(config, "norm_topk_prob", True):
                chosen = chosen / chosen.sum(-1, keepdims=True)
            expected = np.zeros(logits.shape[1])
            np.add.at(expected, order.ravel(), chosen.ravel())
            np.testing.assert_allclose(found[row, layer], expected, rtol=1e-4, atol=1e-5)
    # A row starts anew with its next request.
    llm.score([windows()[2]])
    again = np.asarray(llm.engine.runner.snapshot_mass())
    assert again[0].sum() < found[0].sum() / 4


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_greedy_text_matches(store, name):
    model = store(name, 0)
    llm = LLM(model.path, **FLOAT32, prefill_chunk_tokens=16)
    prompts = [prompt(seed, length) for seed, length in ((0, 40), (1, 7))]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    for ids, output in zip(prompts, outputs, strict=True):
        tokens = list(ids)
        for _ in range(16):  # HF's own greedy loop, without a cache
            with torch.no_grad():
                tokens.append(int(model.reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(output.token_ids) == tokens[len(ids) :]
