#!/usr/bin/env python3
"""What XLA makes of a serving step for an H200, on a machine without one.

    python scripts/compile_for_h200.py [--geometry qwen1.5-moe] [--sequences 4] [--tokens 1] [--method bits:4 | bf16]

Compiles the step for an arena that holds all experts at `--method`'s bits and `--rows` sequences of `--context` tokens,
and counts what would cost time or memory unnoticed: copies of the arena, bytes of workspace, launches. Gemms are not
tuned (that takes a device), so workspace and times are not those of the device; layouts, fusions, aliasing and the
Pallas kernels are. Needs JAX's CUDA plugin (extra `cuda12` or `cuda13`). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX looks for the device that is not there
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from checkpoints.manifest import UNITS
from checkpoints.store import moe_geometry
from pallas_kernels import platform, tuned
from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.anyprec.choices import KV_BLOCK_TOKENS, choose_slot_words
from pwjax.bench.geometries import model_config
from pwjax.bench.launches import count_launches
from pwjax.cli_common import print_json_last, run_command, say
from pwjax.engine.runner import GPU_OPTIONS, StepCompiler, TableShapes
from pwjax.engine.step import StepSpec
from pwjax.engine.step_inputs import StepShape
from pwjax.errors import UserError
from pwjax.models.loading import abstract_dense

LUT_ROWS = 32
DEVICE_KIND = "NVIDIA H200"
TARGET = Path(__file__).parent / "h200_target.txtpb"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", default="qwen1.5-moe")
    add("--layers", type=int, metavar="N", help="only so many layers")
    add("--sequences", type=int, default=4, help="of the step (default 4)")
    add("--tokens", type=int, default=1, help="of each sequence: 1 decodes (default 1)")
    add("--rows", type=int, help="sequences that the arena holds (default: those of the step)")
    add("--context", type=int, default=2136, help="tokens of each (default 2136)")
    add("--method", default="bits:4", help="bits:3 to bits:8, or bf16 (default bits:4)")
    return parser.parse_args()


@contextlib.contextmanager
def as_if_on_the_device() -> Iterator[None]:
    """Kernels are chosen and lowered for an H200."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(platform, "_has_nvidia_gpu", return_value=True))
        stack.enter_context(mock.patch.object(tuned, "device_kind", return_value=DEVICE_KIND))
        if hasattr(jax.sharding, "AbstractDevice"):  # JAX 0.11 asks for one
            device = jax.sharding.AbstractDevice(device_kind=DEVICE_KIND, num_cores=132, platform="gpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def placement() -> SingleDeviceSharding:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="h200", target_config=TARGET.read_text(), topology="1x1x1"
        )
    except NotImplementedError:
        raise UserError("JAX's CUDA plugin is not installed: pip install '.[cuda12]' or '.[cuda13]'") from None
    return SingleDeviceSharding(topology.devices[0])


def step_compiler(args: argparse.Namespace, bits: int | None) -> tuple[StepCompiler, int]:
    """The compiler of the model's steps, of abstract arrays, and the slots of its arena."""
    config = model_config(args.geometry, args.layers)
    slot_words, _ = choose_slot_words(config, (LUT_ROWS, LUT_ROWS))
    moe = moe_geometry(config, dict.fromkeys(UNITS, LUT_ROWS), slot_words)
    kv = KVGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        slot_words=slot_words,
        block_size=KV_BLOCK_TOKENS,
        dtype="bfloat16",
    )
    definition, params = abstract_dense(config, jnp.bfloat16)
    rows, blocks = args.rows or args.sequences, -(-args.context // KV_BLOCK_TOKENS)
    layers, experts = config.num_moe_layers, config.num_experts
    slots = 1 + rows * blocks * kv.block_slots
    dense_experts, row_slots = None, 0
    if bits is None:
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
        dense_experts = ((of(experts, 2 * inner, hidden), of(experts, hidden, inner)),) * layers
    else:
        moe = dataclasses.replace(moe, max_bits=bits)
        slots += layers * experts * sum(unit.resident_slots(bits) for unit in (moe.gate_up, moe.down))
        row_slots = sum(unit.total_slots for unit in (moe.gate_up, moe.down))
    spec = StepSpec(config, definition, None if bits is None else moe, kv, "triton")
    tables = TableShapes((rows, blocks, kv.block_slots), (rows, layers, experts))
    return StepCompiler(spec, params, dense_experts, (layers, experts, row_slots), tables), slots


def main() -> int:
    args = parse_arguments()
    if not re.fullmatch(r"bf16|bits:[3-8]", args.method):
        raise UserError(f"--method {args.method}: use bf16 or bits:3 to bits:8")
    bits = None if args.method == "bf16" else int(args.method[-1])
    compiler, slots = step_compiler(args, bits)
    with as_if_on_the_device():
        lowered = compiler.lower(StepShape(args.sequences, args.tokens), slots, placement())
    started_s = time.monotonic()
    compiled = lowered.compile({**GPU_OPTIONS, "xla_gpu_autotune_level": "0"})
    seconds = time.monotonic() - started_s
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None, "XLA reports no memory of this program"
    words = compiler.spec.kv.slot_words
    figures: dict[str, Any] = {
        "arena_bytes": 4 * slots * words,
        "arena_copies": len(re.findall(rf"= u32\[{slots},{words}\]\S* copy", text)),
        "workspace_bytes": memory.temp_size_in_bytes,
        "not_in_place_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "launches": count_launches(text),
        "compile_seconds": seconds,
    }
    for name, value in figures.items():
        say(f"{name:20} {value}")
    print_json_last({"command": "compile_for_h200", "geometry": args.geometry, "method": args.method, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
