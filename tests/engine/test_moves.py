"""Steps between page moves: the precision committed at dispatch, exactly, and nothing of what free slots hold."""

import jax
import numpy as np
import pytest

from pwjax import SamplingParams
from pwjax.engine.scheduler import Batch, Work
from pwjax.engine.sequence import Sequence
from pwjax.engine.step_inputs import StepShape
from pwjax.paging.allocator import Owner
from tests.engine.conftest import FAMILIES, prompt

NAN_WORD = 0x7FC07FC0  # NaN as float32, as two bfloat16 and as two float16


class SameStep:
    """The same 16 tokens at positions 32..47, over and over, from the same KV of the 32 before."""

    SHAPE = StepShape(1, 16, score=True)

    def __init__(self, llm) -> None:
        self.engine, tokens = llm.engine, prompt(0, 49)
        self.sequence = Sequence(0, tokens[:-1], SamplingParams(), 0, targets=tokens[1:])
        self.sequence.start(self.engine.kv.acquire_row())
        delta = self.engine.kv.grow(self.sequence.row, 48)
        self.run(0, delta[:1])
        self.run(16, delta[1:2])
        self.run(32, delta[2:])

    def run(self, start: int = 32, delta=()):
        work = Work(self.sequence, start, 16)
        return self.engine.runner.dispatch(Batch(self.SHAPE, (work,)), list(delta)).nats


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_one_precision(build, family):
    """200 moves of the busiest expert, dispatched between steps that are still running."""
    llm = build(family, "roomy", method="uniform:3", scoring=True, max_num_seqs=1, max_bits=6)
    weights, step = llm.engine.weights, SameStep(llm)
    pointer = llm.engine.runner.weights.arena.unsafe_buffer_pointer()
    expert = int(np.asarray(llm.engine.runner.snapshot_mass())[step.sequence.row, 1].argmax())
    index = (weights.table.num_experts + expert) * 2
    expected = {}
    for bits in (3, 4, 5, 6):
        expected[bits] = np.asarray(step.run())
        if bits < 6:
            weights.mover.request_raise([(index, bits + 1, "test")])
            weights.mover.commit_ready(wait=True)
    for a in expected:
        assert all((expected[a] != expected[b]).any() for b in expected if b != a)

    rng = np.random.default_rng(0)
    seen, moves = [], 0
    while moves < 200:
        q = int(weights.table.committed[index])
        if weights.table.movable()[index] and rng.random() < 0.6:
            target = int(rng.choice([b for b in (3, 4, 5, 6) if b != q]))
            if target < q:
                weights.mover.lower([(index, target, "test")])
            else:
                weights.mover.request_raise([(index, target, "test")])
                weights.mover.issue()
            moves += 1
        seen.append((int(weights.table.committed[index]), step.run()))
        weights.commit_ready()
    assert {q for q, _ in seen} == set(expected)
    for q, nats in seen:
        np.testing.assert_array_equal(np.asarray(nats), expected[q])
    assert llm.engine.runner.weights.arena.unsafe_buffer_pointer() == pointer
    assert llm.stats()["compilations_after_warmup"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_free_slots_and_the_null_slot_are_never_used(build, family):
    """Every free slot full of NaN, in a run whose weights give way to KV: not a bit changes."""
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    prompts = [prompt(seed, 21) for seed in range(3)]
    clean = build(family, exchange=False, keep_timeline=True)
    wanted = [x.token_ids for x in clean.generate(prompts, params)]
    llm = build(family, exchange=False, keep_timeline=True)
    poison(llm)
    found = []
    for request in prompts:
        llm.add_request(request, params)
    while llm.has_unfinished_requests:
        found += [event.output for event in llm.step() if event.finish_reason]
        poison(llm)
    assert [x.token_ids for x in sorted(found, key=lambda x: x.request_id)] == wanted
    bits = [[r.mean_bits for r in x.timeline if r.num_running] for x in (clean, llm)]
    assert bits[0] == bits[1] and min(bits[0]) < 6


def poison(llm) -> None:
    state, owner = llm.engine.runner.weights, llm.engine.allocator._owner
    free = np.flatnonzero((owner == Owner.FREE) | (owner == Owner.NULL))
    arena = np.array(state.arena)
    arena[free] = NAN_WORD
    state.arena = jax.device_put(arena, jax.devices()[0])
