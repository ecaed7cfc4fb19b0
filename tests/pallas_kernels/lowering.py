"""Lowers Pallas Triton kernels for CUDA on a machine without a GPU, and verifies what comes out.

Pallas does not verify the Triton module that it builds (a type error in it shows on a GPU only), so this does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax import export


def triton_modules(f: Callable[..., object], *args: object) -> list[str]:
    """Text of every Triton kernel of `jit(f)`, each parsed and verified; `args` may be `jax.ShapeDtypeStruct`.

    Raises:
        MLIRError: a module that is not valid.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with _abstract_gpu():
        exported = export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[check])(*args)
    with mlir.make_ir_context():
        kernels = list(_kernel_bytecode(ir.Module.parse(exported.mlir_module()).operation, ir))
    context = ir.Context()
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        return [str(ir.Module.parse(bytecode)) for bytecode in kernels]


def _kernel_bytecode(operation, ir) -> Iterator[bytes]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                attributes = inner.operation.attributes
                if inner.operation.name == "stablehlo.custom_call" and "triton" in str(attributes["call_target_name"]):
                    name = "mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"
                    config = {item.name: item.attr for item in ir.DictAttr(attributes[name])}
                    yield ir.StringAttr(config["ir"]).value_bytes
                yield from _kernel_bytecode(inner.operation, ir)


def _abstract_gpu() -> contextlib.AbstractContextManager[object]:
    """JAX 0.11 and later ask which GPU the kernel is for."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except (ImportError, TypeError):
        return contextlib.nullcontext()
