"""`pwjax bench WHAT`: speed on this device, with random weights at real geometry."""

from __future__ import annotations

import argparse
import functools
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pwjax.cli_common import say
from pwjax.errors import UserError

if TYPE_CHECKING:
    from pwjax.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benches and their options."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, (text, add_options, _) in _BENCHES.items():
        bench = benches.add_parser(name, help=text, description=text)
        add_options(bench)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one bench: `rows` of figures and what they were measured with."""
    import jax

    figures = _BENCHES[args.bench][2](args)
    common = {"bench": args.bench, "device": jax.devices()[0].device_kind, "invocation": shlex.join(sys.argv)}
    return {**common, "method": None, "implementations": {}, "memory_budget_bytes": None, **figures}


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--geometry", default="qwen1.5-moe", metavar="NAME", help="qwen1.5-moe (default), mixtral or tiny")
    add("--layers", type=int, metavar="N", help="only so many layers")
    add("--method", default="uniform:4", help="as for generate (default uniform:4)")
    add(
        "--max-bits",
        type=int,
        metavar="BITS",
        help="highest precision made and served (default: what the method needs)",
    )
    add("--lut-rows", type=int, default=32, choices=(1, 32), help="rows that share a lookup table (default 32)")
    add("--implementation", default="auto", choices=("auto", "triton", "xla"), help="of the kernels; no fallback")
    add("--seed", type=int, default=0, help="of weights, prompts and random:<mean>")


def _llm_maker(args: argparse.Namespace) -> Callable[..., LLM]:
    """What makes the `LLM` of a random model, given further options of it; the command's own are checked at once."""
    from pwjax.bench.geometries import model_config
    from pwjax.bench.synthetic import SyntheticModel
    from pwjax.engine.config import EngineConfig, Method, resolved
    from pwjax.engine.llm import LLM

    method = Method.parse(args.method)
    needed = {"bf16": 3, "uniform": int(method.bits or 0)}.get(method.name, 8)
    config = model_config(args.geometry, args.layers)
    model = SyntheticModel(config, max_bits=args.max_bits or needed, lut_rows=args.lut_rows, seed=args.seed)
    common: dict[str, Any] = dict(implementation=resolved(args.implementation), seed=args.seed)
    EngineConfig(method=method, **common)
    return functools.partial(LLM, model, method=args.method, **common)


# decode


def _add_decode_options(parser: argparse.ArgumentParser) -> None:
    _add_model_options(parser)
    add = parser.add_argument
    add("--batch", type=_counts, default=(1, 4, 16, 64), metavar="N,N..", help="sequences (default 1,4,16,64)")
    add("--context", type=_count, default=2048, metavar="TOKENS", help="of every sequence (default 2048)")
    add("--steps", type=_count, default=64, metavar="N", help="measured steps a batch (default 64)")
    add("--max-num-seqs", type=_count, metavar="N", help="of the engine (default: the largest batch)")


def _decode(args: argparse.Namespace) -> dict[str, Any]:
    if args.max_num_seqs is not None and args.max_num_seqs < max(args.batch):
        raise UserError(f"--max-num-seqs {args.max_num_seqs} is less than a batch of {max(args.batch)}")
    from pwjax.bench.decode import DecodeOptions, run_decode

    options = DecodeOptions(
        batches=tuple(sorted(set(args.batch), reverse=True)), context=args.context, steps=args.steps
    )
    llm, figures = run_decode(_llm_maker(args), options, max_num_seqs=args.max_num_seqs, seed=args.seed)
    stats = llm.stats()
    columns = (
        "batch bits context tokens_per_second step_ms device_step_ms host_ms late_steps floor_ms floor_share "
        "device_floor_share launches"
    )
    _show(figures["rows"], columns.split())
    measured = stats["measured_bytes_peak"]
    say(
        f"{args.method}: cold start {figures['cold_start_seconds']:.1f} s, copy rate "
        f"{figures['copy_bytes_per_second'] / 1e12:.2f} TB/s, memory {stats['reserved_bytes'] / 1e9:.2f} GB accounted"
        + ("" if measured is None else f", {measured / 1e9:.2f} GB measured")
    )
    memory = None if measured is None else measured / stats["reserved_bytes"]
    return {**stats, **_model_fields(args), **figures, "memory_measured_over_accounted": memory}


def _model_fields(args: argparse.Namespace) -> dict[str, Any]:
    return {"geometry": args.geometry, "layers": args.layers, "lut_rows": args.lut_rows}


# moe


def _add_moe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--geometry", default="qwen1.5-moe", metavar="NAME", help="whose layer: qwen1.5-moe (default), mixtral or tiny")
    add("--rows", type=_count, metavar="N", help="with --cols: one matrix [N, K] in place of a layer")
    add("--cols", type=_count, metavar="K")
    add("--bits", type=_bits, default=(3, 4), metavar="B,B..", help="3 to 8, and for a layer mixed (default 3,4)")
    add("--tokens", type=_counts, default=(1, 4, 8), metavar="N,N..", help="activations (default 1,4,8)")
    add("--lut-rows", type=int, default=1, choices=(1, 32), help="rows that share a lookup table (default 1)")
    add("--max-bits", type=int, choices=range(3, 9), metavar="BITS", help="compile for so many (default: a row's own)")
    add(
        "--instructions",
        type=_rate,
        default=3.3,
        metavar="N",
        help="integer instructions a decoded weight, for the floor",
    )
    add("--implementation", default="auto", choices=("auto", "triton", "xla"), help="of the kernel; no fallback")
    add("--seed", type=int, default=0)


def _moe(args: argparse.Namespace) -> dict[str, Any]:
    if (args.rows is None) != (args.cols is None):
        raise UserError("--rows and --cols go together; without them a whole layer is measured")
    if args.rows is not None and "mixed" in args.bits:
        raise UserError("--bits mixed goes with a whole layer; one matrix has one width")
    highest = max(8 if bits == "mixed" else bits for bits in args.bits)
    if args.max_bits is not None and args.max_bits < highest:
        raise UserError(f"--max-bits {args.max_bits} is less than --bits {highest}")
    from pwjax.bench.calls import Ceilings
    from pwjax.bench.geometries import model_config
    from pwjax.bench.moe import MoEBench, bench_layer, bench_matmul
    from pwjax.engine.config import resolved

    config, implementation = model_config(args.geometry), resolved(args.implementation)
    ceilings = Ceilings.measure(args.instructions)
    options: dict[str, Any] = {name: getattr(args, name) for name in ("bits", "tokens", "lut_rows", "max_bits", "seed")}
    bench = MoEBench(ceilings=ceilings, implementation=implementation, **options)
    rows = list(bench_layer(config, bench) if args.rows is None else bench_matmul(args.rows, args.cols, bench))
    columns = (
        "bits tokens microseconds gigabytes_per_second floor_share bytes_floor_us flop_floor_us instruction_floor_us "
        "error failure"
    )
    _show(rows, columns.split())
    what = {"geometry": args.geometry} if args.rows is None else {}
    return {**what, "implementations": {"bitplane_moe": implementation}, "ceilings": ceilings, "rows": rows}


# attention


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--geometry", default="qwen1.5-moe", metavar="NAME", help="whose heads: qwen1.5-moe (default), mixtral or tiny")
    add("--batch", type=_counts, default=(1, 4), metavar="N,N..", help="sequences (default 1,4)")
    add("--context", type=_counts, default=(2048, 32768), metavar="N,N..", help="tokens (default 2048,32768)")
    add("--queries", type=_count, default=1, metavar="N", help="1 is decode (default), more a chunk of prefill")
    add("--implementation", default="auto", choices=("auto", "triton", "xla"), help="of the kernel; no fallback")
    add("--seed", type=int, default=0)


def _attention(args: argparse.Namespace) -> dict[str, Any]:
    if args.queries > min(args.context):
        raise UserError(f"--queries {args.queries} is more than --context {min(args.context)}")
    from pwjax.bench.attention import bench_attention
    from pwjax.bench.calls import Ceilings
    from pwjax.bench.geometries import model_config
    from pwjax.engine.config import resolved

    config, implementation = model_config(args.geometry), resolved(args.implementation)
    ceilings = Ceilings.measure()
    rows = list(
        bench_attention(
            config,
            batches=args.batch,
            contexts=args.context,
            queries=args.queries,
            ceilings=ceilings,
            implementation=implementation,
            seed=args.seed,
        )
    )
    columns = "batch context queries microseconds gigabytes_per_second floor_share bytes_floor_us error failure"
    _show(rows, columns.split())
    implementations = {"paged_attention": implementation}
    return {"geometry": args.geometry, "implementations": implementations, "ceilings": ceilings, "rows": rows}


# prefill


def _add_prefill_options(parser: argparse.ArgumentParser) -> None:
    _add_model_options(parser)
    add = parser.add_argument
    lengths = (512, 1024, 2048, 4096, 8192)
    add("--tokens", type=_counts, default=lengths, metavar="N,N..", help="prompt lengths (default 512 to 8192)")
    add("--prefill-chunk-tokens", type=_count, default=2048, metavar="N", help="prompt tokens a step (default 2048)")
    add("--rounds", type=_count, default=5, metavar="N", help="prompts of each length (default 5)")


def _prefill(args: argparse.Namespace) -> dict[str, Any]:
    from pwjax.bench.prefill import bench_prefill
    from pwjax.bench.timing import matmul_flops_per_second

    make_llm = _llm_maker(args)
    rate = matmul_flops_per_second()
    # One token more than the longest prompt; a whole KV block, so that lengths near each other share programs.
    length = -(-(max(args.tokens) + 1) // 16) * 16
    chunk = args.prefill_chunk_tokens
    llm = make_llm(max_num_seqs=1, max_model_len=length, prefill_chunk_tokens=chunk)
    rows = list(bench_prefill(llm, args.tokens, rounds=args.rounds, matmul_rate=rate, seed=args.seed))
    _show(rows, "tokens bits first_token_ms tokens_per_second floor_ms floor_share".split())
    fields = {"prefill_chunk_tokens": chunk, "matmul_flops_per_second": rate, "rows": rows}
    return {**llm.stats(), **_model_fields(args), **fields, "cold_start_seconds": llm.built.compile_seconds}


# quantize


def _add_quantize_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--geometry", default="qwen1.5-moe", metavar="NAME", help="qwen1.5-moe (default), mixtral or tiny")
    add("--layers", type=_count, default=2, metavar="N", help="layers to quantize (default 2)")
    add("--experts", type=_count, metavar="N", help="only so many experts of each layer")
    add("--lut-rows", type=int, default=1, choices=(1, 32), help="rows that share a lookup table (default 1)")
    add("--seed", type=int, default=0)


def _quantize(args: argparse.Namespace) -> dict[str, Any]:
    from pwjax.bench.geometries import model_config
    from pwjax.bench.quantize import bench_quantize, extrapolated_seconds, routed_weights

    config = model_config(args.geometry)
    options = {name: getattr(args, name) for name in ("layers", "experts", "lut_rows", "seed")}
    rows = list(bench_quantize(config, **options))
    weights = routed_weights(config)
    seconds = extrapolated_seconds(rows, weights)
    _show(rows, "layer experts weights seconds weights_per_second".split())
    say(f"all {weights / 1e9:.1f} B weights of {args.geometry}: {seconds / 60:.1f} minutes")
    return {"geometry": args.geometry, "rows": rows, "model_weights": weights, "extrapolated_seconds": seconds}


# What all share.


def _bits(text: str) -> tuple[int | str, ...]:
    """`3,4,mixed`."""
    parts = text.split(",")
    if not set(parts) <= {"mixed", *"345678"}:
        raise argparse.ArgumentTypeError(f"{text!r}: bits are 3 to 8 or mixed, as in 3,4,mixed")
    return tuple(part if part == "mixed" else int(part) for part in parts)


def _count(text: str) -> int:
    """A whole number from 1, as the `type` of an option."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    """A finite number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _counts(text: str) -> tuple[int, ...]:
    """`1,4,16`."""
    return tuple(_count(part) for part in text.split(","))


def _show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table for people."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1e4
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


_Bench = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], dict[str, Any]]]
_BENCHES: dict[str, _Bench] = {
    "decode": ("decode steps through the serving engine", _add_decode_options, _decode),
    "moe": ("the routed experts' kernel on its own", _add_moe_options, _moe),
    "attention": ("paged attention on its own", _add_attention_options, _attention),
    "prefill": ("time to the first token through the serving engine", _add_prefill_options, _prefill),
    "quantize": ("the quantizer of prepare", _add_quantize_options, _quantize),
}
