"""The prepared store: exact round trips, resuming after a kill anywhere, and no damage that passes unnoticed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from checkpoints.orbax_io import load_arrays, save_arrays, stored_specs
from checkpoints.store import PreparedModel
from checkpoints.writer import DENSE_INDEX_NAME
from pwjax.errors import UserError
from tests.checkpoints import small_store
from tests.checkpoints.hf_folders import standard_folder
from tests.checkpoints.small_store import (
    CONFIG,
    GEOMETRY,
    MANIFEST,
    check_contents,
    equal,
    prepare,
    writer_for,
)

LAYERS = CONFIG.num_moe_layers
ROOT = Path(__file__).parents[2]


# Round trips


def test_everything_comes_back_exactly(finished):
    check_contents(finished)
    model = PreparedModel(str(finished))
    assert model.config == CONFIG
    assert model.geometry() == GEOMETRY
    assert model.bits == (3, 4, 5, 6, 7, 8)
    assert model.manifest.max_bits == 6 and model.manifest.source and model.manifest.policy == {}
    assert model.manifest.quantization == {"relative_error_by_bits": {"3": 0.25}}
    assert (model.tokenizer_path / "config.json").is_file()
    assert {value.dtype for value in model.load_dense(np.float32).values()} == {np.dtype(np.float32)}
    left = {path.name for path in finished.iterdir()}
    assert left == {"manifest.json", "config.json", "dense", "dense.json", "layers", "source", "tables"}


def test_single_pages(finished):
    model = PreparedModel(finished)
    for bits in (3, 6, 8):
        for index, unit in enumerate(("gate_up", "down")):
            given = small_store.pages(1)[unit][bits]
            assert equal(model.load_pages(1, unit, bits), given) and equal(model.load_pages(1, index, bits), given)
    layers = list(model.iter_pages("down", 5))
    assert len(layers) == LAYERS
    assert all(equal(read, small_store.pages(layer)["down"][5]) for layer, read in enumerate(layers))
    with pytest.raises(IndexError):
        model.load_pages(LAYERS, 0, 3)


def test_dense_groups(tmp_path, monkeypatch):
    """Groups of at most the limit, a larger tensor alone; names and values survive."""
    monkeypatch.setattr("checkpoints.writer.DENSE_GROUP_BYTES", 160)
    standard_folder(tmp_path / "hf")
    prepare(tmp_path / "out", tmp_path / "hf")
    groups = json.loads((tmp_path / "out" / "dense.json").read_text())
    assert list(groups.values()) == [0, 0, 1, 2]  # 70 + 84, 98, 112 bytes
    assert len(list((tmp_path / "out" / "dense").iterdir())) == 3
    check_contents(tmp_path / "out")


def test_without_source(tmp_path):
    standard_folder(tmp_path / "hf")
    with writer_for(tmp_path / "out", source=False) as writer:
        writer.copy_files([tmp_path / "hf" / "config.json"])
        writer.write_dense(iter(small_store.dense().items()))
        for layer in range(LAYERS):
            assert not writer.has_layer(layer)
            writer.write_layer(layer, small_store.pages(layer))
            writer.write_layer_stats(layer, {})
            assert writer.has_layer(layer)
        writer.write_tables(small_store.tables())
        assert not writer.finish(MANIFEST).source
    with pytest.raises(UserError, match="--no-source"):
        PreparedModel(tmp_path / "out").load_source(0)


def test_fewer_pages(tmp_path):
    standard_folder(tmp_path / "hf")
    with writer_for(tmp_path / "out", source=False) as writer:
        writer.copy_files([tmp_path / "hf" / "config.json"])
        writer.write_dense(small_store.dense())
        for layer in range(LAYERS):
            few = {unit: {bits: by_bits[bits] for bits in (3, 4)} for unit, by_bits in small_store.pages(layer).items()}
            writer.write_layer(layer, few)
        writer.write_tables(small_store.tables())
        writer.finish(MANIFEST | {"page_bits": 4, "max_bits": 4})
    model = PreparedModel(tmp_path / "out")
    assert equal(model.load_pages(1, 0, 4), small_store.pages(1)["gate_up"][4])
    with pytest.raises(UserError, match="no pages of 5 bits"):
        model.load_pages(1, 0, 5)


def test_a_page_is_read_without_the_others(damaged):
    """Partial load: the other unit's array may even be gone from the checkpoint's tree."""
    folder = damaged / "layers" / "001"
    pages = load_arrays(folder)
    shutil.rmtree(folder)
    save_arrays(folder, {"gate_up.4": pages["gate_up.4"]})
    read = load_arrays(folder, {"gate_up.4": (pages["gate_up.4"].shape, np.uint32)})
    assert list(read) == ["gate_up.4"] and equal(read["gate_up.4"], pages["gate_up.4"])


def test_jax_arrays_and_slices_can_be_written(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    save_arrays(tmp_path / "one", {"a": np.asarray(jax.numpy.asarray(array)), "b": array[:, ::2], "c": array.T})
    read = load_arrays(tmp_path / "one")
    assert equal(read["a"], array) and equal(read["b"], array[:, ::2].copy()) and equal(read["c"], array.T.copy())


# Types are pinned


@pytest.mark.parametrize("stored", [np.int32, np.float32, np.uint8])
def test_pages_of_another_type_are_refused(damaged, stored):
    folder = damaged / "layers" / "000"
    pages = load_arrays(folder)
    shutil.rmtree(folder)
    save_arrays(folder, pages | {"down.5": pages["down.5"].astype(stored)})
    model = PreparedModel.__new__(PreparedModel)
    model.__dict__.update(path=damaged, manifest=PreparedModel(copy_of_manifest(damaged)).manifest, config=CONFIG)
    assert equal(model.load_pages(0, "down", 4), small_store.pages(0)["down"][4])
    with pytest.raises(UserError, match=f"down.5.*{np.dtype(stored)}.*uint32"):
        model.load_pages(0, "down", 5)


def copy_of_manifest(out):
    """A manifest without the list of files, so that only the arrays themselves are checked."""
    fields = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(fields | {"files": {}, "checksums": {}}))
    return out


def test_dense_and_source_of_another_type_or_shape_are_refused(damaged):
    copy_of_manifest(damaged)
    group = load_arrays(damaged / "dense" / "000")
    shutil.rmtree(damaged / "dense" / "000")
    save_arrays(damaged / "dense" / "000", {name: value.astype(np.float32) for name, value in group.items()})
    source = load_arrays(damaged / "source" / "001")
    shutil.rmtree(damaged / "source" / "001")
    save_arrays(damaged / "source" / "001", source | {"down": source["down"][:, :-1]})
    model = PreparedModel(damaged)
    with pytest.raises(UserError, match=r"dense/000.*float32.*bfloat16"):
        model.load_dense()
    with pytest.raises(UserError, match=r"source/001.*'down' has shape"):
        model.load_source(1)
    assert stored_specs(damaged / "source" / "001")["gate_up"][1] == ml_dtypes.bfloat16


def test_orbax_would_have_cast(tmp_path):
    """The reason for the checks: if this fails, Orbax has become strict and they can go."""
    save_arrays(tmp_path / "one", {"a": np.full(3, 300, np.uint32)})
    abstract = {"a": jax.ShapeDtypeStruct((3,), np.uint8, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    assert ocp.load(str(tmp_path / "one"), abstract)["a"].dtype == np.uint8


# Damage is noticed


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("part", ["layers/001", "source/000", "dense/000", "tables"])
def test_truncated_and_missing_files_are_named_at_once(damaged, part):
    file = largest_file(damaged / part)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{file}: has {len(content) - 1} bytes, prepare wrote {len(content)}"):
        PreparedModel(damaged)
    file.unlink()
    with pytest.raises(UserError, match=f"{file}: missing"):
        PreparedModel(damaged)


def flip(file):
    """Changes one bit in the middle of a file; returns what was there."""
    original = file.read_bytes()
    changed = bytearray(original)
    changed[len(original) // 2] ^= 0x40
    file.write_bytes(changed)
    return original


def test_a_changed_bit_in_any_file_is_named_at_once(damaged):
    files = [path for path in damaged.rglob("*") if path.stat().st_size and path.name != "manifest.json"]
    files = [path for path in files if path.is_file()]
    assert len(files) > 40
    for file in files:
        original = flip(file)
        with pytest.raises(UserError) as caught:
            PreparedModel(damaged)
        assert str(file) in str(caught.value)
        file.write_bytes(original)
    PreparedModel(damaged)


FLIP_EVERY_FILE = """
import json, sys
from pathlib import Path
from pwjax.errors import UserError
from tests.checkpoints.small_store import check_contents
from tests.checkpoints.test_store import flip

out, noticed = Path(sys.argv[1]), {}
for part in ("layers/001", "source/001", "dense/000", "tables"):
    for file in sorted(path for path in (out / part).rglob("*") if path.is_file() and path.stat().st_size):
        original = flip(file)
        try:
            check_contents(out, part.split("/")[0])  # harmless bits exist: times, copies of an index
        except UserError as error:
            noticed.setdefault(part, []).append(str(error))
        file.write_bytes(original)
check_contents(out)
print(json.dumps(noticed))
"""


def test_a_changed_bit_is_noticed_on_reading(damaged):
    """Without the manifest's checksums (which spare large files): a fault that names the folder, or exact values.

    In a process of its own, because Orbax leaves tasks behind when one of them fails.
    """
    copy_of_manifest(damaged)
    command = [sys.executable, "-c", FLIP_EVERY_FILE, str(damaged)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    noticed = json.loads(output.splitlines()[-1])
    for part in ("layers/001", "source/001", "dense/000", "tables"):
        assert noticed[part]
        assert all(part in message and "\n" not in message for message in noticed[part])


def test_a_changed_bit_in_values_is_noticed(tmp_path):
    """Orbax itself would return the changed values."""
    save_arrays(tmp_path / "one", {"a": np.random.default_rng(0).random(2**17), "b": np.zeros(3)})
    flip(largest_file(tmp_path / "one"))
    assert ocp.load(str(tmp_path / "one")).keys() == {"a", "b"}
    with pytest.raises(UserError, match=r"one: array 'a' is corrupted \(its checksum differs\)"):
        load_arrays(tmp_path / "one")


def test_missing_parts_without_a_list_of_files(damaged):
    copy_of_manifest(damaged)
    shutil.rmtree(damaged / "layers" / "001")
    model = PreparedModel(damaged)
    model.load_pages(0, 0, 3)
    with pytest.raises(UserError, match="layers/001: no complete checkpoint"):
        model.load_pages(1, 0, 3)
    (damaged / DENSE_INDEX_NAME).write_text("{")
    with pytest.raises(UserError, match=r"dense\.json"):
        model.load_dense()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format_version": 99}, "format_version is 99"),
        ({"max_bits": 2}, "max_bits 2"),
        ({"slot_words": "128"}, "slot_words is '128'"),
        ({"lut_rows": {"gate_up": 32}}, "lut_rows"),
        ({"surprise": 1}, "unknown fields surprise"),
        ({"model": None}, "model is None"),
    ],
)
def test_bad_manifest(damaged, change, words):
    file = damaged / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=words) as caught:
        PreparedModel(damaged)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_manifest_without_a_field_or_cut(damaged):
    file = damaged / "manifest.json"
    fields = json.loads(file.read_text())
    del fields["slot_words"]
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="fields slot_words are missing"):
        PreparedModel(damaged)
    file.write_text(file.read_text()[:40])
    with pytest.raises(UserError, match=r"manifest\.json: can't be read as JSON"):
        PreparedModel(damaged)


def test_not_a_store(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        PreparedModel(tmp_path / "absent")
    with pytest.raises(UserError, match="hf: not a prepared model"):
        PreparedModel(standard_folder(tmp_path / "hf"))
