"""`pwjax prepare HF_DIR OUT`: a Hugging Face MoE folder to a store of weight pages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("hf_dir", metavar="HF_DIR", type=Path, help="Hugging Face folder of a Qwen2-MoE or Mixtral model")
    add("out", metavar="OUT", type=Path, help="new folder; an interrupted prepare is resumed by the same command")
    add("--calibration", metavar="FILE", type=Path, help=".txt, or .jsonl with a field text (default: built in)")
    add(
        "--lut-rows",
        default="auto",
        choices=("auto", "1", "32"),
        help="rows that share a lookup table; auto measures which has less error at equal bytes (default)",
    )
    add("--max-bits", type=int, metavar="BITS", help="highest precision served by default (default: by loss)")
    add("--no-source", action="store_true", help="don't keep the bf16 experts that --method bf16 needs")
    add("--seed", type=int, help="of the synthetic part of the built-in calibration text")
    add("--calibration-sequences", type=int, default=128, metavar="N", help="at most so many windows (default 128)")
    add("--loss-sequences", type=int, default=16, metavar="N", help="windows that losses are measured on (default 16)")
    add("--calibration-tokens", type=int, default=512, metavar="N", help="tokens of a window (default 512)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepares, and returns the command's figures."""
    from pwjax.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        source=args.hf_dir,
        out=args.out,
        calibration=args.calibration,
        lut_rows="auto" if args.lut_rows == "auto" else 1 if args.lut_rows == "1" else 32,
        max_bits=args.max_bits,
        keep_source=not args.no_source,
        calibration_sequences=args.calibration_sequences,
        calibration_tokens=args.calibration_tokens,
        loss_sequences=args.loss_sequences,
        **({} if args.seed is None else {"seed": args.seed}),
    )
    return prepare(options)
