"""`manifest.json` of a prepared store: what `prepare` made, and the proof that it finished.

It is the last file that `prepare` writes; a folder without it is unfinished and does not load. It lists every other
file with its size, and small ones (all of Orbax's metadata) with a checksum, so that a damaged store says which file it
is at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pwjax.config import ModelConfig
from pwjax.errors import UserError

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
UNITS = ("gate_up", "down")
SMALL_FILE_BYTES = 64 * 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a prepared model that is not an array.

    Attributes:
        model: `ModelConfig.to_dict()`.
        slot_words: words of a slot; pages are whole slots.
        lut_rows: rows that share a LUT, by unit: `{"gate_up": 1 | 32, "down": 1 | 32}`.
        max_bits: default cap for serving (`--max-bits`), 3..8; pages are stored up to `page_bits`.
        page_bits: highest page stored.
        source: whether the bf16 experts are kept (`source/`), for `--method bf16`.
        kappa: how the sensitivity scale was fitted (free-form figures; the values are in the tables).
        quantization: figures of the quantization, such as `relative_error_by_bits`, `weights`, `slot_waste`.
        calibration: `text_sha256`, `tokens`, `experts_without_data` and whatever else describes the calibration.
        policy: planner policy; `{}` means the planner's defaults.
        files: size in bytes of every file of the store, by path relative to it; filled in by `PreparedWriter.finish`.
        checksums: CRC-32 of those of at most `SMALL_FILE_BYTES` (values have their own, see orbax_io.py).
        extra: more fields, kept as they are.
    """

    model: dict[str, Any]
    slot_words: int
    lut_rows: dict[str, int]
    max_bits: int
    source: bool
    format_version: int = FORMAT_VERSION
    page_bits: int = 8
    kappa: dict[str, Any] = dataclasses.field(default_factory=dict)
    quantization: dict[str, Any] = dataclasses.field(default_factory=dict)
    calibration: dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    checksums: dict[str, int] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise UserError(
                f"{MANIFEST_NAME}: format_version is {self.format_version!r}, this version reads {FORMAT_VERSION}; "
                "run prepare again with this version"
            )
        for field in dataclasses.fields(self):
            kind = {"int": int, "bool": bool}.get(str(field.type), dict)
            value = getattr(self, field.name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise UserError(f"{MANIFEST_NAME}: {field.name} is {value!r}; it must be of type {kind.__name__}")
        if self.slot_words < 1:
            raise UserError(f"{MANIFEST_NAME}: slot_words is {self.slot_words}; it must be at least 1")
        if set(self.lut_rows) != set(UNITS) or any(not isinstance(n, int) or n < 1 for n in self.lut_rows.values()):
            raise UserError(f"{MANIFEST_NAME}: lut_rows is {self.lut_rows!r}; it must give rows for gate_up and down")
        if not 3 <= self.max_bits <= self.page_bits <= 8:
            raise UserError(
                f"{MANIFEST_NAME}: max_bits {self.max_bits} and page_bits {self.page_bits} must satisfy "
                "3 <= max_bits <= page_bits <= 8"
            )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.model)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Manifest:
        """Builds a manifest from its JSON form.

        Raises:
            UserError: a required field is missing, unknown or of the wrong type, or another format version.
        """
        version = fields.get("format_version", FORMAT_VERSION)
        known = {field.name for field in dataclasses.fields(cls)}
        if version == FORMAT_VERSION and (unknown := sorted(set(fields) - known)):
            raise UserError(f"{MANIFEST_NAME}: unknown fields {', '.join(unknown)}; put further figures under 'extra'")
        required = {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
        if version == FORMAT_VERSION and (missing := sorted(required - set(fields))):
            raise UserError(f"{MANIFEST_NAME}: fields {', '.join(missing)} are missing; run prepare into a new folder")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{MANIFEST_NAME}: format_version is {version!r}, this version of pwjax reads {FORMAT_VERSION}; "
                "run prepare again with this version"
            )
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def write_json_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON so that `path` holds either its old content or all of the new one, also after a power cut."""
    tmp = path.with_name(path.name + ".tmp")
    with open(tmp, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False, default=_plain)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)
    fsync_path(path.parent)


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: unreadable, no JSON, or no object; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, expected a JSON object")
    return content


def file_crc32(path: Path) -> int:
    """CRC-32 of a small file."""
    return zlib.crc32(path.read_bytes())


def fsync_path(path: Path) -> None:
    """Forces a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
