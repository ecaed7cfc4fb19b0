"""Counts backend compilations, so that "nothing compiles after warm-up" is a number and not a hope."""

from __future__ import annotations

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts backend compilations, loads from the persistent cache included, inside `with counter:` blocks.

    JAX's events are of the whole process: outside the blocks, another engine may be loading.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == BACKEND_COMPILE_EVENT:
            self.count += 1
