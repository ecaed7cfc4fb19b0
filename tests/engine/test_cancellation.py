"""Requests that end early, at any moment: everything they held comes back, and the engine serves on."""

import numpy as np
import pytest

from pwjax import SamplingParams
from tests.engine.conftest import assert_idle, prompt


@pytest.fixture
def llm(build):
    """Under pressure, with copies that take a random number of boundaries."""
    engine = build(exchange=False)
    mover, rng = engine.engine.weights.mover, np.random.default_rng(1)
    commit_ready = mover.commit_ready

    def slow(*, wait: bool = False):
        if not wait and rng.random() < 0.8:
            mover.issue()
            return []
        return commit_ready(wait=wait)

    mover.commit_ready = slow
    return engine


def params(tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_cancel_50_requests_at_random_moments(llm):
    baseline, bits = llm.engine.allocator.free_slots, llm.mean_bits
    wanted = llm.generate(prompt(0, 20), params())[0].token_ids
    rng = np.random.default_rng(0)
    live: list[int] = []
    moments = {"waiting": 0, "prefill": 0, "decode": 0, "flying": 0}
    cancelled = added = 0
    while cancelled < 50:
        if added < 120 and len(live) < 6 and rng.random() < 0.5:
            live.append(llm.add_request(prompt(added, int(rng.integers(1, 60))), params(int(rng.integers(20, 60)))))
            added += 1
        for event in llm.step():
            if event.finish_reason:
                live.remove(event.request_id)
        if live and rng.random() < 0.25:
            victim = live.pop(int(rng.integers(len(live))))
            sequence = llm._open[victim]
            state = "waiting" if sequence.row < 0 else "prefill" if sequence.in_prefill else "decode"
            moments[state] += 1
            moments["flying"] += llm.engine.weights.pages_in_flight > 0
            llm.abort(victim)
            llm.abort(victim)  # ignored
            cancelled += 1
    assert min(moments.values()) > 0, moments
    for victim in live:
        llm.abort(victim)
    assert not llm.engine.scheduler.has_work and llm.engine.kv.used_slots == 0  # without another step
    while llm.has_unfinished_requests:
        llm.step()
    assert_idle(llm)
    assert (llm.engine.allocator.free_slots, llm.mean_bits) == (baseline, bits)
    assert llm.generate(prompt(0, 20), params())[0].token_ids == wanted
    assert llm.stats()["compilations_after_warmup"] == 0


def test_streams_closed_early(llm):
    baseline = llm.engine.allocator.free_slots
    rng = np.random.default_rng(0)
    llm.stream(prompt(0, 10), params())  # never started, dropped
    for number in range(15):
        streams = [llm.stream(prompt(number * 3 + i, 20), params()) for i in range(3)]
        for _ in range(int(rng.integers(0, 90))):
            next(streams[int(rng.integers(3))], None)
        for stream in streams:
            stream.close()
        assert_idle(llm)
        assert llm.engine.allocator.free_slots == baseline
    assert len(llm.generate(prompt(0, 20), params())[0].token_ids) == 60


def test_an_exception_in_a_callback_cancels(llm):
    baseline = llm.engine.allocator.free_slots

    def fail(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(1, 20), prompt(2, 40)], params(), on_event=fail)
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate(prompt(0, 20), params())[0].token_ids) == 60
    assert_idle(llm)
    assert llm.engine.allocator.free_slots == baseline
