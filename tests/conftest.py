"""What all tests share: a compilation cache for the session, GPU tests skipped elsewhere, prepared tiny models."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Equal engines compile once a session, in all workers of a parallel run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(shared / "xla")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """`prepared(family, seed, **overrides)`: a store made once a session; see `tests.prepared.prepare_tiny`."""
    made: dict[str, object] = {}

    def make(family: str = "qwen2_moe", seed: int = 0, **options: object) -> object:
        pytest.importorskip("torch")
        from tests.prepared import prepare_tiny

        key = f"{family}-{seed}-{sorted(options.items())}"
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("prepared")
            made[key] = prepare_tiny(folder, family, seed, **options)
        return made[key]

    return make


@pytest.fixture
def cli_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For commands in process, in a folder of their own; `process.configure` sets variables, and JAX runs already."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "TF_CPP_MIN_LOG_LEVEL", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.setenv(f"JAX_PERSISTENT_CACHE_{name}", "0")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")
    monkeypatch.chdir(tmp_path)
