"""No second copy (design invariants 5 and 7), and what the planner is told."""

import gc
import re

import jax
import numpy as np
import pytest

from pwjax import LLM, SamplingParams
from tests.engine.conftest import COMMON, FAMILIES, prompt

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def expert_shapes(config) -> list[list[int]]:
    """Shapes of all routed experts of a unit, dimensions sorted."""
    return [sorted((config.num_experts, *config.unit_shape(unit))) for unit in (0, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_dense_expert_is_ever_allocated(build, family):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    llm = build(family)
    llm.generate([prompt(seed, 20) for seed in range(3)], PARAMS)
    shapes = expert_shapes(llm.model.config)
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert any(array is llm.engine.runner.weights.arena for array in made)
    assert not [a.shape for a in made if sorted(a.shape) in shapes]
    arenas = [a for a in made if a.shape == llm.engine.runner.weights.arena.shape]
    assert len(arenas) == 1
    for compiled in llm.engine.runner.steps.values():
        text = compiled.as_text()
        found = [sorted(map(int, dims.split(","))) for dims in re.findall(r"\b(?:f|bf|s|u)\d+\[([\d,]+)\]", text)]
        assert found and not [dims for dims in found if dims in shapes]
        # The arena goes in and out, and no temporary is as large.
        arena_bytes = llm.built.arena_bytes
        assert compiled.memory_analysis().alias_size_in_bytes >= arena_bytes


def test_device_memory_goes_with_the_object(prepared, sizes):
    """At once, not when the garbage collector next looks for cycles: another engine may want the memory."""
    llm = LLM(prepared("qwen2_moe").path, arena_bytes=sizes("qwen2_moe").tight_bytes(), **COMMON)
    llm.generate(prompt(0, 20), PARAMS)
    shape = llm.engine.runner.weights.arena.shape
    gc.collect()
    before = sum(array.shape == shape for array in jax.live_arrays())
    gc.disable()
    try:
        del llm
        assert sum(array.shape == shape for array in jax.live_arrays()) == before - 1
    finally:
        gc.enable()


def test_the_check_sees_dense_experts(build):
    """Method bf16 does hold them, so the check above can fail."""
    llm = build(method="bf16", max_num_seqs=1)
    shapes = expert_shapes(llm.model.config)
    assert [a for a in jax.live_arrays() if sorted(a.shape) in shapes]
    text = next(iter(llm.engine.runner.steps.values())).as_text()
    dims = [sorted(map(int, d.split(","))) for d in re.findall(r"\b(?:f|bf)\d+\[([\d,]+)\]", text)]
    assert [d for d in dims if d in shapes]
    assert llm.mean_bits is None and llm.stats()["mean_bits_first"] is None
    assert len(llm.generate(prompt(0, 20), PARAMS)[0].token_ids) == 40


def test_workspace_is_small_beside_what_dense_experts_would_take(shared):
    """`workspace` of a decode step holds one expert's weights at a time, in float32, and its indices."""
    llm = shared(method="uniform:6")
    config = llm.model.config
    dense = 4 * sum(int(np.prod(config.unit_shape(u))) for u in (0, 1)) * config.num_experts * config.num_moe_layers
    assert llm.built.fixed.workspace_bytes < dense


def test_the_planner_sees_the_mass_of_tokens_before_the_boundary(build):
    """Mixtral's weights sum to one a token, so a request's mass in a layer counts its tokens: never more than exist."""
    llm = build("mixtral", exchange=False)
    llm.generate([prompt(seed, 50) for seed in range(4)], PARAMS)  # every row has an earlier owner
    seen: list[tuple[float, int]] = []
    plan = llm.engine.weights.plan

    def watched(free_slots, growth_slots, requests, **options):
        for sequence, (mass, blocks) in zip(llm.engine.scheduler.running, requests, strict=True):
            assert blocks == llm.engine.kv.num_blocks(sequence.row)
            if mass is not None:
                np.testing.assert_allclose(mass.sum(axis=-1), mass.sum(axis=-1)[0], rtol=1e-3)
                seen.append((float(mass[0].sum()), sequence.computed))
        return plan(free_slots, growth_slots, requests, **options)

    llm.engine.weights.plan = watched
    llm.generate([prompt(0, 37), prompt(1, 5)], PARAMS)
    assert len(seen) > 20
    assert all(0 < mass <= computed + 1e-2 for mass, computed in seen)
    assert max(mass for mass, _ in seen) > 37 + 40 - 12  # observed every 8 decode steps
