"""The implementations that every case of an op runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import pytest

# Interpreted kernels are big HLO that runs once: don't optimize it.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

IMPLEMENTATIONS = [
    "xla",
    "interpret",  # the Triton kernel, interpreted on any machine
    pytest.param("triton", marks=pytest.mark.gpu),
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops interpreted cases that aren't marked for it, and skips compiled kernels where there is no GPU."""
    dropped = [item for item in items if _is_too_slow(item)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _is_too_slow(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("implementation") == "interpret" and not getattr(params.get("case"), "interpreted", True)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bind(implementation: str) -> Callable[..., Callable[..., object]]:
    """`bind(api_function, triton_function, **static)` compiles the op for the implementation under test."""

    def make(api_function: Callable[..., object], triton_function: Callable[..., object], **static: object):
        if implementation == "interpret":
            function = functools.partial(triton_function, interpret=True, **static)
            return jax.jit(function, compiler_options=_QUICK)
        return jax.jit(functools.partial(api_function, implementation=implementation, **static))

    return make
