"""Which implementation of an op runs on this machine."""

from __future__ import annotations

from typing import Literal

import jax

Implementation = Literal["auto", "triton", "xla"]


def resolve_implementation(implementation: Implementation) -> Literal["triton", "xla"]:
    """What `implementation` means here: `"auto"` is Triton on an NVIDIA GPU and XLA elsewhere.

    Raises:
        NotImplementedError: `"triton"` where there is no NVIDIA GPU.
        ValueError: an unknown name.
    """
    if implementation not in ("auto", "triton", "xla"):
        raise ValueError(f"implementation is {implementation!r}; it must be 'auto', 'triton' or 'xla'")
    if implementation == "xla":
        return "xla"
    if _has_nvidia_gpu():
        return "triton"
    if implementation == "auto":
        return "xla"
    raise NotImplementedError(
        f"implementation 'triton' needs an NVIDIA GPU and JAX runs on {jax.default_backend()}; use 'auto' or 'xla'"
    )


def _has_nvidia_gpu() -> bool:
    """JAX calls AMD GPUs `gpu` too; their platform version names ROCm."""
    if jax.default_backend() != "gpu":
        return False
    return "rocm" not in jax.devices()[0].client.platform_version.lower()
