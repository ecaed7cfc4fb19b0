#!/usr/bin/env python3
"""Every speed figure of the documentation in one run, on one GPU.

    python scripts/bench_h200.py docs/results/h200 [--parts decode,moe,..] [--time-limit 900] [--resume]

Runs `pwjax bench` and scripts/bench_peers.py, each in a process of its own and the most important first, and writes
`decode.json`, `moe.json`, `attention.json`, `prefill.json`, `table3.json` and `quantize.json` anew after each, so that
one failure, or the end of the time, loses nothing else. What each process printed is kept in `OUT_DIR/raw`; `--resume`
takes from there what an earlier run has done. `--tiny` shows on any machine that it all runs.

A file has `rows` of figures. A row with a `peer` compares: `ratio` above 1 means that pwjax is faster; `must` is the
ratio (or, without a peer, the share of the floor) that was to be reached. The kernel figures of Any-Precision are those
that were recorded for its CUDA kernel on an H200; all other peers are measured in the same run.
The last line of stdout is one JSON object: all comparisons, and what failed; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pwjax.cli_common import print_json_last, run_command, say
from pwjax.errors import UserError

ROOT = Path(__file__).parents[1]
PARTS = ("decode", "moe", "prefill", "attention", "table3", "quantize")
WIDTHS = (3, 4, 5, 6)
TABLE3_BATCHES = (1, 4)
LEAST_JOB_SECONDS = 20.0  # less time than this is not worth starting a process for

Row = dict[str, Any]
Results = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of everything that is run."""

    geometry: str
    batches: tuple[int, ...]
    context: int
    steps: int
    prompts: tuple[int, ...]
    matrices: tuple[tuple[int, int, str], ...]  # rows, columns, bits
    layer_tokens: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]  # (batch, context)
    experts: int | None
    peer: tuple[str, ...] = ()
    mixtral_layers: int | None = None


FULL = Scale(
    geometry="qwen1.5-moe",
    batches=(1, 4, 16, 64),
    context=2048,
    steps=64,
    prompts=(512, 2048, 4096, 8192),
    matrices=((28672, 4096, "3,4,6,8"), (11264, 2048, "3,4")),
    layer_tokens=(1, 4, 16, 64, 512, 4096),
    attention=((1, 2048), (4, 2048), (64, 2048), (1, 32768)),
    experts=None,
    mixtral_layers=32,
)
TINY = Scale(
    geometry="tiny",
    batches=(1, 4),
    context=64,
    steps=4,
    prompts=(16, 48),
    matrices=((96, 64, "3,4"),),
    layer_tokens=(1, 4),
    attention=((1, 64), (2, 96)),
    experts=2,
    peer=("--device", "cpu", "--geometry", "tiny", "--context", "64", "--tokens", "16,48"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One process. `name` is that of its file in `raw`; `parts` are the files that its figures go into."""

    name: str
    parts: tuple[str, ...]
    command: tuple[str, ...]


def jobs(scale: Scale, peer_python: str) -> Iterator[Job]:
    """All of them, the most important first."""
    peers = (peer_python, str(ROOT / "scripts/bench_peers.py"), *scale.peer)
    yield Job("peers", ("decode", "prefill"), (*peers, "--parts", "decode,prefill" if scale is FULL else "prefill"))
    yield _decode("decode-uniform-4", ("decode",), scale, "uniform:4", scale.batches)
    yield _decode("decode-bf16", ("decode", "table3"), scale, "bf16", scale.batches)
    for number, (rows, cols, bits) in enumerate(scale.matrices):
        matrix = ("--rows", str(rows), "--cols", str(cols), "--bits", bits, "--tokens", "1,4,8")
        yield Job(f"moe-matrix-{number}", ("moe",), _pwjax("moe", *matrix))
    for kind in ("uniform", "random"):
        yield _table3(kind, 4, scale, ("decode", "table3"))
    prompts = ("--tokens", _listed(scale.prompts), "--geometry", scale.geometry)
    yield Job("prefill", ("prefill",), _pwjax("prefill", *prompts))
    layer = ("--geometry", scale.geometry, "--bits", "4,mixed", "--tokens", _listed(scale.layer_tokens))
    layer += ("--lut-rows", "32")  # as the models have
    yield Job("moe-layer", ("moe",), _pwjax("moe", *layer))
    for number, (batch, context) in enumerate(scale.attention):
        where = ("--geometry", scale.geometry, "--batch", str(batch), "--context", str(context))
        yield Job(f"attention-{number}", ("attention",), _pwjax("attention", *where))
    experts = () if scale.experts is None else ("--experts", str(scale.experts))
    yield Job("quantize", ("quantize",), _pwjax("quantize", "--geometry", scale.geometry, *experts))
    for width in WIDTHS:
        for kind in ("uniform", "random") if width != 4 else ():
            yield _table3(kind, width, scale, ("table3",))
    if scale.mixtral_layers:
        mixtral = ("--geometry", "mixtral", "--layers", str(scale.mixtral_layers), "--batch", "1,4")
        yield Job("decode-mixtral", ("decode",), _pwjax("decode", *mixtral, "--method", "uniform:4"))
    yield Job("peers-eager", ("decode",), (*peers, "--parts", "eager"))


def _table3(kind: str, width: int, scale: Scale, parts: tuple[str, ...]) -> Job:
    """Table 3's methods all serve up to 8 bits: they differ in their pages only, and share compiled programs."""
    return _decode(f"table3-{kind}-{width}", parts, scale, f"{kind}:{width}", TABLE3_BATCHES, "--max-bits", "8")


def _decode(name: str, parts: tuple[str, ...], scale: Scale, method: str, batches: Iterable[int], *options: str) -> Job:
    how = ("--batch", _listed(batches), "--context", str(scale.context), "--steps", str(scale.steps))
    return Job(name, parts, _pwjax("decode", "--geometry", scale.geometry, "--method", method, *how, *options))


def _pwjax(bench: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pwjax.cli", "bench", bench, *options)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


# Files, from what the jobs printed.


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a figure is compared with."""

    name: str
    figure: float
    must: float | None = None

    def compare(self, row: Row, name: str) -> Row:
        """The row of a comparison by its figure `name`; of times the shorter is the better, of rates the higher."""
        ours = row[name]
        ratio = self.figure / ours if name in ("microseconds", "first_token_ms") else ours / self.figure
        kept = ("batch", "context", "tokens", "method", "bits", "n", "k", "lut_rows", "floor_share", name)
        fields = {key: row[key] for key in kept if key in row}
        return {**fields, "peer": self.name, "peer_figure": self.figure, "ratio": ratio, "must": self.must}


PEER_DECODE = "transformers bf16, compiled, grouped_mm"
PEER_PREFILL = "transformers bf16, grouped_mm"
OWN_BF16 = "pwjax bf16"
OWN_UNIFORM = "pwjax uniform:4, compiled for up to 8 bits too"
ANY_PRECISION = "Any-Precision CUDA kernel (recorded)"
MUST_DECODE = {1: 1.8, 4: 1.6}
MUST_OWN_BF16 = {1: 1.15, 4: 1.25, 16: 1.2, 64: 1.1}
MUST_MIXED = {1: 0.97, 4: 0.97}
MUST_PREFILL = {4096: 1.0}
MUST_FIRST_TOKEN = {2048: 1.0}
MUST_ATTENTION = {(1, 32768): 0.6}
# Microseconds by (n, k, bits, tokens), with what the ratio must be.
ANY_PRECISION_US = {
    (28672, 4096, 3, 1): (29.9, 1.0),
    (28672, 4096, 4, 1): (39.3, 1.0),
    (28672, 4096, 4, 4): (55.1, None),
    (28672, 4096, 4, 8): (103.4, 2.0),
    (28672, 4096, 6, 1): (51.0, None),
    (28672, 4096, 8, 1): (57.8, None),
    (28672, 4096, 6, 8): (79.4, None),
    (28672, 4096, 8, 8): (89.9, None),
    (11264, 2048, 3, 1): (7.9, None),
    (11264, 2048, 4, 1): (9.6, 1.0),
}
PREPARE_MUST_MINUTES = 20.0


def rows_of(results: Results, *names: str) -> list[Row]:
    """Rows of these jobs, as far as they have run."""
    return [row for name in names for row in results.get(name, {}).get("rows", ())]


def decode_file(results: Results) -> list[Row]:
    peers = rows_of(results, "peers", "peers-eager")
    compiled = {row["batch"]: row for row in peers if row["what"] == "decode" and row["compiled"]}
    own = {row["batch"]: row for row in rows_of(results, "decode-bf16")}
    uniform = {row["batch"]: row for row in rows_of(results, "decode-uniform-4")}
    wider = {row["batch"]: row for row in rows_of(results, "table3-uniform-4")}
    mixed = {row["batch"]: row for row in rows_of(results, "table3-random-4")}
    rows = [{**row, "max_bits": 4} for row in uniform.values()] + [*own.values()]
    rows += [{**row, "max_bits": 8} for row in (*wider.values(), *mixed.values())]
    rows += [{"geometry": "mixtral", **row} for row in rows_of(results, "decode-mixtral")]
    rows += [{"peer": results["peers"]["peer"], **row} for row in peers if row["what"] == "decode"]
    sources = (
        (uniform, compiled, PEER_DECODE, MUST_DECODE),
        (uniform, own, OWN_BF16, MUST_OWN_BF16),
        (mixed, wider, OWN_UNIFORM, MUST_MIXED),
        (own, compiled, PEER_DECODE, {}),
    )
    return rows + [
        Peer(name, peer[batch]["tokens_per_second"], must.get(batch)).compare(row, "tokens_per_second")
        for ours, peer, name, must in sources
        for batch, row in ours.items()
        if batch in peer
    ]


def moe_file(results: Results) -> list[Row]:
    names = [name for name in results if name.startswith("moe-")]
    rows = rows_of(results, *names)
    compared = []
    for row in rows:
        recorded = ANY_PRECISION_US.get((row.get("n", 0), row.get("k", 0), row["bits"], row["tokens"]))
        if recorded and row["microseconds"] is not None:
            compared.append(Peer(ANY_PRECISION, *recorded).compare(row, "microseconds"))
    return rows + compared


def prefill_file(results: Results) -> list[Row]:
    rows = rows_of(results, "prefill")
    peers = {row["tokens"]: row for row in rows_of(results, "peers") if row["what"] == "prefill"}
    compared = []
    for row in rows:
        tokens = row["tokens"]
        if tokens in peers:
            peer = Peer(PEER_PREFILL, peers[tokens]["tokens_per_second"], MUST_PREFILL.get(tokens))
            compared.append(peer.compare(row, "tokens_per_second"))
            peer = Peer(PEER_PREFILL, peers[tokens]["milliseconds"], MUST_FIRST_TOKEN.get(tokens))
            compared.append(peer.compare(row, "first_token_ms"))
    return rows + [{"peer": results["peers"]["peer"], **row} for row in peers.values()] + compared


def attention_file(results: Results) -> list[Row]:
    rows = rows_of(results, *(name for name in results if name.startswith("attention-")))
    return [{**row, "must": MUST_ATTENTION.get((row["batch"], row["context"]))} for row in rows]


def table3_file(results: Results) -> list[Row]:
    """Memory and speed by width, uniform and mixed, as Table 3 of the paper has them."""
    names = ["decode-bf16", *(f"table3-{kind}-{width}" for width in WIDTHS for kind in ("uniform", "random"))]
    kept = (
        "method bits batch context memory_bytes tokens_per_second step_ms device_step_ms floor_share launches"
    ).split()
    return [
        {key: row[key] for key in kept}
        for name in names
        for row in sorted(rows_of(results, name), key=lambda row: row["batch"])
        if row["batch"] in TABLE3_BATCHES
    ]


def quantize_file(results: Results) -> list[Row]:
    rows = rows_of(results, "quantize")
    if rows:
        seconds = results["quantize"]["extrapolated_seconds"]
        weights = results["quantize"]["model_weights"]
        minutes = {"minutes": seconds / 60, "must_minutes": PREPARE_MUST_MINUTES}
        rows.append({"what": "extrapolated to all weights", "weights": weights, "seconds": seconds, **minutes})
    return rows


FILES = {
    "decode": decode_file,
    "moe": moe_file,
    "prefill": prefill_file,
    "attention": attention_file,
    "table3": table3_file,
    "quantize": quantize_file,
}


# The run.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT_DIR")
    add("--parts", type=lambda text: text.split(","), default=list(PARTS), help=", ".join(PARTS))
    add("--time-limit", type=float, metavar="SECONDS", help="start nothing after, and end what runs then")
    add("--resume", action="store_true", help="don't run again what OUT_DIR/raw has")
    add("--peer-python", default=sys.executable, metavar="PROGRAM", help="Python that has torch and transformers")
    add("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            raise UserError(f"--parts {part}: unknown; use {', '.join(PARTS)}")
    return args


def run_job(job: Job, seconds: float | None) -> dict[str, Any]:
    """The JSON that a job printed, or `{"failure": ..}`."""
    started_s = time.monotonic()
    try:
        done = subprocess.run(job.command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failure": f"ended after {seconds:.0f} s, out of time"}
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failure": f"exit status {done.returncode}, no JSON"}
    if done.returncode:
        return {"failure": f"exit status {done.returncode}"}
    return {**result, "process_seconds": time.monotonic() - started_s, "job_command": shlex.join(_named(job.command))}


def _named(command: Iterable[str]) -> list[str]:
    """The command as one would type it in a checkout."""
    shown = [part.removeprefix(f"{ROOT}/") for part in command]
    return ["python", *shown[1:]]


def write_files(out: Path, parts: Iterable[str], results: Results, all_jobs: Iterable[Job], command: str) -> None:
    """Every file whose jobs have something to tell."""
    by_name = {job.name: job for job in all_jobs}
    for part in parts:
        mine = {name: result for name, result in results.items() if part in by_name[name].parts}
        if not mine:
            continue
        runs = [
            {key: result.get(key) for key in ("job_command", "process_seconds", "device", "versions")}
            | {key: result[key] for key in _RUN_FIELDS if key in result}
            for result in mine.values()
        ]
        content = {
            "command": command,
            "device": next((run["device"] for run in runs), None),
            "versions": _versions(runs),
            "runs": runs,
            "rows": FILES[part](results),
        }
        (out / f"{part}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_RUN_FIELDS = (
    "cold_start_seconds load_seconds step_shapes compilation_cache_hits compilation_cache_misses copy_bytes_per_second "
    "matmul_flops_per_second ceilings reserved_bytes measured_bytes_peak memory_measured_over_accounted "
    "implementations prefill_chunk_tokens"
).split()


def _versions(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of pwjax's processes and of the peers'."""
    versions: dict[str, Any] = {}
    for run in runs:
        versions.update(run["versions"] or {})
    return versions


def comparisons(out: Path, parts: Iterable[str]) -> list[Row]:
    """Rows that compare, or that have something to reach."""
    rows = []
    for part in parts:
        file = out / f"{part}.json"
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else ():
            if "ratio" in row or row.get("must") is not None or "must_minutes" in row:
                rows.append({"part": part, **row})
    return rows


def show(rows: Iterable[Row]) -> None:
    for row in rows:
        what = " ".join(f"{key}={row[key]}" for key in ("method", "batch", "context", "tokens", "n", "k") if key in row)
        bits = f" bits={row['bits']:.3g}" if isinstance(row.get("bits"), int | float) else ""
        if "ratio" in row:
            reached, against = row["ratio"], f"against {row['peer']} ({row['peer_figure']:.4g})"
        elif "must_minutes" in row:
            reached, against = row["minutes"], f"minutes, at most {row['must_minutes']:g}"
        else:
            reached, against = row["floor_share"], "of the floor"
        must = "" if row.get("must") is None else f"  must {row['must']:g}"
        shown = "failed" if reached is None else f"{reached:6.2f}"
        say(f"{row['part']:10} {shown}  {what}{bits}  {against}{must}")


def main() -> int:
    args = parse_arguments()
    scale = TINY if args.tiny else FULL
    raw = args.out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    all_jobs = list(jobs(scale, args.peer_python))
    command = shlex.join(["python", "scripts/bench_h200.py", *sys.argv[1:]])
    started_s = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for job in all_jobs:
        file = raw / f"{job.name}.json"
        if args.resume and file.is_file():
            results[job.name] = json.loads(file.read_text(encoding="utf-8"))
            continue
        if not set(job.parts) & set(args.parts):
            continue
        left = None if args.time_limit is None else args.time_limit - (time.monotonic() - started_s)
        if left is not None and left < LEAST_JOB_SECONDS:
            failures[job.name] = "not started, out of time"
            continue
        say(f"-- {job.name}: {shlex.join(_named(job.command))}")
        result = run_job(job, left)
        if "failure" in result:
            failures[job.name] = result["failure"]
            say(f"-- {job.name}: {result['failure']}")
            continue
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")
        results[job.name] = result
        write_files(args.out, args.parts, results, all_jobs, command)
    write_files(args.out, args.parts, results, all_jobs, command)
    compared = comparisons(args.out, args.parts)
    show(compared)
    seconds = time.monotonic() - started_s
    print_json_last({"command": "bench_h200", "comparisons": compared, "failures": failures, "seconds": seconds})
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(run_command(main))
