"""Writing the store: resumes after a kill anywhere, and never touches what is not its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints.store import PreparedModel
from checkpoints.writer import DENSE_INDEX_NAME
from pwjax.errors import UserError
from tests.checkpoints import small_store
from tests.checkpoints.hf_folders import standard_folder
from tests.checkpoints.small_store import CONFIG, FINGERPRINT, MANIFEST, check_contents, equal, prepare, writer_for

LAYERS = CONFIG.num_moe_layers
ROOT = Path(__file__).parents[2]


# Nothing unfinished loads; everything resumes

KILLS = (
    ("os.rename", DENSE_INDEX_NAME),  # dense weights written, their index not
    ("os.rename", "source/000"),  # before Orbax renames a finished save into place
    ("os.rename", "layers/001"),
    ("os.rename", "layer-001.npz"),
    ("os.rename", "manifest.json"),  # all written, manifest not
)


def test_kill_at_any_moment_and_resume(tmp_path):
    out = tmp_path / "out"
    standard_folder(tmp_path / "hf")
    for event, suffix in KILLS:
        command = [sys.executable, "-m", "tests.checkpoints.small_store", str(out), event, suffix]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert child.returncode == -9, child.stderr
        assert not list(out.glob(suffix)), "killed too late"
        with pytest.raises(UserError, match=r"unfinished; run the same prepare again to resume") as caught:
            PreparedModel(out)
        assert "\n" not in str(caught.value)
        if suffix == "layers/001":
            assert list((out / "layers").glob("001.*")), "the kill left no half-written save: the test shows nothing"
    assert prepare(out, tmp_path / "hf") == []  # every layer was there already
    check_contents(out)
    assert not [path for path in out.rglob("*") if "tmp" in path.name]


def test_half_written_layer_does_not_count(tmp_path):
    with writer_for(tmp_path / "out") as writer:
        small_store.write_layer(writer, 0)
        assert writer.has_layer(0) and not writer.has_layer(1)
        writer.write_layer(1, small_store.pages(1))
        assert not writer.has_layer(1)
        writer.write_source(1, *small_store.experts(1))
        assert not writer.has_layer(1)
        writer.write_layer_stats(1, {"x": 1})
        assert writer.has_layer(1)
        (tmp_path / "out" / "layers" / "001").rename(tmp_path / "out" / "layers" / "001.orbax-checkpoint-tmp")
    with writer_for(tmp_path / "out") as writer:
        assert writer.resumed and writer.has_layer(0) and not writer.has_layer(1)
        assert not (tmp_path / "out" / "layers" / "001.orbax-checkpoint-tmp").exists()


def test_resumed_run_reads_what_it_had(tmp_path):
    with writer_for(tmp_path / "out") as writer:
        assert not writer.resumed
        small_store.write_layer(writer, 1)
        writer.write_state("decisions", {"slot_words": 128, "lut": np.array([1, 32])})
    with writer_for(tmp_path / "out") as writer:
        assert writer.resumed and writer.has_state("decisions") and not writer.has_state("other")
        stats = writer.read_layer_stats(1)
        assert equal(stats["importance"], np.full((2, 3), 1, np.float32)) and stats["tokens"] == 7
        assert writer.read_state("decisions")["slot_words"] == 128
        read, given = writer.read_layer(1), small_store.pages(1)
        assert {unit: sorted(by_bits) for unit, by_bits in read.items()} == {
            "gate_up": [*range(3, 9)],
            "down": [*range(3, 9)],
        }
        assert all(equal(read[unit][bits], given[unit][bits]) for unit in given for bits in given[unit])
        with pytest.raises(UserError, match=r"other\.npz"):
            writer.read_state("other")


def test_finish_refuses_an_incomplete_store(tmp_path):
    standard_folder(tmp_path / "hf")
    with writer_for(tmp_path / "out") as writer:
        writer.copy_files([tmp_path / "hf" / "config.json"])
        writer.write_dense(small_store.dense())
        writer.write_tables(small_store.tables())
        small_store.write_layer(writer, 0)
        with pytest.raises(UserError, match="layers/001: not written"):
            writer.finish(MANIFEST)
        small_store.write_layer(writer, 1)
        with pytest.raises(UserError, match="max_bits"):
            writer.finish(MANIFEST | {"max_bits": 9})
        assert not (tmp_path / "out" / "manifest.json").exists()
        writer.finish(MANIFEST)
    check_contents(tmp_path / "out")


def test_bad_pages_are_refused(tmp_path):
    with writer_for(tmp_path / "out") as writer:
        good = small_store.pages(0)
        for bad in (
            {"gate_up": good["gate_up"]},
            good | {"down": {3: good["down"][3], 5: good["down"][5]}},
            good | {"down": {**good["down"], 3: good["down"][3].astype(np.int32)}},
            good | {"down": {**good["down"], 9: good["down"][8]}},
        ):
            with pytest.raises(ValueError, match="expected"):
                writer.write_layer(0, bad)
        with pytest.raises(ValueError, match="needs elements"):
            writer.write_tables({"empty": np.zeros((0, 3))})


# Nothing of the user's is touched


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_foreign_folder_is_not_touched(tmp_path):
    folder = tmp_path / "photos"
    (folder / "layers" / "000").mkdir(parents=True)
    (folder / "layers" / "000" / "cat.jpg").write_bytes(b"meow")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="photos: not empty, and not an unfinished prepare"):
        writer_for(folder)
    assert snapshot(tmp_path) == before


def test_source_folder_as_out_is_not_touched(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="not empty"):
        writer_for(folder)
    assert snapshot(tmp_path) == before


def test_finished_store_is_not_touched(damaged):
    before = snapshot(damaged)
    with pytest.raises(UserError, match="already holds a finished model"):
        writer_for(damaged)
    assert snapshot(damaged) == before


def test_unfinished_store_of_other_options_is_not_touched(tmp_path):
    with writer_for(tmp_path / "out") as writer:
        small_store.write_layer(writer, 0)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="unfinished prepare with other lut_rows"):
        writer_for(tmp_path / "out", FINGERPRINT | {"lut_rows": "1"})
    with pytest.raises(UserError, match="with other source"):
        writer_for(tmp_path / "out", FINGERPRINT | {"source": "abd"})
    assert snapshot(tmp_path) == before


def test_out_is_a_file(tmp_path):
    (tmp_path / "out").write_text("notes")
    with pytest.raises(UserError, match="is a file"):
        writer_for(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "notes"


def test_empty_folder_and_missing_parents_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        with writer_for(out, "fingerprint") as writer:
            assert not writer.resumed


def test_two_prepares_at_once(tmp_path):
    with writer_for(tmp_path / "out"), pytest.raises(UserError, match="another prepare is writing"):
        writer_for(tmp_path / "out")
    with writer_for(tmp_path / "out") as writer:
        assert writer.resumed
