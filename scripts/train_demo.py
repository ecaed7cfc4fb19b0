"""Trains the demo model of `checkpoints/demo-moe`: a 22 M-parameter Qwen2-MoE, in about seven minutes on one H200.

    python scripts/train_demo_tokenizer.py --data DATA --out checkpoints/demo-moe
    python scripts/train_demo.py --data DATA --tokenizer checkpoints/demo-moe --out OUT

`DATA` holds the `.jsonl.xz` text files named in `pwjax/demo/corpus.py`. `OUT` receives config and weights in the hub
layout, from the first mid-run save on, and `scores.json` at the end. `--tiny` runs every stage on a CPU in a minute;
`--cache FILE` keeps the tokenized corpus between runs. The last line of output is one JSON document.
"""

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pwjax.demo.corpus import TEXT_FILES, build_corpus, is_held_out, read_documents
from pwjax.demo.evaluation import held_out_scores, task_scores
from pwjax.demo.export import load_params, save_checkpoint
from pwjax.demo.model import DemoConfig
from pwjax.demo.tokenizer import end_of_text_id, load_tokenizer
from pwjax.demo.training import TrainConfig, routing_lines, train_model


def parse_arguments() -> argparse.Namespace:
    """Command line; defaults are those of the published checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="an .npz file: read if it exists, else written")
    parser.add_argument("--seconds", type=float, default=400.0, help="time for the steps alone")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint at a lower, falling learning rate")
    parser.add_argument("--attention", choices=("cudnn", "xla"), default="cudnn", help="xla where there is no GPU")
    parser.add_argument("--items", type=int, default=200, help="test items a task")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--prepare-only", action="store_true", help="tokenize into --cache and stop")
    parser.add_argument("--tiny", action="store_true", help="a few documents, short windows, no quality")
    return parser.parse_args()


def load_corpus(args: argparse.Namespace, window_tokens: int) -> dict[str, np.ndarray]:
    """The tokenized corpus, from `--cache` when it is there."""
    if args.cache and args.cache.exists():
        return dict(np.load(args.cache))
    corpus = build_corpus(
        args.data,
        args.tokenizer,
        window_tokens,
        synthetic_groups_per_job=20 if args.tiny else 1600,
        files=TEXT_FILES[2:] if args.tiny else TEXT_FILES,
        max_documents=120 if args.tiny else None,
        num_processes=args.processes,
    )
    if args.cache:
        np.savez(args.cache, allow_pickle=False, **corpus)
    return corpus


def filler_lines(data: Path, max_chars: int = 10_000) -> list[str]:
    """Held-out text for the long-context retrieval test."""
    documents = (text for text in read_documents(data / "openstax_textbooks.jsonl.xz") if is_held_out(text))
    return [line for line in "\n".join(next(documents) for _ in range(2))[:max_chars].split("\n") if line.strip()]


def main() -> None:
    """Prepare, train, save, evaluate."""
    args = parse_arguments()
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    config = DemoConfig(attention=args.attention)
    train = TrainConfig(seconds=args.seconds)
    if args.resume:
        train = dataclasses.replace(train, peak_learning_rate=6e-4, warmup_steps=50, tail=0.9, seed=1)
    if args.tiny:
        train = dataclasses.replace(train, batch_windows=4, window_tokens=256, log_every_steps=5)
    corpus = load_corpus(args, train.window_tokens)
    log("tokens: " + ", ".join(f"{name} {part.size / 1e6:.1f} M" for name, part in corpus.items()))
    if args.prepare_only:
        return
    tokenizer = load_tokenizer(args.tokenizer)
    eos_token_id = end_of_text_id(tokenizer)

    def save(params) -> None:
        save_checkpoint(params, config, eos_token_id, args.out)
        log(f"saved to {args.out}")

    initial = load_params(args.resume, config) if args.resume else None
    graph, params = train_model(config, train, corpus, save, log, initial)

    # Scores are those of the weights on disk, rounded to bf16.
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    held_out = held_out_scores(graph, params, corpus["held_out"], train.window_tokens, 4 if args.tiny else 16)
    log(f"held-out: {held_out.nats:.4f} nats a token; max/min/dead {routing_lines(held_out.share)}")
    report = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "held_out": {
            "nats": held_out.nats,
            "num_tokens": held_out.num_tokens,
            "share": held_out.share.tolist(),
            "mass": held_out.mass.tolist(),
        },
    }
    (args.out / "scores.json").write_text(json.dumps(report) + "\n")
    filler = [] if args.tiny else filler_lines(args.data)
    report["tasks"] = task_scores(graph, params, tokenizer, args.items, filler, log)
    (args.out / "scores.json").write_text(json.dumps(report) + "\n")
    report["held_out"] = {"nats": held_out.nats, "num_tokens": held_out.num_tokens}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
