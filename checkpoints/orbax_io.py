"""One Orbax (v1 API) checkpoint of NumPy arrays: written whole or not at all, read back with types pinned.

Orbax casts silently to whatever type a caller asks for, and it keeps no checksum of the values. So a saved tree carries
a CRC-32 for every array in its custom metadata, and `load_arrays` compares shape and type of what is stored with what
the caller expects before it reads, and the checksum after. Every fault becomes one `UserError` that names the folder.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from pwjax.errors import UserError

Arrays = Mapping[str, np.ndarray]
"""Arrays by name; names may hold dots (`model.norm.weight`) but no `/`."""
Spec = tuple[tuple[int, ...] | None, Any]
"""Expected `(shape, dtype)` of an array; a shape of None accepts any."""

READ_CONCURRENT_BYTES = 32 * 2**20  # without a limit a load peaks at 1.6 to 2 times the arrays' bytes
_TMP_MARK = "orbax-checkpoint-tmp"
_ADVICE = "run prepare into a new folder"


def _context(*, partial_load: bool = False) -> ocp.Context:
    """Settings for host arrays: no defensive copies and no compression (planes are noise, and it costs 2x in time)."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    context.memory.read_concurrent_bytes = READ_CONCURRENT_BYTES
    context.pytree.loading.partial_load = partial_load
    return context


def save_arrays(folder: Path, arrays: Arrays) -> None:
    """Saves arrays as the checkpoint `folder`, which appears under that name only when it is complete.

    A killed save leaves a `*.orbax-checkpoint-tmp*` neighbour, found by `partial_saves`.

    Raises:
        ValueError: an array without elements (Orbax can't store one), or no array at all; a bug of the caller.
    """
    if not arrays:
        raise ValueError(f"{folder}: no arrays to save")
    leaves = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    for name, value in leaves.items():
        if value.size == 0 or "/" in name:
            raise ValueError(f"{folder}: array {name!r} has shape {value.shape}; it needs elements and a plain name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _context():
        ocp.save(str(folder.absolute()), leaves, custom_metadata={"crc32": {n: _crc32(v) for n, v in leaves.items()}})


def is_saved(folder: Path) -> bool:
    """Whether a complete checkpoint lies at `folder` (Orbax renames it into place at the end of a save)."""
    return folder.is_dir() and ocp.is_orbax_checkpoint(str(folder.absolute()))


def partial_saves(folder: Path) -> list[Path]:
    """The temporary folders that killed saves left directly in `folder`; the caller deletes them."""
    return sorted(path for path in folder.glob(f"*{_TMP_MARK}*") if path.is_dir()) if folder.is_dir() else []


def stored_specs(folder: Path) -> dict[str, Spec]:
    """`(shape, dtype)` of every array of a checkpoint, without reading values."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in _metadata(folder)[0].items()}


def load_arrays(folder: Path, expected: Mapping[str, Spec] | None = None) -> dict[str, np.ndarray]:
    """Reads arrays of a checkpoint.

    Args:
        expected: the arrays wanted (others aren't read), with their shapes and types; None reads all as stored.

    Returns:
        NumPy arrays of exactly the stored types.

    Raises:
        UserError: folder missing, unfinished or damaged; an array absent or of another shape or type than expected.
    """
    leaves, checksums = _metadata(folder)
    for name, (shape, dtype) in (expected or {}).items():
        _check_spec(folder, name, leaves.get(name), shape, np.dtype(dtype))
    wanted = leaves if expected is None else {name: leaves[name] for name in expected}
    try:
        with _context(partial_load=True):
            arrays = ocp.load(str(folder.absolute()), wanted)
    except Exception as error:  # Orbax and TensorStore raise many types for a damaged folder
        raise _damaged(folder, error) from error
    for name, value in arrays.items():
        if checksums.get(name) != _crc32(value):
            raise UserError(f"{folder}: array {name!r} is corrupted (its checksum differs); {_ADVICE}")
    return arrays


def _metadata(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Leaves (with shape and dtype) by name, and checksums by name."""
    if not is_saved(folder):
        raise UserError(f"{folder}: no complete checkpoint there; the folder is damaged: {_ADVICE}")
    try:
        metadata = ocp.metadata(str(folder.absolute()))
        return dict(metadata.metadata), dict((metadata.custom_metadata or {})["crc32"])  # type: ignore[call-overload]
    except Exception as error:
        raise _damaged(folder, error) from error


def _check_spec(folder: Path, name: str, leaf: Any, shape: tuple[int, ...] | None, dtype: np.dtype) -> None:
    if leaf is None:
        raise UserError(f"{folder}: array {name!r} is missing; {_ADVICE}")
    if np.dtype(leaf.dtype) != dtype:
        raise UserError(f"{folder}: array {name!r} is stored as {np.dtype(leaf.dtype)}, expected {dtype}")
    if shape is not None and tuple(leaf.shape) != tuple(shape):
        raise UserError(f"{folder}: array {name!r} has shape {tuple(leaf.shape)}, expected {tuple(shape)}")


def _damaged(folder: Path, error: Exception) -> UserError:
    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    return UserError(f"{folder}: damaged checkpoint ({type(error).__name__}: {first_line}); {_ADVICE}")


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
