"""Counts backend compilations of the process, so that "nothing compiles after warm-up" is a number and not a hope."""

from __future__ import annotations

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts every backend compilation, loads from the persistent cache included, from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == BACKEND_COMPILE_EVENT:
            self.count += 1

    def close(self) -> None:
        """Stops counting; a closed counter costs nothing."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)
