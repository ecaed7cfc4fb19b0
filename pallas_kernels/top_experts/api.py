"""Which experts a token goes to, and with what weights.

`implementation`: `"triton"` is the Pallas kernel for NVIDIA GPUs, `"xla"` plain jnp, `"auto"` the kernel on an NVIDIA
GPU and jnp elsewhere. An explicit choice never falls back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.platform import Implementation, resolve_implementation
from pallas_kernels.top_experts import reference


def top_experts(
    logits: jax.Array,
    valid: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: DTypeLike = jnp.float32,
    weights_dtype: DTypeLike = jnp.float32,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts in float32, then the `top_k` largest, of equal ones the lowest expert first.

    Args:
        logits: float32 `[T, E]`.
        valid: bool `[T]`; a token that is not chooses no expert.
        normalise: whether the weights of a token are divided by their sum.
        logits_dtype: logits are rounded to what this dtype can hold before anything else; float32 for not at all.
        weights_dtype: weights are rounded so at the end.

    Returns:
        ids: int32 `[T, top_k]`, distinct and largest weight first; E ("no expert") where not `valid`. They lie in
            `[0, E]` whatever the logits, NaN too.
        weights: float32 `[T, top_k]`; without meaning where not `valid`.

    Raises:
        NotImplementedError: the implementation asked for can't do this here; the message says why.
        ValueError: operands that contradict each other.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits is {logits.dtype}{list(logits.shape)}; expected float32[T, E]")
    if valid.shape != logits.shape[:1] or valid.dtype != jnp.bool_:
        raise ValueError(f"valid is {valid.dtype}{list(valid.shape)}; expected bool[{logits.shape[0]}]")
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"top_k is {top_k}; there are {logits.shape[1]} experts")
    if resolve_implementation(implementation) == "xla":
        implemented = reference.top_experts
    else:  # the backend is optional and deprecated: load it when it is used
        from pallas_kernels.top_experts import triton

        implemented = triton.top_experts
    return implemented(
        logits, valid, top_k=top_k, normalise=normalise, logits_dtype=logits_dtype, weights_dtype=weights_dtype
    )
