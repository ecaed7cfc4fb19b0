"""pwjax: Mixture-of-Experts serving in JAX under one memory budget.

`LLM` and `SamplingParams` are the Python interface; they are loaded on first use, so that parts of the package that
need no JAX (the planner) stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pwjax.errors import UserError

if TYPE_CHECKING:
    from pwjax.engine.llm import LLM
    from pwjax.engine.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "UserError"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pwjax.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pwjax.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pwjax' has no attribute {name!r}")
