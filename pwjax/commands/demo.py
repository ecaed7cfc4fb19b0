"""`pwjax demo`: the embedded model under a tight budget, in a few minutes on two CPU cores.

Three requests run together in an arena that holds the experts at about 5 bits and hardly any KV cache. With
`pagedweight` the experts give way as the contexts grow, and come back at the end. At the same budget `uniform:6` has
memory for one request at a time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from pwjax.cli_common import format_bytes
from pwjax.errors import UserError
from pwjax.timeline import check_writable

ARENA_BYTES = 19_000_000
METHODS = ("pagedweight", "uniform:6")
PROMPT_TOKENS = 700
PROMPT_SEED = 20
ENGINE = {"max_num_seqs": 4, "max_model_len": 2048, "prefill_chunk_tokens": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add(
        "--out", default="out/demo", metavar="FOLDER", help="for the prepared model and the pictures (default out/demo)"
    )
    add("--model", metavar="HF_DIR", help="a Hugging Face folder instead of the embedded one")
    add("--max-tokens", type=int, default=300, help="tokens to generate a request (default 300)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepares the model if need be, serves it, and shows what happened."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    picture = check_writable(out / "timeline.png")
    store = _prepared(Path(args.model) if args.model else embedded_model(), out / "model")
    results = {method: _serve(store, method, args.max_tokens, picture) for method in METHODS}
    _show(results, picture)
    return {"picture": str(picture), "methods": results, **results["pagedweight"]}


def embedded_model() -> Path:
    """The demo model's folder in a checkout.

    Raises:
        UserError: pwjax was installed without it.
    """
    import checkpoints

    folder = Path(checkpoints.__file__).parent / "demo-moe"
    if not (folder / "config.json").is_file():
        raise UserError("the embedded model is part of a source checkout only; give one with --model HF_DIR")
    return folder


def _prepared(source: Path, store: Path) -> Path:
    """Prepares `source` into `store`, unless it is there already."""
    from pwjax.prepare import PrepareOptions, prepare

    if not (store / "manifest.json").is_file():
        _say(f"preparing {source.name} (quantizing, calibrating) ..")
        prepare(PrepareOptions(source=source, out=store))
    return store


def _serve(store: Path, method: str, max_tokens: int, picture: Path) -> dict[str, Any]:
    from pwjax.engine.llm import LLM
    from pwjax.engine.sampling_params import SamplingParams

    _say(f"loading, method {method} ..")
    llm = LLM(store, method=method, arena_bytes=ARENA_BYTES, keep_timeline=True, **ENGINE)
    _say(f"serving 3 requests in {format_bytes(llm.built.budget_bytes)} ..")
    started_s = time.monotonic()
    outputs = llm.generate(_prompts(llm.tokenizer), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    seconds = time.monotonic() - started_s
    if method == "pagedweight":
        assert llm.timeline is not None
        llm.timeline.write(picture)
    tokens = sum(len(output.token_ids) for output in outputs)
    figures = llm.stats() | {"tokens_per_second": tokens / seconds, "results": [x.to_json() for x in outputs]}
    llm.close()
    return figures


def _prompts(tokenizer) -> list[list[int]]:
    """Documents of the demo's own tasks, cut to the same length."""
    from pwjax.demo.synthetic import arithmetic_document, retrieval_document

    rng = random.Random(PROMPT_SEED)
    texts = (
        "\n\n".join(arithmetic_document(rng) for _ in range(4)),
        "\n\n".join(retrieval_document(rng, num_keys=24) for _ in range(4)),
        "\n\n".join(arithmetic_document(rng) for _ in range(4)),
    )
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]


def _show(results: dict[str, dict[str, Any]], picture: Path) -> None:
    header = ("method", "at once", "preempted", "bits first", "least", "last", "peak", "budget", "tok/s")
    _say("".join(f"{name:>12}" for name in header))
    for method, r in results.items():
        bits = [f"{r[name]:.2f}" for name in ("mean_bits_first", "mean_bits_min", "mean_bits_last")]
        sizes = [format_bytes(r[name]) for name in ("memory_bytes_peak", "memory_budget_bytes")]
        row = (method, r["max_running"], r["preemptions"], *bits, *sizes, f"{r['tokens_per_second']:.0f}")
        _say("".join(f"{cell!s:>12}" for cell in row))
    paged = results["pagedweight"]
    _say(
        f"pagedweight took {paged['offloads']} pages ({format_bytes(paged['bytes_released'])}) off the device and "
        f"brought {paged['reloads']} back; {paged['compilations_after_warmup']} compilations while serving"
    )
    _say(f"picture: {picture}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
