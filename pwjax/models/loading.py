"""From named checkpoint tensors to the model, and the names and shapes a checkpoint must have.

A parameter's path in the module tree is its hub name (`layers/0/self_attn/q_proj/weight` is
`model.layers.0.self_attn.q_proj.weight`), so there is no table to keep: shapes come from the abstract model.
Routed experts are not dense weights. Mixtral's router is `model.layers.L.mlp.gate.weight` here as in transformers 5.

The serving step is a plain `jax.jit` over flat leaves: `load_dense` once, `merge` inside the step (about 0.1 ms of
tracing-free Python a call against 2 ms for `nnx.jit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
        names: hub name of every leaf, in order; inside a layer, relative to the layer (`self_attn.q_proj.weight`).
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
    return {name: shape.shape for name, shape in shapes.items()}


def load_dense(
    config: ModelConfig, dense: Mapping[str, Any], dtype: DTypeLike
) -> tuple[ModuleDef[Decoder], tuple[jax.Array, ...]]:
    """The decoder of `config` with the weights of `dense`.

    Args:
        dense: hub name to array, as `dense_weight_shapes` lists them; `lm_head.weight` is ignored when tied.
        dtype: of weights and activations. Arrays that have it already and are on the device are not copied.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape; the message names it.
    """
    definition, shapes = _decoder_def(config, dtype)
    given = {name: array for name, array in dense.items() if not (config.tie_word_embeddings and name == TIED_HEAD)}
    return definition, _checked_leaves(shapes, given, dtype, where="the checkpoint")


def load_layer(
    config: ModelConfig, layer: int, dense: Mapping[str, Any], dtype: DTypeLike
) -> tuple[ModuleDef[DecoderLayer], tuple[jax.Array, ...]]:
    """One layer alone; names in `dense` that belong to other layers or to none are ignored.

    Raises:
        UserError: as `load_dense`.
    """
    definition, shapes = _layer_def(config, layer, dtype)
    prefix = f"model.layers.{layer}."
    given = {name: array for name, array in dense.items() if name.startswith(prefix)}
    wanted = {prefix + name: shape for name, shape in shapes.items()}
    return definition, _checked_leaves(wanted, given, dtype, where=f"layer {layer} of the checkpoint")


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


def _checked_leaves(
    shapes: Mapping[str, jax.ShapeDtypeStruct], given: Mapping[str, Any], dtype: DTypeLike, *, where: str
) -> tuple[jax.Array, ...]:
    missing = [name for name in shapes if name not in given]
    if missing:
        raise UserError(f"{where} has no tensor {missing[0]!r}{_and_more(missing)}; it does not match its config.json")
    unexpected = [name for name in given if name not in shapes]
    if unexpected:
        raise UserError(
            f"{where} has a tensor {unexpected[0]!r}{_and_more(unexpected)} that this model does not have; "
            "check model_type and the layer fields of config.json"
        )
    leaves = []
    for name, wanted in shapes.items():
        if tuple(given[name].shape) != wanted.shape:
            shape = list(given[name].shape)
            raise UserError(f"tensor {name!r} has shape {shape}; config.json calls for {list(wanted.shape)}")
        leaves.append(jnp.asarray(given[name], dtype))
    return tuple(leaves)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
