"""The decoder: Qwen2-MoE and Mixtral in flax.nnx, without routed experts and without KV."""

from pwjax.models.decoder import Decoder, DecoderLayer
from pwjax.models.forward import forward_dense
from pwjax.models.loading import ModuleDef, dense_weight_shapes, load_dense, load_layer, merge

__all__ = [
    "Decoder",
    "DecoderLayer",
    "ModuleDef",
    "dense_weight_shapes",
    "forward_dense",
    "load_dense",
    "load_layer",
    "merge",
]
