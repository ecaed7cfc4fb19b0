"""`pwjax demo`: the embedded model under a tight budget, in a few minutes on two CPU cores.

Three requests run together in an arena that holds the experts at 6 bits and the KV cache of one of them. With
`pagedweight` the experts give way as the contexts grow, and come back at the end. At the same budget `uniform:6` has
memory for one request at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pwjax.cli_common import format_bytes, say
from pwjax.demo.serving import serve, table
from pwjax.errors import UserError
from pwjax.timeline import check_writable

ARENA_BYTES = 19_000_000
METHODS = ("pagedweight", "uniform:6")
REQUESTS = 3
PROMPT_TOKENS = 1200
ENGINE = {"max_num_seqs": 4, "max_model_len": 2048, "prefill_chunk_tokens": 64, "low_watermark_blocks": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("--out", default="out/demo", metavar="FOLDER", help="for the prepared model and the picture (default out/demo)")
    add("--model", metavar="HF_DIR", help="a Hugging Face folder instead of the embedded one")
    add("--max-tokens", type=int, default=400, help="tokens to generate a request (default 400)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepares the model if need be, serves it, and shows what happened."""
    most = ENGINE["max_model_len"] - PROMPT_TOKENS
    if not 1 <= args.max_tokens <= most:
        raise UserError(
            f"--max-tokens is {args.max_tokens}; with prompts of {PROMPT_TOKENS} tokens it must be 1 to {most}"
        )
    from checkpoints.hf_reader import HFCheckpoint

    source = Path(args.model) if args.model else embedded_model()
    HFCheckpoint(source).validate()
    out = Path(args.out)
    store = _prepared(source, out / ("model" if args.model is None else f"model-{source.name}"))
    picture = check_writable(out / "timeline.png")
    scene = {"requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": args.max_tokens, **ENGINE}
    results = {}
    for method in METHODS:
        say(f"serving {REQUESTS} requests with {method} ..")
        timelines = [picture] if method == "pagedweight" else []
        results[method] = serve(store, method, arena_bytes=ARENA_BYTES, timelines=timelines, **scene)
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
    if not (store / "manifest.json").is_file():
        store.parent.mkdir(parents=True, exist_ok=True)
        say(f"preparing {source.name}: quantizing and calibrating ..")
        from pwjax.prepare import PrepareOptions, prepare

        prepare(PrepareOptions(source=source, out=store))
    return store


def _show(results: dict[str, dict[str, Any]], picture: Path) -> None:
    for line in table(results):
        say(line)
    paged = results["pagedweight"]
    say(
        f"pagedweight dropped {paged['offloads']} pages ({format_bytes(paged['bytes_released'])}) from the device and "
        f"brought {paged['reloads']} back; {paged['compilations_after_warmup']} compilations while serving"
    )
    say(f"picture: {picture}")
