"""Weights give way to the KV cache and come back; the budget holds at every boundary (design invariant 1)."""

import re

import jax
import numpy as np
import pytest

from pwjax import LLM, SamplingParams
from pwjax import planner as planner_module
from pwjax.engine import weights as weights_module
from pwjax.engine.memory import device_free_bytes
from pwjax.errors import UserError
from pwjax.planner import random_bits
from tests.engine.conftest import COMMON, FAMILIES, assert_idle, prompt

GREEDY = SamplingParams(max_tokens=70, ignore_eos=True)
PROMPTS = [prompt(seed, 20) for seed in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_give_way_and_come_back(build, family):
    records = []
    llm = build(family, on_record=records.append)
    pointer = llm.engine.runner.weights.arena.unsafe_buffer_pointer()
    first = llm.mean_bits
    outputs = llm.generate(PROMPTS, GREEDY)
    stats = llm.stats()
    assert [len(x.token_ids) for x in outputs] == [70] * 3 and {x.finish_reason for x in outputs} == {"length"}
    assert stats["offloads"] == stats["reloads"] > 0 and stats["preemptions"] == 0 and stats["max_running"] == 3
    assert stats["mean_bits_first"] == stats["mean_bits_last"] == llm.mean_bits == first == 6.0
    assert stats["mean_bits_min"] < 5.5
    assert stats["compilations_after_warmup"] == 0
    assert llm.engine.runner.weights.arena.unsafe_buffer_pointer() == pointer
    slots, slot_bytes = llm.engine.allocator.num_slots, llm._slot_bytes
    for record in records:
        assert record.reserved_bytes <= record.budget_bytes
        assert record.weight_bytes + record.kv_bytes + record.free_bytes == slots * slot_bytes
    assert stats["memory_bytes_peak"] == max(r.used_bytes for r in records) <= stats["memory_budget_bytes"]
    assert min(r.mean_bits for r in records) == stats["mean_bits_min"]
    # What the weights gave, KV took at the same boundary: it held more than was ever free beside 6 bits.
    weights_at_6 = max(r.weight_bytes for r in records)
    assert max(r.kv_bytes for r in records) > slots * slot_bytes - weights_at_6
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_uniform_runs_fewer_at_once_with_the_text_of_a_roomy_run(build, shared, family):
    tight = build(family, method="uniform:6")
    outputs = tight.generate(PROMPTS, GREEDY)
    stats = tight.stats()
    assert stats["preemptions"] > 0 or stats["max_running"] < 3
    assert stats["offloads"] == stats["reloads"] == 0 and stats["mean_bits_min"] == 6.0
    roomy = shared(family, method="uniform:6")
    wanted = roomy.generate(PROMPTS, GREEDY)
    assert {x.preemptions for x in wanted} == {0} and roomy.stats()["max_running"] >= 3
    assert [x.token_ids for x in outputs] == [x.token_ids for x in wanted]
    assert_idle(tight)


def test_a_preempted_request_resumes_to_the_same_text(build, shared):
    """Sampled too: random numbers depend on seed and position only."""
    params = [SamplingParams(max_tokens=70, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.9, 0.9)]
    outputs = build(method="uniform:6").generate(PROMPTS, params)
    wanted = shared(method="uniform:6").generate(PROMPTS, params)
    assert sum(x.preemptions for x in outputs) > 0
    assert [x.token_ids for x in outputs] == [x.token_ids for x in wanted]
    assert [x.text for x in outputs] == [x.text for x in wanted]


@pytest.mark.parametrize("family", FAMILIES)
def test_paging_that_never_binds_changes_nothing(build, shared, family):
    llm = build(family, "roomy")
    paged = llm.generate(PROMPTS, GREEDY)
    fixed = shared(family, method="uniform:6").generate(PROMPTS, GREEDY)
    assert [x.token_ids for x in paged] == [x.token_ids for x in fixed]
    assert llm.stats()["offloads"] == llm.stats()["reloads"] == 0


def test_replay_repeats_moves_and_text(build, tmp_path):
    """Two batches of requests, so that idle boundaries between them count too."""
    file = tmp_path / "run.jsonl"
    batches = [PROMPTS, [prompt(seed, 30) for seed in (7, 8, 9, 10)]]
    original = build(keep_timeline=True)
    texts = [[x.token_ids for x in original.generate(batch, GREEDY)] for batch in batches]
    original.timeline.write(file)
    replayed = build(keep_timeline=True, replay=str(file))
    assert [[x.token_ids for x in replayed.generate(batch, GREEDY)] for batch in batches] == texts

    def moves(llm):
        return [
            (r.boundary, r.step, sorted((m["index"], m["from"], m["to"]) for m in r.moves), r.mean_bits, r.kv_bytes)
            for r in llm.timeline
        ]

    assert moves(replayed) == moves(original)
    assert sum(len(r.moves) for r in original.timeline) > 20


def test_replay_of_another_run_is_refused(build, tmp_path):
    file = tmp_path / "run.jsonl"
    original = build(keep_timeline=True)
    original.generate(PROMPTS, GREEDY)
    original.timeline.write(file)
    other = build(replay=str(file), max_bits=4)
    with pytest.raises(UserError, match=r"--replay .*run.jsonl: at boundary \d+ linear-block \d+ has"):
        other.generate(PROMPTS, GREEDY)


def test_a_replayed_run_that_ends_early_or_late_is_refused(build, tmp_path):
    file = tmp_path / "run.jsonl"
    original = build(keep_timeline=True, exchange=False)
    original.generate(PROMPTS, GREEDY)
    original.timeline.write(file)
    short = build(replay=str(file), exchange=False)
    short.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="this run is over and the recorded one was not"):
        short.engine.weights.check_replay_finished()
    late = build(replay=str(file), exchange=False)
    late.generate(PROMPTS, GREEDY)
    late.engine.weights.check_replay_finished()
    with pytest.raises(UserError, match="the recorded run was over"):
        late.generate(PROMPTS, GREEDY)


def test_a_budget_is_a_cap(prepared, sizes):
    """A budget far beyond all pages and all KV (what JAX may allocate, where it says) takes no more than those."""
    budget_bytes = device_free_bytes(jax.devices()[0]) or 2**40
    llm = LLM(prepared("qwen2_moe").path, memory_budget=budget_bytes, **COMMON)
    stats, size = llm.stats(), sizes("qwen2_moe")
    useful = size.weights[6] + COMMON["max_num_seqs"] * size.sequence(COMMON["max_model_len"])
    assert useful * size.slot_bytes <= stats["memory_parts"]["arena_bytes"] < 2 * useful * size.slot_bytes
    assert stats["memory_budget_bytes"] == budget_bytes
    assert stats["mean_bits_first"] == 6


def test_reserved_kv_holds_the_precision(build):
    """With `--reserve-kv` the KV of all sequences is set aside from the start: bits are lower and stay."""
    llm = build("mixtral", reserve_kv=True, exchange=False)
    assert llm.mean_bits < 6
    llm.generate(PROMPTS, GREEDY)
    stats = llm.stats()
    assert stats["offloads"] == stats["reloads"] == stats["preemptions"] == 0
    assert stats["max_running"] == 3 and stats["mean_bits_min"] == stats["mean_bits_first"]


@pytest.mark.parametrize("method", ["static", "random:4.5"])
def test_static_methods_never_ask_the_planner(build, monkeypatch, method):
    def forbidden(*_):
        raise AssertionError("the planner was asked")

    monkeypatch.setattr(weights_module, "plan_step", forbidden)
    llm = build(method=method, seed=3)
    table = llm.engine.weights.table
    before = table.committed.copy()
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 70
    np.testing.assert_array_equal(table.committed, before)
    assert llm.stats()["offloads"] == 0
    if method == "random:4.5":
        assert 4.3 <= table.mean_bits() <= 4.5
        sizes = table.resident_slots, table.weights, 4.5, 6, llm._slot_bytes
        np.testing.assert_array_equal(before, random_bits(3, *sizes))
        assert (before != random_bits(4, *sizes)).any()


def test_paged_weights_do_ask_the_planner(shared, monkeypatch):
    asked = []
    monkeypatch.setattr(
        weights_module, "plan_step", lambda *args: asked.append(args) or planner_module.plan_step(*args)
    )
    shared(arena="tight", exchange=False).generate(PROMPTS, GREEDY)
    assert asked


def test_too_small_budgets_are_refused_with_one_that_does(prepared):
    path, options = prepared("qwen2_moe").path, COMMON | {"max_num_seqs": 2}
    with pytest.raises(UserError, match="--arena 10000 is too small"):
        LLM(path, arena_bytes=10_000, **options)
    with pytest.raises(UserError, match="--memory-budget 10000 is too small") as error:
        LLM(path, memory_budget=10_000, **options)
    needed = int(re.search(r"(\d+) bytes are needed", str(error.value))[1])
    llm = LLM(path, memory_budget=needed, **options)
    assert llm.stats()["reserved_bytes"] <= llm.stats()["memory_budget_bytes"] == needed
    assert len(llm.generate(prompt(0, 16), SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8
