"""Serving scenes that `pwjax demo` and scripts/reproduce_serving.py show: long prompts, one arena, several methods."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pwjax.cli_common import format_bytes

PROMPT_SEED = 20
COLUMNS = ("method", "at once", "preempted", "bits first", "least", "last", "peak", "budget", "left", "tok/s")


def long_prompts(tokenizer: Any, count: int, length_tokens: int) -> list[list[int]]:
    """`count` prompts of `length_tokens` ids: documents of the demo's own tasks, alternating."""
    from pwjax.demo.synthetic import arithmetic_document, retrieval_document

    rng = random.Random(PROMPT_SEED)
    prompts = []
    for number in range(count):
        ids: list[int] = []
        while len(ids) < length_tokens:
            document = retrieval_document(rng, num_keys=24) if number % 2 else arithmetic_document(rng)
            ids += tokenizer.encode(document + "\n\n")
        prompts.append(ids[:length_tokens])
    return prompts


def serve(
    store: Path,
    method: str,
    *,
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
    timelines: Iterable[Path] = (),
    **engine: Any,
) -> dict[str, Any]:
    """Serves `requests` prompts together, to their full length, and returns the figures.

    Args:
        timelines: files for the run's timeline, `.png` or `.jsonl`.
        engine: options of `LLM`.

    Returns:
        `LLM.stats()`, and: results, tokens_per_second, released_share (bytes of weight pages that left, over those
        there at the start), lengths_full.
    """
    from pwjax.engine.llm import LLM
    from pwjax.engine.sampling_params import SamplingParams

    llm = LLM(store, method=method, keep_timeline=True, **engine)
    prompts = long_prompts(llm.tokenizer, requests, prompt_tokens)
    started_s = time.monotonic()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    seconds = time.monotonic() - started_s
    assert llm.timeline is not None
    for path in timelines:
        llm.timeline.write(path)
    weights = [record.weight_bytes for record in llm.timeline]
    stats = llm.stats()
    return {
        **stats,
        "tokens_per_second": sum(len(output.token_ids) for output in outputs) / seconds,
        "released_share": 1 - min(weights) / weights[0] if weights and weights[0] else 0.0,
        "lengths_full": all(len(output.token_ids) == new_tokens for output in outputs),
        "results": [output.to_json() for output in outputs],
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines for people: a header and a row a method."""
    lines = ["".join(f"{name:>12}" for name in COLUMNS)]
    for method, r in results.items():
        bits = (r[name] for name in ("mean_bits_first", "mean_bits_min", "mean_bits_last"))
        row = (
            method,
            r["max_running"],
            r["preemptions"],
            *("-" if value is None else f"{value:.2f}" for value in bits),
            format_bytes(r["memory_bytes_peak"]),
            format_bytes(r["memory_budget_bytes"]),
            f"{r['released_share']:.0%}",
            f"{r['tokens_per_second']:.0f}",
        )
        lines.append("".join(f"{cell!s:>12}" for cell in row))
    return lines
