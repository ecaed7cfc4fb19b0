"""The `*.safetensors` files of a folder: which there are, what their headers say, and the bytes of one tensor.

Tensors are read with plain reads straight into the caller's array. `safe_open` maps the file instead, and the mapped
pages count as memory of the process beside the copy it returns: twice a layer, where `prepare` may have 1.5. The
library still checks every header. Format: 8 bytes header length, a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pwjax.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Types of weights that are read, by their name in the file."""
_LFS_MARK = b"version https://git-lfs"
_FINGERPRINT_SAMPLES = 64
_FINGERPRINT_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where one tensor lies: `size_bytes` from byte `start` of `file`, row-major, of the file's type name `dtype`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's type.

        Raises:
            UserError: a type that isn't supported.
        """
        if self.dtype not in DTYPES:
            raise UserError(
                f"{self.file}: tensor {self.name} is of type {self.dtype}; supported are {', '.join(DTYPES)} "
                "(give the unquantized checkpoint)"
            )
        return DTYPES[self.dtype]

    def read(self) -> np.ndarray:
        """The whole tensor, in its own type and shape."""
        out = np.empty(self.shape, self.numpy_dtype)
        self.read_into(out)
        return out

    def read_into(self, out: np.ndarray, offset_elements: int = 0) -> None:
        """Fills `out` (C-contiguous, of the tensor's type) with the elements from `offset_elements` on."""
        if out.dtype != self.numpy_dtype or not out.flags.c_contiguous:
            raise ValueError(f"{self.name}: can't read {self.dtype} into {out.dtype} {out.shape}")
        start_bytes = offset_elements * out.itemsize
        if start_bytes + out.nbytes > self.size_bytes:
            raise ValueError(f"{self.name}: reading past the end")
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start + start_bytes)
            view = out.reshape(-1).view(np.uint8).data
            while view:
                count = file.readinto(view)
                if not count:
                    raise UserError(
                        f"{self.file}: ends inside tensor {self.name}; the file is truncated: download it again"
                    )
                view = view[count:]


def find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder.

    With an index, the files it names, all of which must exist. Without, every `*.safetensors` there, whatever its name.

    Returns:
        Sorted paths, and the index's `weight_map` (empty without an index).

    Raises:
        UserError: no files; or an index that can't be read or names files that are not there.
    """
    present = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        if not present:
            raise UserError(f"{folder}: no *.safetensors files there{_other_formats(folder)}")
        return present, {}
    weight_map = _read_weight_map(index_path)
    named = sorted(set(weight_map.values()))
    if missing := [name for name in named if not (folder / name).is_file()]:
        found = ", ".join(path.name for path in present[:4]) or "no *.safetensors file"
        raise UserError(
            f"{index_path}: names {len(missing)} of {len(named)} shards that are not there ({_first(missing)}); found "
            f"{found}{', ..' if len(present) > 4 else ''}. Download what is missing, or delete the index if it is stale"
        )
    return [folder / name for name in named], weight_map


def read_header(file: Path) -> list[Tensor]:
    """The tensors of a file, from its header alone.

    Raises:
        UserError: not a safetensors file, or shorter or longer than its header says; names the file.
    """
    size_bytes = file.stat().st_size
    with open(file, "rb") as stream:
        first = stream.read(8)
        if first + stream.read(len(_LFS_MARK) - 8) == _LFS_MARK:
            raise UserError(f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
        header_bytes = int.from_bytes(first, "little")
        if len(first) < 8 or header_bytes + 8 > size_bytes:
            raise UserError(
                f"{file}: has {size_bytes} bytes, fewer than its header; it is truncated or not a safetensors file: "
                "download it again"
            )
        stream.seek(8)
        raw = stream.read(header_bytes)
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = [_tensor(name, entry, file, 8 + header_bytes) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its safetensors header can't be read ({error}); download it again") from None
    end = max((tensor.start + tensor.size_bytes for tensor in tensors), default=8 + header_bytes)
    if end != size_bytes:
        last = max(tensors, key=lambda tensor: tensor.start).name if tensors else "none"
        state = "truncated" if size_bytes < end else "longer than it should be"
        raise UserError(
            f"{file}: is {state}: {size_bytes} bytes, the header needs {end} (last tensor {last}); download it again"
        )
    try:
        with safe_open(file, framework="np"):  # what else the format asks for: no gaps, no overlaps, aligned
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a valid safetensors file ({error}); download it again") from None
    return tensors


def file_fingerprint(file: Path) -> str:
    """sha256 of a file's size, its header, and samples of its data (a re-trained model has the same header)."""
    size_bytes = file.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    with open(file, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header_bytes, size_bytes)))
        start = min(8 + header_bytes, size_bytes)
        for sample in range(_FINGERPRINT_SAMPLES):
            stream.seek(start + (size_bytes - start) * sample // _FINGERPRINT_SAMPLES)
            digest.update(stream.read(_FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()


def _tensor(name: str, entry: dict[str, Any], file: Path, data_start: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"tensor {name}: {end - begin} bytes for {dtype} {list(shape)}")
    return Tensor(name=name, file=file, dtype=dtype, shape=shape, start=data_start + begin, size_bytes=end - begin)


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or any(Path(file).name != file for file in weight_map.values()):
            raise ValueError("weight_map is empty, or names files outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index_path}: can't be read as an index ({error}); download it again or delete it") from None
    return dict(weight_map)


def _other_formats(folder: Path) -> str:
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    return f" (found {_first(others)}: convert it to safetensors with transformers' save_pretrained)" if others else ""


def _first(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
