"""Reads a Hugging Face MoE folder: checks all of it before anything is written, then gives a tensor or layer at a time.

Both expert layouts, any sharding, both spellings of `config.json`; the files' rules are in safetensors_files.py, the
tensors' names in hf_layout.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.hf_layout import ExpertLayout, Layout, match
from checkpoints.safetensors_files import DTYPES, INDEX_NAME, Tensor, file_fingerprint, find_files, read_header
from pwjax.config import ModelConfig
from pwjax.errors import UserError
from pwjax.models import dense_weight_shapes

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a prepared model takes over as they are."""

_CHECK_CHUNK_BYTES = 4 * 2**20  # beside it a masked copy and a truth value an element: 10 MiB together
_EXPONENT_BITS = {"BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00), "F32": np.uint32(0x7F800000)}


class HFCheckpoint:
    """A Hugging Face folder of a supported MoE model.

    Opening reads `config.json`, the index and the headers. Call `validate` and `check_finite` before writing anything.

    Attributes:
        path: the folder.
        config: the model.
        files: the safetensors files, sorted.
        tensors: every tensor of them by name.

    Raises:
        UserError: not a folder, no or bad `config.json`, no weights, a stale index, a truncated or damaged file, a
            tensor in two files, a quantized checkpoint; one line that names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder; give a Hugging Face model folder")
        self.config = ModelConfig.from_hf(_read_config(self.path))
        self.files, weight_map = find_files(self.path)
        self.tensors: dict[str, Tensor] = {}
        for file in self.files:
            for tensor in read_header(file):
                if (other := self.tensors.get(tensor.name)) is not None:
                    raise UserError(
                        f"{file}: tensor {tensor.name} is also in {other.file.name}; remove one of the files"
                    )
                self.tensors[tensor.name] = tensor
        self._check_index(weight_map)

    @cached_property
    def layout(self) -> Layout:
        """Where everything is; the first use validates (see `validate`)."""
        return match(self.config, dense_weight_shapes(self.config), self.tensors, str(self.path))

    @property
    def total_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def validate(self) -> Layout:
        """Checks names, shapes and types of all tensors, from headers alone.

        Returns:
            The layout (which names the files use).

        Raises:
            UserError: tensors missing, unexpected, of a wrong shape, or of a type other than bf16, f16, f32.
        """
        return self.layout

    def check_finite(self, progress: Progress | None = None) -> None:
        """Reads every weight once, in file order, and checks that it is finite; 10 MiB of memory.

        Raises:
            UserError: a NaN or an infinity, with file, tensor and first index; a tied head unlike the embedding.
        """
        redundant = {name for name in self.layout.redundant if name != "lm_head.weight"}
        done = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.file, tensor.start)):
            if tensor.name not in redundant:
                for chunk_bytes in _check_tensor_finite(tensor):
                    done += chunk_bytes
                    if progress is not None:
                        progress(done, self.total_bytes)
            else:
                done += tensor.size_bytes
        if "lm_head.weight" in self.layout.redundant:
            self._check_tied_head()

    def dense(self, dtype: Any = ml_dtypes.bfloat16) -> Iterator[tuple[str, np.ndarray]]:
        """Every weight but the routed experts, by canonical hub name, one at a time.

        Args:
            dtype: type to round to; None keeps the file's.

        Returns:
            `(name, [out, in])` in canonical order. `shared_expert_gate` is always `[1, H]`.
        """
        for name, file_name in self.layout.dense.items():
            value = self.tensors[file_name].read().reshape(self.layout.dense_shapes[name])
            yield name, value if dtype is None else value.astype(dtype, copy=False)

    def experts(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The routed experts of a MoE layer, whatever the layout in the file.

        Args:
            layer: MoE layer, from 0 (not the decoder layer, where they differ).

        Returns:
            gate_up `[E, 2I, H]` (gate rows first) and down `[E, H, I]`, in the file's type (float32 if mixed).
            Host memory: these two arrays.
        """
        experts = self.layout.experts[layer]
        tensors = [self.tensors[name] for name in experts.names]
        kinds = {tensor.dtype for tensor in tensors}
        dtype = DTYPES[kinds.pop()] if len(kinds) == 1 else np.dtype(np.float32)
        num_experts, hidden, inner = self.config.num_experts, self.config.hidden_size, self.config.moe_intermediate_size
        gate_up = np.empty((num_experts, 2 * inner, hidden), dtype)
        down = np.empty((num_experts, hidden, inner), dtype)
        for tensor, target in zip(tensors, _targets(experts, gate_up, down, inner), strict=True):
            if tensor.numpy_dtype == dtype:
                tensor.read_into(target)
            else:
                target[...] = tensor.read()
        return gate_up, down

    def tokenizer_files(self) -> list[Path]:
        """Files to copy beside the prepared weights: `config.json`, `generation_config.json`, tokenizer files."""
        return [self.path / name for name in COPIED_FILES if (self.path / name).is_file()]

    def fingerprint(self) -> str:
        """sha256 that tells this source from another: config, index, and every file's header, size and samples."""
        digest = hashlib.sha256()
        for name in ("config.json", INDEX_NAME):
            file = self.path / name
            digest.update(file.read_bytes() if file.is_file() else b"")
        for file in self.files:
            digest.update(f"{file.name} {file_fingerprint(file)}\n".encode())
        return digest.hexdigest()

    def _check_index(self, weight_map: dict[str, str]) -> None:
        for name, file_name in weight_map.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.file.name != file_name:
                found = f"it is in {tensor.file.name}" if tensor else "no shard has it"
                raise UserError(
                    f"{self.path / INDEX_NAME}: says tensor {name} is in {file_name}, but {found}; the index is stale: "
                    "delete it or download it again"
                )

    def _check_tied_head(self) -> None:
        """A tied model may hold its head a second time; a head of its own would silently be lost."""
        head, embedding = self.tensors["lm_head.weight"], self.tensors[self.layout.dense["model.embed_tokens.weight"]]
        rows = max(1, _CHECK_CHUNK_BYTES // (4 * head.shape[1]))
        for first in range(0, head.shape[0], rows):
            count = min(rows, head.shape[0] - first)
            pieces = []
            for tensor in (head, embedding):
                piece = np.empty((count, head.shape[1]), tensor.numpy_dtype)
                tensor.read_into(piece, first * head.shape[1])
                pieces.append(piece.astype(np.float32))
            if not np.array_equal(*pieces):
                raise UserError(
                    f"{head.file}: lm_head.weight differs from model.embed_tokens.weight (from row {first} on), but "
                    "config.json says tie_word_embeddings: true; set it to false to use the head"
                )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file}: missing; {folder} is not a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: can't be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: holds no JSON object")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown method")
        raise UserError(f"{file}: the weights are quantized already ({method}); give the bf16 checkpoint")
    return config


def _targets(experts: ExpertLayout, gate_up: np.ndarray, down: np.ndarray, inner: int) -> list[np.ndarray]:
    """Where each tensor of `experts.names` goes."""
    if experts.kind == "fused":
        return [gate_up, down]
    return [part for e in range(len(down)) for part in (gate_up[e, :inner], gate_up[e, inner:], down[e])]


def _check_tensor_finite(tensor: Tensor) -> Iterator[int]:
    """Yields the bytes of every chunk checked."""
    mask = _EXPONENT_BITS[tensor.dtype]
    elements = tensor.size_bytes // mask.itemsize
    chunk = np.empty(min(elements, _CHECK_CHUNK_BYTES // mask.itemsize), tensor.numpy_dtype)
    for first in range(0, elements, max(1, len(chunk))):
        part = chunk[: elements - first]
        tensor.read_into(part, first)
        bad = (part.view(mask.dtype) & mask) == mask  # exponent all ones: NaN or infinity
        if bad.any():
            where = int(bad.argmax())
            index = [int(i) for i in np.unravel_index(first + where, tensor.shape)]
            raise UserError(
                f"{tensor.file}: tensor {tensor.name} is {float(part[where])} at index {index}; weights must be finite"
            )
        yield part.nbytes
