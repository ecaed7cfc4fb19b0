"""Writes the store of a prepared model (its layout: store.py), so that a stop at any moment leaves it resumable.

Every part is complete or absent: Orbax renames a finished checkpoint into place, JSON and state files are replaced
atomically, and the manifest comes last. Nothing that `prepare` did not write itself is ever overwritten or deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from checkpoints.claim import LOCK_NAME, PREPARE_NAME, claim
from checkpoints.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    SMALL_FILE_BYTES,
    UNITS,
    Manifest,
    file_crc32,
    fsync_path,
    write_json_atomically,
)
from checkpoints.orbax_io import is_saved, load_arrays, partial_saves, save_arrays
from pallas_kernels.bitplane_moe.layout import MAX_BITS, MIN_BITS
from pwjax.errors import UserError

STATE_NAME = "state"
DENSE_INDEX_NAME = "dense.json"
DENSE_GROUP_BYTES = 256 * 2**20  # host memory that `write_dense` and `load_dense` gather before a save

Pages = Mapping[str, Mapping[int, np.ndarray]]
"""`{"gate_up": {3: uint32 [E, words], .., 8: ..}, "down": {..}}`."""


def layer_folder(out: Path, kind: str, layer: int) -> Path:
    """Checkpoint of a MoE layer; `kind` is "layers" or "source"."""
    return out / kind / f"{layer:03d}"


def page_name(unit: str, bits: int) -> str:
    """Name of a page array in a layer's checkpoint."""
    return f"{unit}.{bits}"


class PreparedWriter:
    """An OUT folder while `prepare` fills it. Use as a context manager, or call `close`.

    Typical use; every `write_*` may be left out when its `has_*` is true:

        with PreparedWriter(out, {"source": checkpoint.fingerprint(), "lut_rows": "auto"}, num_moe_layers=6) as writer:
            writer.copy_files(checkpoint.tokenizer_files())
            if not writer.has_dense():
                writer.write_dense(checkpoint.dense())
            for layer in range(6):
                if not writer.has_layer(layer):
                    writer.write_source(layer, gate_up, down)
                    writer.write_layer_stats(layer, {"importance": ...})
                    writer.write_layer(layer, pages)
            writer.write_tables({"sensitivity": ...})
            writer.finish(manifest)

    Args:
        out: the folder; created (with parents) if absent.
        fingerprint: what makes two runs the same run: the source's fingerprint and every option that changes the
            output. A string counts as `{"source": string}`. Values must have a JSON form.
        num_moe_layers: how many layers `finish` requires.
        source: whether the bf16 experts are kept; then `finish` requires them and `has_layer` waits for them.

    Raises:
        UserError: `out` is a file, a finished store, a non-empty folder that is not an unfinished prepare, an
            unfinished prepare of other sources or options (named), or one that another process is writing now.
    """

    def __init__(
        self,
        out: str | Path,
        fingerprint: str | Mapping[str, Any],
        *,
        num_moe_layers: int,
        source: bool = True,
    ) -> None:
        self.out = Path(out)
        self.num_moe_layers = num_moe_layers
        self.source = source
        self._copied: set[str] = set()
        run = {"source": fingerprint} if isinstance(fingerprint, str) else fingerprint
        lock, resumed = claim(self.out, {**run, "format_version": FORMAT_VERSION})
        self._lock: int | None = lock
        self.resumed: bool = resumed
        """Whether an unfinished run was found and is continued."""
        for folder in (self.out, self.out / "layers", self.out / "source"):
            for leftover in partial_saves(folder):
                shutil.rmtree(leftover)
        for name in (DENSE_INDEX_NAME, MANIFEST_NAME):
            (self.out / f"{name}.tmp").unlink(missing_ok=True)

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process continue this OUT. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Layers

    def has_layer(self, layer: int) -> bool:
        """Whether everything of a MoE layer is written: pages, stats, and the bf16 experts if they are kept."""
        return (
            is_saved(layer_folder(self.out, "layers", layer))
            and self._stats_file(layer).is_file()
            and (not self.source or self.has_source(layer))
        )

    def has_source(self, layer: int) -> bool:
        return is_saved(layer_folder(self.out, "source", layer))

    def write_layer(self, layer: int, pages: Pages) -> None:
        """Saves the pages of a MoE layer: for both units, uint32 `[E, words]` for every bit-width from 3 up (to 8)."""
        self._save(layer_folder(self.out, "layers", layer), _flat_pages(pages))

    def read_layer(self, layer: int) -> dict[str, dict[int, np.ndarray]]:
        """The pages of a layer as `write_layer` took them."""
        pages: dict[str, dict[int, np.ndarray]] = {unit: {} for unit in UNITS}
        for name, value in load_arrays(layer_folder(self.out, "layers", layer)).items():
            unit, bits = name.rsplit(".", 1)
            pages[unit][int(bits)] = value
        return pages

    def write_source(self, layer: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        """Saves the experts of a MoE layer, rounded to bf16: gate_up `[E, 2I, H]`, down `[E, H, I]`."""
        arrays = {"gate_up": as_bf16(gate_up), "down": as_bf16(down)}
        self._save(layer_folder(self.out, "source", layer), arrays)

    def write_layer_stats(self, layer: int, stats: Mapping[str, np.ndarray | float | int]) -> None:
        """Saves the calibration results that a resumed run needs of a layer; `{}` if there are none."""
        self.write_state(_stats_name(layer), stats)

    def read_layer_stats(self, layer: int) -> dict[str, np.ndarray]:
        """What `write_layer_stats` saved; numbers come back as arrays of no dimension."""
        return self.read_state(_stats_name(layer))

    # Other parts

    def has_dense(self) -> bool:
        return (self.out / DENSE_INDEX_NAME).is_file()

    def write_dense(self, tensors: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]) -> None:
        """Saves dense weights by hub name, rounded to bf16, as they come; host memory: 256 MiB and a tensor."""
        folder = self.out / "dense"
        (self.out / DENSE_INDEX_NAME).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)  # a part that an interrupted run left
        index: dict[str, int] = {}
        group: dict[str, np.ndarray] = {}
        number = 0
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for name, value in cast(Iterable[tuple[str, np.ndarray]], pairs):
            value = as_bf16(value)
            if group and sum(v.nbytes for v in group.values()) + value.nbytes > DENSE_GROUP_BYTES:
                save_arrays(folder / f"{number:03d}", group)
                group, number = {}, number + 1
            index[name] = number
            group[name] = value
        save_arrays(folder / f"{number:03d}", group)
        write_json_atomically(self.out / DENSE_INDEX_NAME, index)

    def write_tables(self, tables: Mapping[str, np.ndarray]) -> None:
        """Saves the tables (sensitivity and so on), replacing those of an earlier attempt."""
        self._save(self.out / "tables", {name: np.asarray(value) for name, value in tables.items()})

    def copy_files(self, files: Iterable[Path]) -> None:
        """Copies configuration and tokenizer files into OUT under their own names; repeat it in a resumed run."""
        for file in files:
            shutil.copyfile(file, self.out / file.name)
            self._copied.add(file.name)

    def write_state(self, name: str, arrays: Mapping[str, np.ndarray | float | int]) -> None:
        """Keeps arrays that only a resumed run needs (decisions, partial sums); gone once `finish` is done."""
        folder = self.out / STATE_NAME
        folder.mkdir(exist_ok=True)
        tmp = folder / f"{name}.npz.tmp"
        with open(tmp, "wb") as file:
            np.savez(file, **{key: np.asarray(value) for key, value in arrays.items()})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, folder / f"{name}.npz")

    def has_state(self, name: str) -> bool:
        return self._state_file(name).is_file()

    def read_state(self, name: str) -> dict[str, np.ndarray]:
        """What `write_state` kept.

        Raises:
            UserError: there is none, or it can't be read.
        """
        try:
            with np.load(self._state_file(name), allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except Exception as error:  # zipfile, NumPy and the system raise different types
            raise UserError(
                f"{self._state_file(name)}: can't be read ({error}); delete OUT and prepare again"
            ) from None

    def finish(self, manifest: Manifest | Mapping[str, Any]) -> Manifest:
        """Checks that every part is there, forces all to disk, and writes the manifest: from then on OUT loads.

        Raises:
            UserError: a part is missing, or the manifest is not valid.
        """
        fields = manifest.to_dict() if isinstance(manifest, Manifest) else dict(manifest)
        self._check_complete()
        files, checksums = {}, {}
        for path in self._store_files():
            name = path.relative_to(self.out).as_posix()
            files[name] = path.stat().st_size
            if files[name] <= SMALL_FILE_BYTES:
                checksums[name] = file_crc32(path)
            fsync_path(path)
        complete = Manifest.from_dict({**fields, "source": self.source, "files": files, "checksums": checksums})
        write_json_atomically(self.out / MANIFEST_NAME, complete.to_dict())
        shutil.rmtree(self.out / STATE_NAME, ignore_errors=True)
        (self.out / PREPARE_NAME).unlink()
        (self.out / LOCK_NAME).unlink()
        self.close()
        return complete

    # Inside

    def _save(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        if folder.exists():
            shutil.rmtree(folder)  # ours: an attempt that this run repeats
        save_arrays(folder, arrays)

    def _store_files(self) -> list[Path]:
        """The files that make up the store, and no others that may lie there."""
        parts = [self.out / name for name in ("dense", "layers", "tables", *(["source"] if self.source else []))]
        nested = [path for part in parts for path in sorted(part.rglob("*")) if path.is_file()]
        return [self.out / name for name in sorted({*self._copied, DENSE_INDEX_NAME})] + nested

    def _check_complete(self) -> None:
        needed = [layer_folder(self.out, "layers", layer) for layer in range(self.num_moe_layers)]
        if self.source:
            needed += [layer_folder(self.out, "source", layer) for layer in range(self.num_moe_layers)]
        needed.append(self.out / "tables")
        for folder in needed:
            if not is_saved(folder):
                raise UserError(f"{folder}: not written, so the store can't be finished; run the same prepare again")
        if not self.has_dense() or "config.json" not in self._copied:
            name = "config.json" if self.has_dense() else DENSE_INDEX_NAME
            raise UserError(f"{self.out / name}: not written by this run, so the store can't be finished")

    def _state_file(self, name: str) -> Path:
        return self.out / STATE_NAME / f"{name}.npz"

    def _stats_file(self, layer: int) -> Path:
        return self._state_file(_stats_name(layer))


def _stats_name(layer: int) -> str:
    return f"layer-{layer:03d}"


def _flat_pages(pages: Pages) -> dict[str, np.ndarray]:
    if set(pages) != set(UNITS):
        raise ValueError(f"pages of units {sorted(pages)}, expected {UNITS}")
    flat = {}
    for unit, by_bits in pages.items():
        if sorted(by_bits) != list(range(MIN_BITS, max(by_bits, default=0) + 1)) or max(by_bits) > MAX_BITS:
            raise ValueError(f"{unit}: pages of bits {sorted(by_bits)}, expected {MIN_BITS} up to at most {MAX_BITS}")
        for bits, page in by_bits.items():
            array = np.asarray(page)
            if array.dtype != np.uint32 or array.ndim != 2:
                raise ValueError(f"{unit} page {bits}: {array.dtype} {array.shape}, expected uint32 [experts, words]")
            flat[page_name(unit, bits)] = array
    return flat


def as_bf16(array: np.ndarray) -> np.ndarray:
    """A bf16 NumPy array with the same values, rounded if they were wider; no copy if it is bf16 already."""
    return np.asarray(array).astype(ml_dtypes.bfloat16, copy=False)
