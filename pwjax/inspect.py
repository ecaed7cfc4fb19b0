"""`pwjax inspect OUT`: a prepared model in numbers and in words, from the manifest and the tables alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.manifest import UNITS
from checkpoints.store import PreparedModel
from pallas_kernels.bitplane_moe.layout import BITS, MIN_BITS
from pwjax.cli_common import format_bytes
from pwjax.config import ModelConfig
from pwjax.planner.policy import Policy, default_policy

BF16_BYTES = 2


def inspect_store(out: Path) -> dict[str, Any]:
    """Figures of a store.

    Returns:
        JSON types: `model`, `bytes_by_bits` (slots of pages 3..b of all linear-blocks), `lut_bytes_by_bits`,
        `bits_per_weight`, `mean_sensitivity` (by bits, `[layer][unit]`), `tokens_per_expert`, `kappa`,
        `experts_without_data`, `slot_bytes`, `slot_waste`, `lut_rows`, `max_bits`, `policy`, and what `prepare` noted.

    Raises:
        UserError: not a finished store, or a damaged one.
    """
    model = PreparedModel(out)
    manifest, config = model.manifest, model.config
    tables = model.tables()
    weights = config.num_linear_blocks // 2 * sum(n * k for n, k in map(config.unit_shape, (0, 1)))
    sizes = _sizes(model)
    stored = manifest.policy
    policy = Policy.from_dict(stored) if stored else default_policy()
    return {
        "device": None,
        "method": None,
        "implementations": {},
        "memory_budget_bytes": None,
        "out": str(out),
        "format_version": manifest.format_version,
        "model": manifest.model,
        "expert_weights": weights,
        "bf16_expert_bytes": BF16_BYTES * weights,
        "bf16_experts_kept": manifest.source,
        "dense_bytes": _dense_bytes(config),
        **sizes,
        "bits_per_weight": {bits: 8 * size / weights for bits, size in sizes["bytes_by_bits"].items()},
        "lut_rows": manifest.lut_rows,
        "slot_bytes": 4 * manifest.slot_words,
        "slot_waste": manifest.quantization.get("slot_waste"),
        "max_bits": manifest.max_bits,
        "page_bits": manifest.page_bits,
        "relative_error_by_bits": manifest.quantization.get("relative_error_by_bits"),
        "mean_sensitivity": {
            str(bits): tables["sensitivity"][..., bits - MIN_BITS].mean(axis=1).tolist() for bits in model.bits
        },
        "tokens_per_expert": tables["tokens_per_expert"].tolist(),
        "kappa": tables["kappa"].tolist(),
        "kappa_clipped": manifest.kappa.get("clipped", []),
        "experts_without_data": manifest.calibration.get("experts_without_data"),
        "calibration": manifest.calibration,
        "policy": policy.to_dict(),
        "policy_is_default": not stored,
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as lines for people."""
    model, calibration = figures["model"], figures["calibration"]
    lines = [
        f"{figures['out']}: {model['family']}, {model['num_layers']} layers, {model['num_experts']} experts "
        f"(top {model['num_experts_per_tok']}), hidden {model['hidden_size']}",
        f"routed experts: {figures['expert_weights']:,} weights, {format_bytes(figures['bf16_expert_bytes'])} in bf16"
        + ("" if figures["bf16_experts_kept"] else " (not kept)")
        + f"; dense weights {format_bytes(figures['dense_bytes'])}",
        "bits      all pages   bits a weight   tables   relative squared error   loss",
    ]
    errors = figures["relative_error_by_bits"] or {}
    losses = calibration.get("uniform_nats_per_token", {})
    for bits, size in figures["bytes_by_bits"].items():
        lines.append(
            f"{bits:>4}  {format_bytes(size):>13}   {figures['bits_per_weight'][bits]:13.2f}"
            f"   {figures['lut_bytes_by_bits'][bits] / size:6.1%}   {errors.get(bits, float('nan')):22.2g}"
            f"   {losses.get(bits, float('nan')):.4f}"
        )
    waste = figures["slot_waste"]
    lines += [
        f"bf16 loss {calibration.get('base_nats_per_token', float('nan')):.4f} nats a token over "
        f"{calibration.get('loss_tokens', 0)} tokens; served with at most {figures['max_bits']} bits by default",
        f"slots of {format_bytes(figures['slot_bytes'])}"
        + ("" if waste is None else f", at most {waste:.2%} padding")
        + "; rows that share a table: "
        + ", ".join(f"{rows} in {unit}" for unit, rows in figures["lut_rows"].items()),
        *_sensitivity_lines(figures),
        f"experts without calibration data: {figures['experts_without_data']}; "
        f"with too little: {len(calibration.get('experts_averaged', []))}",
        "planner policy: " + ("default" if figures["policy_is_default"] else "stored")
        + f", {len(figures['policy']['bucket_shares'])} buckets, multipliers "
        + ", ".join(f"{value:g}" for value in figures["policy"]["multipliers"]),
    ]  # fmt: skip
    return "\n".join(lines)


def _sensitivity_lines(figures: dict[str, Any]) -> list[str]:
    table, kappa = np.array(figures["mean_sensitivity"][str(MIN_BITS)]), np.array(figures["kappa"])
    tokens = np.array(figures["tokens_per_expert"], np.float64)
    lines = [f"layer   mean sensitivity at {MIN_BITS} bits, nats (kappa)    busiest expert's share of the mean"]
    for layer, row in enumerate(table):
        units = "   ".join(
            f"{unit} {value:.2e} ({kappa[layer, index]:.1e})"
            for index, (unit, value) in enumerate(zip(UNITS, row, strict=True))
        )
        lines.append(f"{layer:>5}   {units}   {tokens[layer].max() / max(tokens[layer].mean(), 1e-9):.1f}")
    return lines


def _sizes(model: PreparedModel) -> dict[str, Any]:
    """Bytes of slots, and of the tables in them, of pages 3..b of all linear-blocks."""
    geometry, config = model.geometry(), model.config
    each = config.num_moe_layers * config.num_experts
    slot_bytes = 4 * model.manifest.slot_words
    size, lut = {}, {}
    for bits in model.bits:
        layouts = (geometry.gate_up, geometry.down)
        size[str(bits)] = each * slot_bytes * sum(layout.resident_slots(bits) for layout in layouts)
        lut[str(bits)] = each * 4 * sum(layout.lut_words(b) for layout in layouts for b in BITS if b <= bits)
    return {"bytes_by_bits": size, "lut_bytes_by_bits": lut}


def _dense_bytes(config: ModelConfig) -> int:
    from pwjax.models import dense_weight_shapes

    return BF16_BYTES * sum(int(np.prod(shape)) for shape in dense_weight_shapes(config).values())
