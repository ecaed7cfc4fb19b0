#!/usr/bin/env python3
"""Weights give way to the KV cache: one budget, several methods, on any device.

    python scripts/reproduce_serving.py OUT [--fill-card]

OUT is what `pwjax prepare checkpoints/demo-moe OUT` made. Two scenes:

1. Three requests of 1,700 tokens in an arena of 19 MB. `pagedweight` runs them together: at least a fifth of the
   expert bytes leave, and come back. `uniform:6` runs fewer at once, or preempts.
2. One request of 2,000 new tokens in an arena of 13.4 MB, where the experts start near 5 bits; `uniform:6` can't load.

Budgets are the arena plus what is fixed on this device (dense weights, tables, staging, workspace). On a GPU the
process's own memory is printed beside the accounting; `--fill-card` has a second process take the rest of the card
first. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pwjax.cli_common import format_bytes, print_json_last, run_command, say, versions
from pwjax.commands import process
from pwjax.demo.serving import serve, table
from pwjax.errors import UserError

CAP_BYTES = 64 * 2**20  # of the budgets here; JAX's pool is capped at it and `process.LIBRARY_BYTES`
CONTEXT_BYTES = 3 * 2**30  # left on the card for the CUDA context and libraries of this process
ENGINE = {"low_watermark_blocks": 4, "prefill_chunk_tokens": 64}
FILLER = """
import jax, jax.numpy as jnp, sys
held = jnp.zeros(int(sys.argv[1]), jnp.uint8).block_until_ready()
print("filled", flush=True)
sys.stdin.read()
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="OUT")
    parser.add_argument("--pictures", type=Path, help="folder for timelines")
    parser.add_argument("--fill-card", action="store_true")
    return parser.parse_args()


def card_used_bytes() -> int | None:
    """Memory in use on the first GPU by all processes, by the driver's account; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def filled_card(wanted: bool) -> Iterator[int]:
    """Another process holds all but what the budget and this process's libraries need; yields its bytes."""
    total = process.gpu_bytes()
    if not wanted or total is None:
        yield 0
        return
    used = card_used_bytes() or 0
    size = total - used - CAP_BYTES - process.LIBRARY_BYTES - 2 * CONTEXT_BYTES
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{(size + 2**30) / total:.4f}"}
    filler = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert filler.stdin is not None and filler.stdout is not None
    try:
        if b"filled" not in filler.stdout.readline():
            raise UserError(f"--fill-card: another process could not take {size} bytes")
        say(f"another process holds {format_bytes(size)} of {format_bytes(total)}")
        yield size
    finally:
        filler.stdin.close()
        filler.wait()


def timelines(folder: Path | None, name: str) -> list[Path]:
    return [] if folder is None else [folder / f"{name}.png", folder / f"{name}.jsonl"]


def several_requests(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    scene: dict[str, Any] = {"requests": 3, "prompt_tokens": 1000, "new_tokens": 700, "arena_bytes": 19_000_000}
    engine: dict[str, Any] = {**ENGINE, "max_num_seqs": 4, "max_model_len": 1792}
    results = {}
    for method in ("pagedweight", "uniform:6"):
        files = timelines(args.pictures, "several") if method == "pagedweight" else []
        results[method] = serve(args.model, method, timelines=files, **scene, **engine)
    return results


def long_request(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    scene: dict[str, Any] = {"requests": 1, "prompt_tokens": 100, "new_tokens": 2000, "arena_bytes": 13_400_000}
    engine: dict[str, Any] = {**ENGINE, "max_num_seqs": 2, "max_model_len": 2304}
    files = timelines(args.pictures, "long")
    results = {"pagedweight": serve(args.model, "pagedweight", timelines=files, **scene, **engine)}
    try:
        serve(args.model, "uniform:6", **scene, **engine)
    except UserError as error:
        say(f"uniform:6: {error}")
    else:
        raise AssertionError("uniform:6 was to be too large for this arena")
    return results


def main() -> None:
    args = parse_arguments()
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    process.configure(CAP_BYTES if args.fill_card else None)
    before = card_used_bytes()
    with filled_card(args.fill_card) as filler_bytes:
        several = several_requests(args)
        say("1. three requests of 1,700 tokens, arena 19 MB")
        say("\n".join(table(several)))
        long = long_request(args)
        say("2. one request of 2,000 new tokens, arena 13.4 MB")
        say("\n".join(table(long)))
        after = card_used_bytes()
    import jax

    measured = several["pagedweight"]["measured_bytes_peak"]
    if measured is not None:
        say(f"JAX's own peak: {format_bytes(measured)}; the card beside the filler, by the driver: "
            f"{format_bytes((after or 0) - (before or 0) - filler_bytes)}")  # fmt: skip
    figures = {"several_requests": several, "long_request": long, "filler_bytes": filler_bytes,
               "card_bytes_before": before, "card_bytes_after": after}  # fmt: skip
    print_json_last(
        {"command": "reproduce_serving", "versions": versions(), "device": jax.devices()[0].device_kind, **figures}
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
