"""`pwjax generate OUT --prompt TEXT`: text from prompts, under a memory budget."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from pwjax.cli_common import format_bytes
from pwjax.commands import engine_options
from pwjax.errors import UserError
from pwjax.timeline import TextPanel, check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    engine_options.add_arguments(parser)
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times; they run together")
    add("--prompt-file", action="append", metavar="FILE", help="a prompt from a text file; may be repeated")
    add("--max-tokens", type=int, default=128, help="tokens to generate a prompt (default 128)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="0 is off")
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--stop", action="append", metavar="TEXT", help="ends a request; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--timeline", action="append", metavar="FILE", help="memory over tokens, as .png or .jsonl; may be repeated")
    add("--quiet", action="store_true", help="no text panel and no generated text on stderr")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts, in the order --prompt, --prompt-file.

    Raises:
        UserError: none was given, or a file can't be read.
    """
    prompts: list[str] = list(args.prompt or ())
    for name in args.prompt_file or ():
        try:
            prompts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {name}: can't be read as UTF-8 text ({error})") from None
    if not prompts:
        raise UserError("generate needs at least one --prompt or --prompt-file")
    return prompts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Generates, and returns the command's figures."""
    prompts = read_prompts(args)
    for name in args.timeline or ():
        check_writable(name)
    from pwjax.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop or ()),
        ignore_eos=args.ignore_eos,
    )
    panel = TextPanel(sys.stderr) if not args.timeline and not args.quiet else None
    llm = engine_options.build_llm(
        args, keep_timeline=bool(args.timeline), on_record=panel.update if panel is not None else None
    )
    started_s = time.monotonic()
    results = llm.generate(prompts, params)
    seconds = time.monotonic() - started_s
    if llm.engine.weights is not None:
        llm.engine.weights.check_replay_finished()
    if panel is not None:
        panel.close()
    for name in args.timeline or ():
        assert llm.timeline is not None
        llm.timeline.write(name)
    stats = llm.stats()
    tokens = sum(len(result.token_ids) for result in results)
    if not args.quiet:
        _describe(results, stats)
    return {
        **stats,
        "results": [result.to_json() for result in results],
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
    }


def _describe(results, stats: dict[str, Any]) -> None:
    """The texts, and one line on memory, for people."""
    for result in results:
        print(f"[{result.request_id}] {result.text!r} ({result.finish_reason})", file=sys.stderr)
    bits = ""
    if stats["mean_bits_first"] is not None:
        bits = (
            f"; mean bits {stats['mean_bits_first']:.2f} at first, {stats['mean_bits_min']:.2f} at the least, "
            f"{stats['mean_bits_last']:.2f} at last"
        )
    print(
        f"{stats['method']}: peak {format_bytes(stats['memory_bytes_peak'])} of "
        f"{format_bytes(stats['memory_budget_bytes'])}{bits}; {stats['preemptions']} preemptions",
        file=sys.stderr,
    )
