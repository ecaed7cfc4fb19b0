"""Which tensors a Hugging Face MoE folder must hold, under which of their names, and what fits nothing.

Routed experts come in two layouts, detected layer by layer: one tensor per expert and projection (hub files), or one
fused tensor per layer and unit (transformers 5: `experts.gate_up_proj [E, 2I, H]`, gate rows first, and
`experts.down_proj [E, H, I]`). Sources: transformers `conversion_mapping.py`, `models/{qwen2_moe,mixtral}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from checkpoints.safetensors_files import DTYPES, Tensor
from pwjax.config import ModelConfig
from pwjax.errors import UserError

Shape = tuple[int, ...]

IGNORABLE = (
    # Rotary frequencies: old exporters saved the buffer; it follows from the configuration.
    re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq"),
)
"""Names that may be in a file and are knowingly not read. Everything else unexpected is an error."""

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")  # gate, up, down: numeric order is not role order
_MODULES: Mapping[str, tuple[tuple[str, tuple[str, str, str]], ...]] = {
    "qwen2_moe": (("mlp", _PROJECTIONS),),
    "mixtral": (("block_sparse_moe", _MIXTRAL), ("mlp", _MIXTRAL), ("mlp", _PROJECTIONS)),
}
"""By family, the `(module, (gate, up, down))` names under which experts are found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The tensors of one MoE layer's experts.

    Attributes:
        kind: "fused": `names` is (gate_up, down); "per_expert": (gate, up, down) of expert 0, then of expert 1, ...
        shapes: shape of each of `names`.
    """

    kind: Literal["fused", "per_expert"]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a folder holds, all checked.

    Attributes:
        dense: file's name of every dense weight, by canonical name, in canonical order.
        dense_shapes: by canonical name; the file may differ for `shared_expert_gate` (`[H]` for `[1, H]`).
        experts: by MoE layer.
        redundant: names that are there and not needed (`IGNORABLE`, and `lm_head.weight` of a tied model).
    """

    dense: dict[str, str]
    dense_shapes: dict[str, Shape]
    experts: tuple[ExpertLayout, ...]
    redundant: tuple[str, ...]


def match(config: ModelConfig, dense_shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], where: str) -> Layout:
    """Finds every expected tensor of a folder, and checks that nothing is left over.

    Args:
        dense_shapes: canonical name to shape of everything but routed experts.
        tensors: all tensors of the folder by name.
        where: the folder, for messages.

    Raises:
        UserError: tensors missing (all counted, some named), unexpected, or of a wrong shape or type.
    """
    dense = {name: _present(_dense_names(name), tensors) or name for name in dense_shapes}
    experts = tuple(_detect(config, layer, tensors, where) for layer in config.moe_layer_indices)
    expected = {file_name: dense_shapes[name] for name, file_name in dense.items()}
    for layout in experts:
        expected.update(zip(layout.names, layout.shapes, strict=True))
    _check_missing(config, expected, tensors, where)
    redundant = [name for name in tensors if any(pattern.fullmatch(name) for pattern in IGNORABLE)]
    if config.tie_word_embeddings and "lm_head.weight" in tensors and "lm_head.weight" not in expected:
        expected["lm_head.weight"] = dense_shapes["model.embed_tokens.weight"]
        redundant.append("lm_head.weight")
    _check_unexpected(set(tensors) - set(expected) - set(redundant), tensors, where)
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    return Layout(dense=dense, dense_shapes=dict(dense_shapes), experts=experts, redundant=tuple(redundant))


def _dense_names(canonical: str) -> tuple[str, ...]:
    """Names under which a dense weight may be stored. Mixtral's router moved from `block_sparse_moe` to `mlp`."""
    if canonical.endswith(".mlp.gate.weight"):
        return canonical, canonical.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return (canonical,)


def _present(names: Iterable[str], tensors: Mapping[str, Tensor]) -> str | None:
    return next((name for name in names if name in tensors), None)


def _detect(config: ModelConfig, layer: int, tensors: Mapping[str, Tensor], where: str) -> ExpertLayout:
    """The layout of which this layer holds the largest part, so that missing tensors are named as it has them."""
    candidates = _candidates(config, layer)
    scored = [(sum(name in tensors for name in candidate.names), candidate) for candidate in candidates]
    kinds = {candidate.kind for count, candidate in scored if count}
    if len(kinds) > 1:
        raise UserError(f"{where}: layer {layer} has experts in both layouts, fused and per expert; keep one of them")
    return max(scored, key=lambda item: item[0] / len(item[1].names))[1]


def _candidates(config: ModelConfig, layer: int) -> list[ExpertLayout]:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    found: dict[tuple[str, ...], ExpertLayout] = {}
    for module, projections in _MODULES[config.family]:
        prefix = f"model.layers.{layer}.{module}.experts"
        names = tuple(f"{prefix}.{expert}.{p}.weight" for expert in range(experts) for p in projections)
        shapes: tuple[Shape, ...] = ((inner, hidden), (inner, hidden), (hidden, inner)) * experts
        found[names] = ExpertLayout(kind="per_expert", names=names, shapes=shapes)
        names = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
        shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
        found[names] = ExpertLayout(kind="fused", names=names, shapes=shapes)
    return list(found.values())


def _check_missing(config: ModelConfig, expected: Iterable[str], tensors: Mapping[str, Tensor], where: str) -> None:
    missing = [name for name in expected if name not in tensors]
    if not missing:
        return
    hint = ""
    if missing == ["lm_head.weight"]:
        hint = "; if the head is tied, config.json must say tie_word_embeddings: true"
    elif not any(name.startswith("model.") for name in tensors) and "embed_tokens.weight" in tensors:
        hint = "; names lack 'model.': save the causal-LM model, not its base model"
    raise UserError(
        f"{where}: {len(missing)} tensor{'s are' if len(missing) > 1 else ' is'} missing ({_some(missing)}) that "
        f"config.json ({config.family}) asks for{hint}"
    )


def _check_unexpected(unexpected: Iterable[str], tensors: Mapping[str, Tensor], where: str) -> None:
    names = sorted(unexpected)
    if names:
        raise UserError(
            f"{where}: {len(names)} unexpected tensor{'s' if len(names) > 1 else ''} ({_some(names)}; "
            f"first in {tensors[names[0]].file.name}) that config.json does not account for"
        )


def _check_tensor(tensor: Tensor, shape: Shape) -> None:
    accepted = {shape}
    if tensor.name.endswith(".shared_expert_gate.weight"):
        accepted.add(shape[1:])  # some exporters dropped the leading 1
    if tensor.shape not in accepted:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
        )
    if tensor.dtype not in DTYPES:
        _ = tensor.numpy_dtype  # raises, with the message


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", .." if len(names) > count else "")
