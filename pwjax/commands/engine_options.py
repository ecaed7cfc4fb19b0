"""The options that every command with an engine shares, and how they become an `LLM`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pwjax.cli_common import bytes_argument

if TYPE_CHECKING:
    from pwjax.engine.llm import LLM


ABLATIONS = {
    "routing": "ignore routing statistics",
    "residual": "ignore prompt residuals",
    "movement": "keep the first assignment, move nothing",
    "sensitivity": "tell linear-blocks apart by nothing but their size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the engine's options."""
    parser.add_argument("model", metavar="OUT", help="folder that `pwjax prepare` made")
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--memory-budget", type=bytes_argument, metavar="SIZE", help="device memory for everything: 12GiB, 9.5GB, bytes"
    )
    add("--mean-bits", type=float, metavar="BITS", help="derive the budget from this mean precision of the experts")
    add("--arena", type=bytes_argument, metavar="SIZE", help="derive the budget from the arena's size (weights and KV)")
    add(
        "--method",
        default="pagedweight",
        help="pagedweight (default), bf16, uniform:<bits>, random:<mean>, static, static:<mean>",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (default: the model's)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="sequences that run at once (default 8)")
    add("--max-bits", type=int, metavar="BITS", help="highest precision served (default: chosen by prepare)")
    add("--prefill-chunk-tokens", type=int, default=256, metavar="N", help="prompt tokens a step (default 256)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of activations and dense weights")
    add("--kv-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the KV cache")
    add("--low-watermark-blocks", type=int, metavar="N", help="free KV blocks below which weights give way")
    add("--high-watermark-blocks", type=int, metavar="N", help="free KV blocks above which weights come back")
    add("--reserve-kv", action="store_true", help="hold the KV of full-length sequences from the start")
    add("--implementation", default="auto", choices=("auto", "triton", "xla"), help="of the kernels; no fallback")
    add("--no-exchange", action="store_true", help="don't trade bits between cold and hot experts")
    for part, effect in ABLATIONS.items():
        add(f"--no-{part}", action="store_true", help=f"ablation: {effect}")
    add("--replay", metavar="FILE.jsonl", help="repeat the page moves of an earlier --timeline")
    add("--seed", type=int, default=0, help="of random:<mean>, and of sampling")


def build_llm(args: argparse.Namespace, **extra: Any) -> LLM:
    """Makes the `LLM` of parsed options; loading shows a bar on a terminal."""
    from pwjax.engine.llm import LLM
    from pwjax.planner import Ablation

    names = (
        "mean_bits max_model_len max_num_seqs max_bits prefill_chunk_tokens dtype kv_dtype low_watermark_blocks "
        "high_watermark_blocks reserve_kv implementation replay seed"
    ).split()
    options = {name: getattr(args, name) for name in names}
    options["arena_bytes"] = args.arena
    options |= {
        "exchange": not args.no_exchange,
        "ablation": Ablation(**{part: not getattr(args, f"no_{part}") for part in ABLATIONS}),
    } | extra
    bar = _LoadingBar()
    try:
        return LLM(args.model, memory_budget=args.memory_budget, method=args.method, on_progress=bar.update, **options)
    finally:
        bar.close()


class _LoadingBar:
    """A bar for each thing that is loaded, on a terminal and after two seconds only."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""

    def update(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if what != self._what:
            from tqdm import tqdm

            self.close()
            self._bar, self._what = tqdm(total=total, desc=f"loading {what}", delay=2.0, leave=False), what
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""
