"""Prefill speed of the serving engine: time to the first token of one prompt, alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pwjax.bench import floors
from pwjax.engine.llm import LLM
from pwjax.engine.sampling_params import SamplingParams


def bench_prefill(
    llm: LLM, tokens: Iterable[int], *, rounds: int, matmul_rate: float, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each prompt length: from the request's arrival to its first token, the median of `rounds` prompts.

    Args:
        matmul_rate: bf16 operations a second, for the floor.
    """
    rng = np.random.default_rng(seed)
    config = llm.model.config
    for count in tokens:
        prompts = rng.integers(0, config.vocab_size, (1 + rounds, count)).tolist()
        times = [_first_token_seconds(llm, prompt) for prompt in prompts][1:]
        seconds = statistics.median(times)
        flops = floors.prefill_flops(config, count)
        yield {
            "batch": 1,
            "tokens": count,
            "method": str(llm.config.method),
            "bits": llm.mean_bits,
            "tokens_per_second": count / seconds,
            "first_token_ms": 1e3 * seconds,
            "best_first_token_ms": 1e3 * min(times),
            "floor_ms": 1e3 * flops / matmul_rate,
            "floor_share": flops / matmul_rate / seconds,
            "flops": flops,
        }


def _first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    output = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert output.first_token_s is not None, "the request ended without a token"
    return output.first_token_s
