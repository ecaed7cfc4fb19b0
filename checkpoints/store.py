"""The store of a prepared model: what lies in OUT, and how serving reads it. `PreparedWriter` (writer.py) makes it.

    OUT/manifest.json          written last, atomically (see manifest.py); without it OUT does not load
    OUT/config.json ..         config, generation_config and tokenizer files of the source, as they were
    OUT/dense/NNN/             Orbax: dense weights (bf16) by hub name, in groups; OUT/dense.json says which is where
    OUT/layers/NNN/            Orbax, one checkpoint a MoE layer: "gate_up.3" .. "gate_up.8", "down.3" .. "down.8",
                               uint32 [E, page_slots(bits) * slot_words]
    OUT/source/NNN/            Orbax, optional: "gate_up" [E, 2I, H] and "down" [E, H, I], bf16
    OUT/tables/                Orbax: sensitivity f32 [L, E, 2, 6], kappa, tokens_per_expert, ...

While `prepare` runs OUT also holds `prepare.json` (source and options, so that a resumed run is the same run),
`prepare.lock`, and `state/` (what the run needs to resume). Everything that serving reads is checked: files against the
sizes in the manifest when the store opens, shapes, types and checksums of arrays when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoints.claim import PREPARE_NAME
from checkpoints.manifest import MANIFEST_NAME, UNITS, Manifest, file_crc32, read_json
from checkpoints.orbax_io import load_arrays
from checkpoints.writer import DENSE_INDEX_NAME, PreparedWriter, layer_folder, page_name
from pallas_kernels.bitplane_moe.layout import MIN_BITS, BlockLayout, MoEGeometry
from pwjax.config import ModelConfig
from pwjax.errors import UserError

__all__ = ["Manifest", "PreparedModel", "PreparedWriter", "moe_geometry"]

BF16 = np.dtype(ml_dtypes.bfloat16)


def moe_geometry(config: ModelConfig, lut_rows: dict[str, int], slot_words: int) -> MoEGeometry:
    """Page layouts of the routed experts of a model; `lut_rows` by unit name."""
    layouts = {}
    for index, unit in enumerate(UNITS):
        rows, cols = config.unit_shape(index)
        layouts[unit] = BlockLayout(rows=rows, cols=cols, lut_rows=lut_rows[unit], slot_words=slot_words)
    return MoEGeometry(gate_up=layouts["gate_up"], down=layouts["down"])


class PreparedModel:
    """A finished store, read lazily: opening it reads the manifest only.

    Attributes:
        path: the folder.
        manifest: validated.
        config: the model.

    Raises:
        UserError: no such folder, not a prepared store, unfinished, another format version, or a file is missing or not
            as `prepare` wrote it; names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self.config: ModelConfig = self.manifest.config
        _check_files(self.path, self.manifest)

    @property
    def tokenizer_path(self) -> Path:
        """Folder with the tokenizer files and `generation_config.json` (for `AutoTokenizer.from_pretrained`)."""
        return self.path

    @property
    def bits(self) -> tuple[int, ...]:
        """Bit-widths whose pages are stored."""
        return tuple(range(MIN_BITS, self.manifest.page_bits + 1))

    def geometry(self) -> MoEGeometry:
        return moe_geometry(self.config, self.manifest.lut_rows, self.manifest.slot_words)

    def iter_dense(self) -> Iterator[tuple[str, np.ndarray]]:
        """Dense weights by hub name, bf16, one group of the store in host memory at a time."""
        groups: dict[int, list[str]] = {}
        for name, group in read_json(self.path / DENSE_INDEX_NAME).items():
            groups.setdefault(group, []).append(name)
        for group, names in sorted(groups.items()):
            expected = {name: (None, BF16) for name in names}
            yield from load_arrays(self.path / "dense" / f"{group:03d}", expected).items()

    def load_dense(self, dtype: np.dtype | type | None = None) -> dict[str, np.ndarray]:
        """All dense weights `[out, in]` by hub name; bf16, or converted to `dtype`."""
        return {name: value if dtype is None else value.astype(dtype) for name, value in self.iter_dense()}

    def load_layer(self, layer: int) -> dict[str, dict[int, np.ndarray]]:
        """All pages of a MoE layer in one read: `{"gate_up": {3: uint32 [E, words], .., 8: ..}, "down": {..}}`.

        The way to load everything: a read costs about 50 ms beside its bytes, and `load_pages` is a read a page.
        """
        keys = [(unit, bits) for unit in UNITS for bits in self.bits]
        expected = {page_name(unit, bits): (self._page_shape(unit, bits), np.uint32) for unit, bits in keys}
        arrays = load_arrays(self._layer("layers", layer), expected)
        return {unit: {bits: arrays[page_name(unit, bits)] for bits in self.bits} for unit in UNITS}

    def load_pages(self, layer: int, unit: int | str, bits: int) -> np.ndarray:
        """Page `bits` of one unit of every expert of a MoE layer.

        Args:
            layer: MoE layer, from 0 (not the decoder layer, where they differ).
            unit: 0 or "gate_up", 1 or "down".
            bits: 3..8.

        Returns:
            uint32 `[num_experts, page_slots(bits) * slot_words]`.
        """
        unit_name = UNITS[unit] if isinstance(unit, int) else unit
        if bits not in self.bits:
            raise UserError(f"{self.path}: no pages of {bits} bits; the store holds {self.bits[0]} to {self.bits[-1]}")
        name, shape = page_name(unit_name, bits), self._page_shape(unit_name, bits)
        return load_arrays(self._layer("layers", layer), {name: (shape, np.uint32)})[name]

    def iter_pages(self, unit: int | str, bits: int) -> Iterator[np.ndarray]:
        """`load_pages` of every MoE layer in order."""
        for layer in range(self.config.num_moe_layers):
            yield self.load_pages(layer, unit, bits)

    def load_source(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The bf16 experts of a MoE layer: gate_up `[E, 2I, H]`, down `[E, H, I]`.

        Raises:
            UserError: the store was prepared with `--no-source`.
        """
        if not self.manifest.source:
            raise UserError(
                f"{self.path}: prepared with --no-source, so --method bf16 has no experts; prepare without it"
            )
        experts = self.config.num_experts
        expected = {name: ((experts, *self.config.unit_shape(unit)), BF16) for unit, name in enumerate(UNITS)}
        arrays = load_arrays(self._layer("source", layer), expected)
        return arrays["gate_up"], arrays["down"]

    def tables(self) -> dict[str, np.ndarray]:
        """All tables that `prepare` wrote, by name, as stored."""
        return load_arrays(self.path / "tables")

    def _page_shape(self, unit_name: str, bits: int) -> tuple[int, int]:
        layout: BlockLayout = getattr(self.geometry(), unit_name)
        return self.config.num_experts, layout.page_slots(bits) * layout.slot_words

    def _layer(self, kind: str, layer: int) -> Path:
        if not 0 <= layer < self.config.num_moe_layers:
            raise IndexError(f"MoE layer {layer} of {self.config.num_moe_layers}")
        return layer_folder(self.path, kind, layer)


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give the OUT folder of `pwjax prepare`")
    if not (path / MANIFEST_NAME).is_file():
        if (path / PREPARE_NAME).is_file():
            raise UserError(f"{path}: unfinished; run the same prepare again to resume")
        raise UserError(f"{path}: not a prepared model (no {MANIFEST_NAME}); run `pwjax prepare HF_DIR {path}` first")
    try:
        return Manifest.from_dict(read_json(path / MANIFEST_NAME))
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(path)) else f"{path}/{text}") from None


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, size_bytes in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{file}: missing; the store is damaged, run prepare into a new folder")
        if file.stat().st_size != size_bytes:
            raise UserError(
                f"{file}: has {file.stat().st_size} bytes, prepare wrote {size_bytes}; "
                "the store is damaged, run prepare into a new folder"
            )
        if name in manifest.checksums and file_crc32(file) != manifest.checksums[name]:
            raise UserError(f"{file}: not as prepare wrote it; the store is damaged, run prepare into a new folder")
