"""Configurations measured on a device: `tuned/<device kind, lower case, underscores>.json` in a kernel's folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax


def tuned_entries(kernel_folder: Path) -> list[dict[str, Any]]:
    """Of this machine's device, in order of preference; empty if none was measured."""
    return _read(kernel_folder / "tuned" / f"{device_kind().replace(' ', '_').lower()}.json")


def device_kind() -> str:
    return jax.devices()[0].device_kind


@functools.cache
def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []
