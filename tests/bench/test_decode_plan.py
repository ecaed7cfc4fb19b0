"""Prompts are so long that every batch decodes at the context asked for."""

import pytest

from pwjax.bench.decode import WARMUP_STEPS, DecodeOptions


@pytest.mark.parametrize("chunk", [64, 500, 2048])
def test_contexts_in_the_middle_of_the_measured_steps(chunk):
    options = DecodeOptions(batches=(8, 4, 1), context=500, steps=20)
    lengths = options.prompt_lengths(chunk)
    chunks = -(-options.context // chunk)
    # A running sequence decodes a token beside each chunk of the later prompts.
    decoded = [length + chunks * (len(lengths) - 1 - i) for i, length in enumerate(lengths)]
    for stage, batch in enumerate(options.batches):
        leaving = options.batches[stage + 1] if stage + 1 < len(options.batches) else 0
        middle = [n + stage * options.stage_steps + WARMUP_STEPS + options.steps // 2 for n in decoded]
        last_stage = middle[len(middle) - batch : len(middle) - leaving]
        assert last_stage == [options.context] * (batch - leaving)
        assert max(middle[-batch:]) <= options.context
    assert max(lengths) + options.steps < options.max_model_len


def test_a_short_context_leaves_at_least_a_token():
    assert min(DecodeOptions(batches=(4, 1), context=8, steps=4).prompt_lengths(8)) == 1
