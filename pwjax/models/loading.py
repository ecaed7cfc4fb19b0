"""From named checkpoint tensors to the model, and the names and shapes a checkpoint must have.

A parameter's path in the module tree is its hub name (`layers/0/self_attn/o_proj/weight` is
`model.layers.0.self_attn.o_proj.weight`), so there is no table to keep: shapes come from the abstract model. The one
exception is `qkv_proj`, which is `q_proj`, `k_proj` and `v_proj` of the checkpoint joined (`_stored_parts`).
Routed experts are not dense weights. Mixtral's router is `model.layers.L.mlp.gate.weight` here as in transformers 5.

The serving step is a plain `jax.jit` over flat leaves: `load_dense` once, `merge` inside the step (about 0.1 ms of
tracing-free Python a call against 2 ms for `nnx.jit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pwjax.config import ModelConfig
from pwjax.errors import UserError
from pwjax.models.decoder import Decoder, DecoderLayer

TIED_HEAD = "lm_head.weight"

M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class ModuleDef(Generic[M]):
    """The structure of a module without its arrays: hashable, fit for a static argument of `jax.jit`.

    Attributes:
        names: name of every leaf, in order; inside a layer, relative to the layer (`self_attn.o_proj.weight`).
    """

    graphdef: nnx.GraphDef[M]
    treedef: Any
    names: tuple[str, ...]


def merge(definition: ModuleDef[M], leaves: tuple[jax.Array, ...]) -> M:
    """The module with `leaves` as its parameters, in the order of `definition.names`; cheap, also under `jax.jit`."""
    return nnx.merge(definition.graphdef, jax.tree.unflatten(definition.treedef, leaves))


def dense_weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hub name to shape of every tensor that is no routed expert.

    With tied embeddings there is no `lm_head.weight` here, though a checkpoint may hold one.
    """
    _, shapes = _decoder_def(config, jnp.float32)
    parts = (_stored_parts(config, name, leaf.shape) for name, leaf in shapes.items())
    return {name: shape for stored in parts for name, shape in stored.items()}


def load_dense(
    config: ModelConfig, dense: Iterable[tuple[str, Any]], dtype: DTypeLike
) -> tuple[ModuleDef[Decoder], tuple[jax.Array, ...]]:
    """The decoder of `config` with the weights of `dense`.

    Args:
        dense: hub names and arrays, as `dense_weight_shapes` lists them, one at a time and in any order;
            `lm_head.weight` is ignored when tied.
        dtype: of weights and activations. Arrays that have it already and are on the device are not copied, but those
            that are joined, and of these none is kept.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape; the message names it.
    """
    definition, shapes = _decoder_def(config, dtype)
    given = (item for item in dense if not (config.tie_word_embeddings and item[0] == TIED_HEAD))
    return definition, _checked_leaves(config, shapes, given, dtype, where="the checkpoint")


def abstract_dense(
    config: ModelConfig, dtype: DTypeLike
) -> tuple[ModuleDef[Decoder], tuple[jax.ShapeDtypeStruct, ...]]:
    """As `load_dense`, without weights: what a step is lowered with."""
    definition, shapes = _decoder_def(config, dtype)
    return definition, tuple(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)) for leaf in shapes.values())


def load_layer(
    config: ModelConfig, layer: int, dense: Mapping[str, Any], dtype: DTypeLike
) -> tuple[ModuleDef[DecoderLayer], tuple[jax.Array, ...]]:
    """One layer alone; names in `dense` that belong to other layers or to none are ignored.

    Raises:
        UserError: as `load_dense`.
    """
    definition, shapes = _layer_def(config, layer, dtype)
    prefix = f"model.layers.{layer}."
    given = (item for item in dense.items() if item[0].startswith(prefix))
    wanted = {prefix + name: shape for name, shape in shapes.items()}
    return definition, _checked_leaves(config, wanted, given, dtype, where=f"layer {layer} of the checkpoint")


def _decoder_def(config: ModelConfig, dtype: DTypeLike) -> tuple[ModuleDef[Decoder], dict[str, jax.ShapeDtypeStruct]]:
    return _module_def(lambda: Decoder(config, dtype), lambda path: path if path == TIED_HEAD else f"model.{path}")


def _layer_def(
    config: ModelConfig, layer: int, dtype: DTypeLike
) -> tuple[ModuleDef[DecoderLayer], dict[str, jax.ShapeDtypeStruct]]:
    is_moe, window = config.moe_layers[layer], config.windows[layer]
    return _module_def(lambda: DecoderLayer(config, dtype, is_moe=is_moe, window=window), lambda path: path)


def _module_def(
    build: Callable[[], M], hub_name: Callable[[str], str]
) -> tuple[ModuleDef[M], dict[str, jax.ShapeDtypeStruct]]:
    """Definition and, by name in leaf order, abstract arrays of what `build` returns."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    shapes = {hub_name(".".join(_path_parts(path))): leaf for path, leaf in flat}
    return ModuleDef(graphdef, treedef, tuple(shapes)), shapes


def _path_parts(path: tuple[Any, ...]) -> list[str]:
    """Module attributes and list indices of a key path; the last key of a variable, its value, has neither."""
    return [str(key.key) for key in path if hasattr(key, "key")]


def _stored_parts(config: ModelConfig, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Name to shape of the checkpoint's tensors whose rows, one after the other, are those of the leaf `name`."""
    if ".qkv_proj." not in name:
        return {name: shape}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    return {name.replace("qkv_proj", part): (count * config.head_dim, *shape[1:]) for part, count in heads.items()}


def _checked_leaves(
    config: ModelConfig,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    given: Iterable[tuple[str, Any]],
    dtype: DTypeLike,
    *,
    where: str,
) -> tuple[jax.Array, ...]:
    """A leaf of every name in `shapes`, made as soon as all its parts are there."""
    parts = {leaf: _stored_parts(config, leaf, wanted.shape) for leaf, wanted in shapes.items()}
    leaf_of = {name: leaf for leaf, stored in parts.items() for name in stored}
    arrived: dict[str, jax.Array] = {}
    leaves: dict[str, jax.Array] = {}
    unexpected = []
    for name, array in given:
        if name not in leaf_of:
            unexpected.append(name)
            continue
        stored = parts[leaf_of[name]]
        if tuple(array.shape) != stored[name]:
            raise UserError(
                f"tensor {name!r} has shape {list(array.shape)}; config.json calls for {list(stored[name])}"
            )
        arrived[name] = jnp.asarray(array, dtype)
        if stored.keys() <= arrived.keys():
            leaves[leaf_of[name]] = _joined([arrived.pop(part) for part in stored])
    missing = [name for name, leaf in leaf_of.items() if leaf not in leaves and name not in arrived]
    if missing:
        raise UserError(f"{where} has no tensor {missing[0]!r}{_and_more(missing)}; it does not match its config.json")
    if unexpected:
        raise UserError(
            f"{where} has a tensor {unexpected[0]!r}{_and_more(unexpected)} that this model does not have; "
            "check model_type and the layer fields of config.json"
        )
    return tuple(leaves[leaf] for leaf in shapes)


def _joined(parts: list[jax.Array]) -> jax.Array:
    """Their rows one after the other; a lone part is not copied."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
