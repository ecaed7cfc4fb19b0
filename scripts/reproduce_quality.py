#!/usr/bin/env python3
"""Quality at the precision that memory allows: perplexity of every method on the same tokens, paired.

    python scripts/reproduce_quality.py OUT --data valid.txt [--limit-tokens 100000] [--means 3.25 3.5 4] [--seeds 5]

OUT is what `pwjax prepare` made (of checkpoints/demo-moe, say). Two tables on stderr:

1. uniform 8, 6, 4 and 3 bits against bf16: perplexity ratio, and the paired difference to the row before.
2. at each mean of bits, with the KV cache of all sequences reserved from token 0 (`--reserve-kv`): `random`, `static`
   and `pagedweight` in nats a token, and the paired differences of `pagedweight` to each, in standard errors.

Differences are paired by window; standard errors are over windows. The last line of stdout is one JSON object.
Calibration text and test text must not overlap: the script compares their hashes, and those of their paragraphs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pwjax.cli_common import print_json_last, run_command, say, versions
from pwjax.commands import process
from pwjax.errors import UserError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="OUT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="the text given to prepare, if it was not the default")
    parser.add_argument("--limit-tokens", type=int, default=100_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--uniform", type=int, nargs="*", default=[8, 6, 4, 3])
    parser.add_argument("--means", type=float, nargs="*", default=[3.25, 3.5, 4.0])
    parser.add_argument("--seeds", type=int, default=5, help="of random:<mean>")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


# Of methods that don't move pages: one size for all, so that they share compiled programs.
STATIC_ARENA_BYTES = 2**26


class Runs:
    """Evaluates methods, one engine after another, and keeps their nats by window."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.results: dict[str, dict[str, Any]] = {}
        self.nats: dict[str, list[np.ndarray]] = {}

    def run(self, name: str, method: str, **options: Any) -> None:
        from pwjax import LLM
        from pwjax.eval.perplexity import run_perplexity

        args = self.args
        common = {"max_num_seqs": args.batch, "max_model_len": args.context, "scoring": True, "dtype": args.dtype}
        started_s = time.monotonic()
        llm = LLM(args.model, method=method, **common, **options)
        result = run_perplexity(llm, args.data, context=args.context, limit_tokens=args.limit_tokens)
        stats = llm.stats()
        self.nats[name] = list(result.window_nats)
        self.results[name] = {
            "nats_per_token": result.nats_per_token,
            "perplexity": result.perplexity,
            "tokens": result.tokens,
            "mean_bits": llm.score_mean_bits,
            "exchanged_bits": stats["exchanged_bits"],
            "bytes_moved": stats["bytes_moved"],
            "memory_budget_bytes": stats["memory_budget_bytes"],
            "compilations_after_warmup": stats["compilations_after_warmup"],
            "seconds": time.monotonic() - started_s,
        }
        say(f"{name:>20}: {result.nats_per_token:.5f} nats, {self.results[name]['seconds']:.0f} s")

    def difference(self, name: str, reference: str) -> tuple[float, float]:
        """`name` minus `reference`, nats a token, and its standard error; paired by window."""
        from pwjax.eval.perplexity import paired_difference

        found = paired_difference(self.nats[name], self.nats[reference])
        return found.mean, found.standard_error or float("nan")


def check_disjoint(args: argparse.Namespace) -> dict[str, Any]:
    """Calibration and test share no paragraph of 80 characters or more, nor are they the same text."""
    from pwjax.calibration import default_texts, load_texts
    from pwjax.eval.perplexity import read_text

    text, digest = read_text(args.data)
    calibration = load_texts(args.calibration) if args.calibration else default_texts()
    paragraphs = lambda t: {hashlib.sha256(p.strip().encode()).digest() for p in t.split("\n") if len(p.strip()) >= 80}  # noqa: E731
    shared = paragraphs(text) & set().union(*map(paragraphs, calibration))
    if shared:
        raise UserError(f"--data {args.data}: {len(shared)} paragraphs are in the calibration text too; use other text")
    return {"data_sha256": digest, "shared_paragraphs": len(shared)}


def uniform_table(runs: Runs, widths: list[int]) -> list[dict[str, Any]]:
    rows = []
    say(f"{'method':>12} {'perplexity':>11} {'/ bf16':>8} {'minus the row before':>24}")
    before = "bf16"
    for name in ("bf16", *(f"uniform:{b}" for b in widths)):
        nats = runs.results[name]["nats_per_token"]
        ratio = math.exp(nats - runs.results["bf16"]["nats_per_token"])
        mean, error = runs.difference(name, before) if name != "bf16" else (0.0, float("nan"))
        rows.append({"method": name, "ratio": ratio, "difference": mean, "standard_error": error})
        say(f"{name:>12} {math.exp(nats):11.3f} {ratio:8.4f} {mean:14.5f} +- {error:.5f}")
        before = name
    return rows


def mean_table(runs: Runs, means: list[float], seeds: int) -> list[dict[str, Any]]:
    rows = []
    say(
        f"{'mean':>5} {'random':>9} {'static':>9} {'paged':>9} {'bits':>6} {'exchanged':>9}  "
        "paged - random, paged - static (standard errors)"
    )
    for mean in means:
        paged, static = f"pagedweight@{mean:g}", f"static:{mean:g}"
        randoms = [f"random:{mean:g}/{seed}" for seed in range(seeds)]
        runs.nats[f"random:{mean:g}"] = [
            np.mean(group, axis=0) for group in zip(*map(runs.nats.get, randoms), strict=True)
        ]
        against_random, against_static = runs.difference(paged, f"random:{mean:g}"), runs.difference(paged, static)
        result = runs.results[paged]
        row = {
            "mean": mean,
            "random": float(np.mean([runs.results[name]["nats_per_token"] for name in randoms])),
            "static": runs.results[static]["nats_per_token"],
            "pagedweight": result["nats_per_token"],
            "mean_bits": result["mean_bits"],
            "exchanged_bits": result["exchanged_bits"],
            "paged_minus_random": against_random,
            "paged_minus_static": against_static,
        }
        rows.append(row)
        say(
            f"{mean:5.2f} {row['random']:9.5f} {row['static']:9.5f} {row['pagedweight']:9.5f} {row['mean_bits']:6.3f} "
            f"{row['exchanged_bits']:9d}  {against_random[0]:+.5f} ({against_random[0] / against_random[1]:+.1f}), "
            f"{against_static[0]:+.5f} ({against_static[0] / against_static[1]:+.1f})"
        )
    return rows


def main() -> None:
    args = parse_arguments()
    process.configure(None)
    disjoint = check_disjoint(args)
    runs = Runs(args)
    room = {"arena_bytes": STATIC_ARENA_BYTES}
    runs.run("bf16", "bf16", **room)
    for bits in args.uniform:
        runs.run(f"uniform:{bits}", f"uniform:{bits}", **room)
    for mean in args.means:
        for seed in range(args.seeds):
            runs.run(f"random:{mean:g}/{seed}", f"random:{mean:g}", seed=seed, **room)
        runs.run(f"static:{mean:g}", f"static:{mean:g}", **room)
        runs.run(f"pagedweight@{mean:g}", "pagedweight", mean_bits=mean, reserve_kv=True)
    uniform = uniform_table(runs, args.uniform)
    means = mean_table(runs, args.means, args.seeds) if args.means else []
    import jax

    print_json_last(
        {
            "command": "reproduce_quality",
            "versions": versions(),
            "device": jax.devices()[0].device_kind,
            "context": args.context,
            "batch": args.batch,
            **disjoint,
            "uniform": uniform,
            "means": means,
            "runs": runs.results,
        }
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
