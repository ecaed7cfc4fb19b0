"""Parts of `pagedweight` switched off: what then happens in an engine, and what is refused."""

import numpy as np
import pytest

from pwjax import LLM
from pwjax.engine.config import EngineConfig, Method
from pwjax.errors import UserError
from pwjax.planner import Ablation
from tests.engine.conftest import COMMON, prompt


def scored(path, **options):
    llm = LLM(path, scoring=True, reserve_kv=True, mean_bits=4.5, **COMMON, **options)
    nats = np.concatenate(llm.score([prompt(seed, 96) for seed in range(4)]))
    return llm, nats


def test_without_movement_it_is_the_static_plan(prepared):
    path = prepared("qwen2_moe").path
    ablated, nats = scored(path, ablation=Ablation(movement=False))
    static, expected = scored(path, method="static")
    np.testing.assert_array_equal(nats, expected)
    stats = ablated.stats()
    assert stats["ablated"] == ["movement"]
    assert stats["bytes_moved"] == stats["offloads"] == 0
    assert stats["reserved_bytes"] == static.stats()["reserved_bytes"]


def test_without_sensitivity_memory_is_equal_and_widths_are_even(prepared):
    path = prepared("qwen2_moe").path
    full, _ = scored(path)
    ablated, _ = scored(path, ablation=Ablation(sensitivity=False, movement=False))
    assert ablated.stats()["reserved_bytes"] == full.stats()["reserved_bytes"]
    assert set(ablated.engine.weights.table.committed.tolist()) <= {4, 5}
    assert len(set(full.engine.weights.table.initial.tolist())) > 1


def test_flags_of_another_method_are_refused():
    with pytest.raises(UserError, match="--no-routing, --no-movement: parts of --method pagedweight; static has none"):
        EngineConfig(method=Method("static"), ablation=Ablation(routing=False, movement=False))
    with pytest.raises(UserError, match="--replay repeats moves and --no-movement forbids them"):
        EngineConfig(replay="run.jsonl", ablation=Ablation(movement=False))


def test_a_store_without_residuals_refuses_to_leave_them_out(prepared):
    with pytest.raises(UserError, match=r"--no-residual: .* has no prompt residuals"):
        LLM(prepared("qwen2_moe").path, mean_bits=4.5, ablation=Ablation(residual=False), **COMMON)
