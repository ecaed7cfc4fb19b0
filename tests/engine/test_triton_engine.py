"""On a GPU every other test of this folder runs the Triton kernels ("auto"); here both implementations are compared."""

import numpy as np
import pytest

from pwjax import SamplingParams
from tests.engine.conftest import FAMILIES, prompt

pytestmark = pytest.mark.gpu
WINDOWS = [prompt(seed, length) for seed, length in ((0, 90), (1, 34), (2, 5))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["uniform:3", "uniform:6", "bf16"])
def test_scores_agree(build, family, method):
    scores = {}
    for implementation in ("triton", "xla"):
        llm = build(family, "roomy", method=method, scoring=True, implementation=implementation)
        scores[implementation] = llm.score(WINDOWS)
        experts = {"dense_moe": "xla"} if method == "bf16" else {"bitplane_moe": implementation}
        assert llm.stats()["implementations"] == {**experts, "paged_attention": implementation}
    for triton, xla in zip(scores["triton"], scores["xla"], strict=True):
        assert np.abs(triton - xla).mean() <= 0.03 * np.abs(xla).mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_under_pressure(build, family):
    llm = build(family, implementation="triton")
    outputs = llm.generate(WINDOWS, SamplingParams(max_tokens=70, ignore_eos=True))
    stats = llm.stats()
    assert [len(x.token_ids) for x in outputs] == [6, 62, 70]
    assert stats["compilations_after_warmup"] == 0
    assert stats["measured_bytes_peak"] >= stats["memory_parts"]["dense_bytes"] + stats["memory_parts"]["arena_bytes"]
