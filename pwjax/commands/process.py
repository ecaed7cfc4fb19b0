"""Configures the process before JAX starts: memory cap, pinned host memory, compilation cache.

JAX reads these from the environment once, so this runs before the first import of JAX. What the user has set stays.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pwjax.cli_common import format_bytes
from pwjax.errors import UserError

# What libraries (cuBLAS, autotuning) take from JAX's pool beside our accounting; see docs/memory.md.
LIBRARY_BYTES = 512 * 2**20
PINNED_SHARE_OF_HOST = 0.9


def configure(memory_budget_bytes: int | None) -> None:
    """Sets defaults for this process.

    Args:
        memory_budget_bytes: caps JAX's device memory at the budget and `LIBRARY_BYTES`; None leaves JAX's default.

    Raises:
        UserError: the budget is more than the GPU has.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pwjax" / "xla"
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # XLA warns that rematerialization can't shrink a program that holds a large arena; there is nothing to shrink.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(max(64, int(_host_bytes() * PINNED_SHARE_OF_HOST / 1e9))),
    }
    total = gpu_bytes()
    if total is not None and memory_budget_bytes is not None:
        if memory_budget_bytes > total:
            raise UserError(
                f"--memory-budget {memory_budget_bytes}: the GPU has {total} bytes ({format_bytes(total)}); lower it"
            )
        share = min(1.0, (memory_budget_bytes + LIBRARY_BYTES) / total)
        defaults["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.6f}"
    elif total is not None:
        defaults["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_bytes() -> int | None:
    """Memory of the first NVIDIA GPU, None where there is none (or JAX is told not to use it)."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(found[0]) * 2**20 if found and found[0].isdigit() else None
