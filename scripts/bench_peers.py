#!/usr/bin/env python3
"""What a user would run instead: transformers, at the geometry of Qwen1.5-MoE-A2.7B, random bf16 weights, on this GPU.

    python scripts/bench_peers.py [--parts decode,prefill,eager] [--time-limit 100]

Parts, in the order given:

* `decode`: one token a step at a context of 2048, static cache, `torch.compile(mode="reduce-overhead")`, experts by
  `grouped_mm`; batches of `--batch`.
* `prefill`: the whole prompt in one forward pass, without compilation, as `generate` does it; `--tokens` a prompt.
* `eager`: `decode` without compilation, with `grouped_mm` and with the default loop over experts.

A part that would start after the time limit is left out, and named. Needs torch with CUDA and transformers. Prints a
table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pwjax.bench.geometries import hf_config
from pwjax.cli_common import print_json_last, run_command
from pwjax.errors import UserError

PARTS = ("decode", "prefill", "eager")
WARMUP_STEPS = 6  # the compiled step is traced, recorded as a CUDA graph, and replayed
GROUP_STEPS = 8  # steps between two looks at the clock
GROUPS = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    add = parser.add_argument
    add("--parts", type=lambda text: text.split(","), default=list(PARTS))
    add("--batch", type=numbers, default=[1, 4])
    add("--context", type=int, default=2048)
    add("--tokens", type=numbers, default=[512, 2048, 4096, 8192])
    add("--layers", type=int)
    add("--geometry", default="qwen1.5-moe")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only shows that the script works")
    add("--time-limit", type=float, default=100.0, metavar="SECONDS")
    return parser.parse_args()


class Peer:
    """A transformers model of random weights, and how to run it."""

    def __init__(self, geometry: str, layers: int | None, device: str) -> None:
        try:
            import torch
            from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, StaticCache
        except ImportError as error:
            raise UserError(f"the peer needs torch and transformers ({error})") from None
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("the peer needs a GPU that torch can use: torch.cuda.is_available() is False")
        self.torch, self.device, self._static_cache = torch, device, StaticCache
        fields = hf_config(geometry, layers)
        if fields.pop("model_type") != "qwen2_moe":
            raise UserError(f"--geometry {geometry}: the peer is a Qwen2-MoE")
        self.config = Qwen2MoeConfig(**fields, pad_token_id=None)
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Qwen2MoeForCausalLM._from_config(self.config, dtype=torch.bfloat16)
        self.model.eval()
        names = inspect.signature(self.model.forward).parameters
        # Renamed in transformers 5.2x.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_cache_position = "cache_position" in names

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def random_ids(self, batch: int, tokens: int) -> Any:
        return self.torch.randint(self.config.vocab_size, (batch, tokens), device=self.device)

    def forward(self, run: Callable[..., Any], ids: Any, start: int, cache: Any) -> Any:
        """Newest token `[B, 1]` after `ids [B, T]` at positions from `start`."""
        position = self.torch.arange(start, start + ids.shape[1], device=self.device)
        options: dict[str, Any] = {self._cache_name: cache, "position_ids": position.repeat(ids.shape[0], 1)}
        if self._takes_cache_position:
            options["cache_position"] = position
        logits = run(input_ids=ids, use_cache=True, logits_to_keep=1, **options).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def decode_seconds(self, batch: int, context: int, *, compiled: bool) -> tuple[float, float]:
        """`(seconds a step, seconds until it ran at full speed)`; the context is that of the middle step."""
        torch = self.torch
        steps = WARMUP_STEPS + GROUPS * GROUP_STEPS
        start = max(1, context - WARMUP_STEPS - GROUPS * GROUP_STEPS // 2)
        # A length that masks and kernels like; the step attends over all of it, as users' steps do.
        cache = self._static_cache(config=self.config, max_cache_len=-(-(start + steps) // 64) * 64)
        started_s = time.perf_counter()
        token = self.forward(self.model, self.random_ids(batch, start), 0, cache)
        run = torch.compile(self.model, mode="reduce-overhead", dynamic=False) if compiled else self.model
        times = []
        for step in range(steps):
            if step >= WARMUP_STEPS and (step - WARMUP_STEPS) % GROUP_STEPS == 0:
                self.synchronize()
                times.append(time.perf_counter())
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            token = self.forward(run, token, start + step, cache).clone()
        self.synchronize()
        times.append(time.perf_counter())
        seconds = statistics.median(b - a for a, b in itertools.pairwise(times)) / GROUP_STEPS
        return seconds, times[0] - started_s

    def prefill_seconds(self, tokens: int, rounds: int = 5) -> float:
        """Seconds from a prompt to its first token, the median."""
        times = []
        for _ in range(2 + rounds):
            ids = self.random_ids(1, tokens)
            self.synchronize()
            started_s = time.perf_counter()
            self.forward(self.model, ids, 0, None)
            self.synchronize()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times[2:])

    def free(self) -> None:
        """Gives cached memory and compiled programs back."""
        gc.collect()
        self.torch.compiler.reset()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()


def decode_rows(peer: Peer, args: argparse.Namespace, experts: str, *, compiled: bool) -> Iterator[dict[str, Any]]:
    peer.model.set_experts_implementation(experts)
    for batch in args.batch:
        seconds, warmup_s = peer.decode_seconds(batch, args.context, compiled=compiled)
        yield {
            "what": "decode",
            "batch": batch,
            "context": args.context,
            "experts": experts,
            "compiled": compiled,
            "milliseconds": 1e3 * seconds,
            "tokens_per_second": batch / seconds,
            "warmup_seconds": warmup_s,
        }
        peer.free()


def prefill_rows(peer: Peer, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    peer.model.set_experts_implementation("grouped_mm")
    for tokens in args.tokens:
        seconds = peer.prefill_seconds(tokens)
        yield {
            "what": "prefill",
            "batch": 1,
            "tokens": tokens,
            "experts": "grouped_mm",
            "compiled": False,
            "milliseconds": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
        }
        peer.free()


def rows_of(part: str, peer: Peer, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if part == "prefill":
        yield from prefill_rows(peer, args)
    elif part == "decode":
        yield from decode_rows(peer, args, "grouped_mm", compiled=True)
    else:
        for experts in ("grouped_mm", "eager"):
            yield from decode_rows(peer, args, experts, compiled=False)


def main() -> None:
    args = parse_arguments()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise UserError(f"--parts {unknown[0]}: unknown; use {', '.join(PARTS)}")
    started_s = time.perf_counter()
    peer = Peer(args.geometry, args.layers, args.device)
    import transformers

    rows, left_out = [], []
    with peer.torch.no_grad():
        for part in args.parts:
            if time.perf_counter() - started_s > args.time_limit:
                left_out.append(part)
                continue
            for row in rows_of(part, peer, args):
                rows.append(row)
                how = f"{row['experts']}{', compiled' if row['compiled'] else ''}"
                where = f"B={row['batch']}" if row["what"] == "decode" else f"{row['tokens']} tokens"
                speed = f"{row['milliseconds']:9.2f} ms {row['tokens_per_second']:9.0f} tok/s"
                print(f"{row['what']:8} {where:12} {speed}  {how}", file=sys.stderr, flush=True)
    if left_out:
        print(f"out of time: {', '.join(left_out)}", file=sys.stderr)
    device = peer.torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    versions = {"torch": peer.torch.__version__, "transformers": transformers.__version__}
    print_json_last(
        {
            "command": "bench_peers",
            "peer": "transformers",
            "versions": versions,
            "device": device,
            "geometry": args.geometry,
            "layers": args.layers,
            "rows": rows,
            "left_out": left_out,
            "seconds": time.perf_counter() - started_s,
        }
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
