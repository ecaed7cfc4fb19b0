"""`pwjax eval ppl OUT --data FILE`: quality, measured through the serving engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pwjax.cli_common import format_bytes
from pwjax.commands import engine_options
from pwjax.errors import UserError

TASKS = ("ppl", "arithmetic", "retrieval")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("task", choices=TASKS, help="ppl: perplexity of a text; the others: the demo model's own sets")
    engine_options.add_arguments(parser)
    group = parser.add_argument_group("evaluation")
    add = group.add_argument
    add("--data", metavar="FILE", help="for ppl: .txt, or .jsonl with a field text")
    add("--context", type=int, metavar="TOKENS", help="window length (default 2048, or the model's limit)")
    add("--stride", type=int, metavar="TOKENS", help="tokens between windows (default: the context)")
    add("--batch", type=int, metavar="N", help="windows in lockstep (default: --max-num-seqs)")
    add("--limit-tokens", type=int, metavar="N", help="stop after so many tokens of text")
    add("--items", type=int, default=100, metavar="N", help="for arithmetic and retrieval (default 100)")
    add("--keys", type=int, default=16, metavar="N", help="for retrieval (default 16)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluates, and returns the command's figures."""
    if args.batch is not None:
        args.max_num_seqs = args.batch
    if args.task == "ppl":
        return _perplexity(args)
    return _demo_task(args)


def _perplexity(args: argparse.Namespace) -> dict[str, Any]:
    from pwjax.eval.perplexity import read_text, run_perplexity

    if args.data is None:
        raise UserError("eval ppl needs --data FILE (.txt, or .jsonl with a field text)")
    if args.stride is not None and args.context is not None and args.stride > args.context:
        raise UserError(f"--stride {args.stride} is more than --context {args.context}: tokens would be left out")
    read_text(args.data)  # refuses a bad file before the model is loaded
    for name in ("context", "stride", "limit_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.context is not None and args.max_model_len is None:
        args.max_model_len = max(args.context, 2)
    llm = engine_options.build_llm(args, scoring=True)
    result = run_perplexity(llm, args.data, context=args.context, stride=args.stride, limit_tokens=args.limit_tokens)
    stats = llm.stats()
    figures = result.to_json()
    print(
        f"{stats['method']}: {result.tokens} tokens, {result.nats_per_token:.4f} nats a token, perplexity "
        f"{result.perplexity:.3f}, peak {format_bytes(stats['memory_bytes_peak'])}",
        file=sys.stderr,
    )
    return {**stats, **figures, "mean_bits": llm.score_mean_bits, "batch": args.max_num_seqs}


def _demo_task(args: argparse.Namespace) -> dict[str, Any]:
    from pwjax.demo.synthetic import KEYS
    from pwjax.eval.tasks import evaluate_arithmetic, evaluate_retrieval

    if args.items < 1:
        raise UserError(f"--items is {args.items}; it must be at least 1")
    if not 1 <= args.keys <= len(KEYS):
        raise UserError(f"--keys is {args.keys}; it must be 1 to {len(KEYS)}")
    llm = engine_options.build_llm(args)
    if args.task == "arithmetic":
        result = evaluate_arithmetic(llm, args.items)
    else:
        result = evaluate_retrieval(llm, args.items, args.keys)
    print(f"{args.task}: {result.accuracy:.3f} of {result.items}", file=sys.stderr)
    return {**llm.stats(), "task": args.task, **result.to_json()}
