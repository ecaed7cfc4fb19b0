"""Lowers Pallas Triton kernels for CUDA on a machine without a GPU, by `jax.export`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
from jax import export


def lower_for_cuda(f: Callable[..., object], *args: object) -> str:
    """StableHLO of `jit(f)` for CUDA; `args` are arrays or `jax.ShapeDtypeStruct`."""
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with _abstract_gpu():
        return export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[check])(*args).mlir_module()


def _abstract_gpu() -> contextlib.AbstractContextManager[object]:
    """JAX 0.11 and later ask which GPU the kernel is for."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except (ImportError, TypeError):
        return contextlib.nullcontext()
