"""Requests at the edges: lengths, ends, refusals, streams, and what a request must not do to its batch mates."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest

from pwjax import SamplingParams
from pwjax.errors import UserError
from tests.engine.conftest import FAMILIES, MAX_MODEL_LEN, assert_idle, prompt


def params(tokens: int = 24, **options) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **options})


@pytest.fixture
def llm(shared):
    engine = shared(method="uniform:6")
    yield engine
    assert_idle(engine)


def test_prompts_of_integers_of_any_kind(llm):
    wanted = llm.generate([1, 2, 3], params(4))[0].token_ids
    for ids in (np.array([1, 2, 3]), [np.int64(1), np.int64(2), np.int64(3)], [[1, 2, 3]], [np.array([1, 2, 3])]):
        assert llm.generate(ids, params(4))[0].token_ids == wanted
    for bad in ([[1.5]], [[None]], [5.0]):
        with pytest.raises(UserError, match="must be text or a list of integer token ids"):
            llm.generate(bad, params(4))


def test_a_second_engine_does_not_spoil_the_count_of_compilations(build, shared):
    first = shared(method="uniform:6")
    build(method="uniform:4", prefill_chunk_tokens=24)
    first.generate(prompt(0, 17), params(2))
    assert first.stats()["compilations_after_warmup"] == 0


def test_a_chunk_longer_than_any_sequence_costs_no_workspace(build, shared):
    long = build(method="uniform:6", prefill_chunk_tokens=10**6)
    assert max(shape.tokens for shape in long.engine.runner.steps) == MAX_MODEL_LEN


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(llm, tokens):
    output = llm.generate(prompt(0, 17), params(tokens))[0]
    assert (len(output.token_ids), output.finish_reason) == (tokens, "length")
    events = list(llm.stream(prompt(0, 17), params(tokens)))
    assert events[-1].output.token_ids == output.token_ids
    assert sum((e.token_ids for e in events), ()) == output.token_ids
    llm.add_request(prompt(0, 17), params(tokens))
    finished = []
    while llm.has_unfinished_requests:
        finished += [e.output.token_ids for e in llm.step() if e.finish_reason]
    assert finished == [output.token_ids]


def test_immediate_end_of_sequence(llm, monkeypatch):
    first = llm.generate(prompt(1, 9), params(1))[0].token_ids[0]
    monkeypatch.setattr(llm.tokenizer, "eos_ids", (first, 256))
    output = llm.generate(prompt(1, 9), params(ignore_eos=False))[0]
    assert (output.token_ids, output.text, output.finish_reason) == ((first,), "", "stop")
    assert len(llm.generate(prompt(1, 9), params(5))[0].token_ids) == 5  # ignore_eos ignores them all
    again = llm.generate(prompt(1, 9), params(stop_token_ids=(first,)))[0]
    assert (again.token_ids, again.finish_reason, again.stop_reason) == ((first,), "stop", first)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1])
def test_longest_prompts(llm, length):
    output = llm.generate(prompt(2, length), params(50))[0]
    assert (len(output.token_ids), output.finish_reason) == (MAX_MODEL_LEN - length, "length")


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
@pytest.mark.parametrize("tokens", [1, 50])
def test_prompts_that_are_too_long(llm, length, tokens):
    with pytest.raises(UserError, match=f"has {length} tokens and the limit is {MAX_MODEL_LEN}"):
        llm.generate([prompt(0, 5), prompt(2, length)], params(tokens))
    assert len(llm.generate(prompt(0, 5), params(3))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("bad", "words"), [("", "empty"), ([[]], "empty"), ([[3, 264]], "id 264 .index 1."), ([[-1]], "id -1")]
)
def test_bad_prompts(llm, bad, words):
    with pytest.raises(UserError, match=words):
        llm.generate(bad, params())
    with pytest.raises(UserError, match=words):
        llm.stream(bad if isinstance(bad, str) else bad[0], params())
    assert len(llm.generate(prompt(0, 5), params(3))[0].token_ids) == 3


def test_a_request_that_can_never_fit_is_refused_with_two_numbers(llm, monkeypatch):
    usable, slot_bytes = llm.engine.allocator.usable_slots, llm._slot_bytes
    left = llm.engine.kv.slots_for(40)
    monkeypatch.setattr(llm, "built", dataclasses.replace(llm.built, least_weight_slots=usable - left))
    needed = llm.engine.kv.slots_for(65) * slot_bytes
    with pytest.raises(UserError, match=rf"needs {needed} bytes of KV cache .* leaves {left * slot_bytes} "):
        llm.generate(prompt(0, 50), params(16))
    assert len(llm.generate(prompt(0, 30), params(16))[0].token_ids) == 16


def test_prompts_and_params_must_match(llm):
    with pytest.raises(UserError, match="2 prompts but 3 sampling params"):
        llm.generate([[1], [2]], [params()] * 3)
    with pytest.raises(UserError, match="scoring=True"):
        llm.score([[1, 2]])
    assert llm.generate([]) == []


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 9, "seed": 4}])
def test_batch_mates_change_nothing(llm, sampling):
    """Alone, or beside another of another length and other sampling, in the same bucket."""
    alone = llm.generate(prompt(3, 20), params(40, **sampling))[0]
    for mate, length in (({}, 3), ({"temperature": 1.3, "top_p": 0.5, "seed": 9}, 45)):
        both = llm.generate([prompt(3, 20), prompt(4, length)], [params(40, **sampling), params(40, **mate)])
        assert both[0].token_ids == alone.token_ids


def test_sampling_without_a_seed_varies(llm):
    outputs = llm.generate([prompt(3, 20)] * 4, params(20, temperature=1.0))
    assert len({x.token_ids for x in outputs}) > 1


def test_streams_side_by_side_lose_nothing(llm):
    """Whoever is read runs the engine for all; every stream still gets all of its own text."""
    prompts = [prompt(seed, 12) for seed in (5, 6, 7)]
    wanted = llm.generate(prompts, params())
    streams = [llm.stream(p, params()) for p in prompts]
    texts, outputs = ["", "", ""], [None] * 3
    rng, open_streams = np.random.default_rng(0), {0, 1, 2}
    while open_streams:
        number = int(rng.choice(sorted(open_streams)))
        event = next(streams[number], None)
        if event is None:
            open_streams.remove(number)
            continue
        texts[number] += event.text
        outputs[number] = event.output or outputs[number]
    assert [x.token_ids for x in outputs] == [x.token_ids for x in wanted]
    assert texts == [x.text for x in wanted]


def test_queued_requests_keep_their_news_while_others_run(llm):
    wanted = llm.generate(prompt(5, 12), params())[0]
    llm.add_request(prompt(5, 12), params())
    llm.generate(prompt(6, 12), params(40))
    events = []
    while llm.has_unfinished_requests:
        events += llm.step()
    assert "".join(e.text for e in events) == wanted.text and events[-1].output.token_ids == wanted.token_ids


def test_generate_streams_the_final_text(llm):
    texts: dict[int, str] = {}
    outputs = llm.generate(
        [prompt(5, 12), prompt(6, 30)],
        params(),
        on_event=lambda e: texts.update({e.request_id: texts.get(e.request_id, "") + e.text}),
    )
    assert [texts[x.request_id] for x in outputs] == [x.text for x in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_that_are_not_finite_abort_their_request_only(build, family):
    llm = build(family, "roomy", method="uniform:6")
    good, bad = [1, 2, 3] * 10, [1, 7, 3] * 10
    wanted = llm.generate(good, params(30))[0].token_ids
    embedding = llm.model.load_dense()["model.embed_tokens.weight"]
    runner = llm.engine.runner
    runner._params = tuple(
        p.at[7].set(jnp.nan) if p.shape == embedding.shape and (np.asarray(p) == embedding).all() else p
        for p in runner._params
    )
    if 7 in wanted:
        pytest.fail("choose another poisoned token")
    outputs = llm.generate([good, bad, good], params(30))
    assert [x.finish_reason for x in outputs] == ["length", "abort", "length"]
    assert outputs[0].token_ids == outputs[2].token_ids == wanted and outputs[1].token_ids == ()
    assert_idle(llm)
    for _ in range(3):  # the slots that held NaN are used again
        assert {x.token_ids for x in llm.generate([good] * 4, params(30))} == {wanted}


def test_steps_for_which_the_device_waited_are_counted(llm):
    request = llm.add_request(prompt(0, 17), params(12))
    llm.step()
    before = llm.stats()
    for _ in range(4):
        time.sleep(0.1)  # the step in flight is done long before the next is dispatched
        llm.step()
    after = llm.stats()
    assert after["steps"] - before["steps"] == after["late_steps"] - before["late_steps"] == 4
    assert 0 <= after["wait_seconds"] - before["wait_seconds"] < 0.1, "results were there already"
    llm.abort(request)
    while llm.engine.has_work:
        llm.step()
