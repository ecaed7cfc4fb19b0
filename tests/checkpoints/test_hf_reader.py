"""Every way a Hugging Face folder can be good: layouts, shardings, types, names that need not be there."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.hf_reader import HFCheckpoint
from tests.checkpoints.hf_folders import (
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    MIXTRAL,
    QWEN2_MOE,
    shard_name,
    standard_folder,
    tensors,
    write_folder,
)

FAMILIES = ("qwen2_moe", "mixtral")


def equal(a, b):
    """Bit-equal, types included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def validated(folder):
    checkpoint = HFCheckpoint(folder)
    checkpoint.validate()
    checkpoint.check_finite()
    return checkpoint


# What must be read


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_and_shardings_give_equal_arrays(tmp_path, family):
    weights = tensors(family, "hub")
    module = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    folders = [
        standard_folder(tmp_path / "hub1", family, "hub"),
        standard_folder(tmp_path / "hub3", family, "hub", shards=3),
        standard_folder(tmp_path / "hub3_no_index", family, "hub", shards=3, index=False),
        standard_folder(tmp_path / "fused1", family, "fused"),
        standard_folder(tmp_path / "fused2", family, "fused", shards=2),
    ]
    dense = {name.replace(module, "mlp"): value for name, value in weights.items() if ".experts." not in name}
    for folder in folders:
        checkpoint = validated(folder)
        read = dict(checkpoint.dense())
        assert read.keys() == dense.keys()
        assert all(equal(read[name], dense[name]) for name in dense)
        for layer in range(LAYERS):
            gate_up, down = checkpoint.experts(layer)
            prefix = f"model.layers.{layer}.{module}.experts"
            for e in range(EXPERTS):
                gate, up, low = (weights[f"{prefix}.{e}.{name}.weight"] for name in names)
                assert equal(gate_up[e], np.concatenate([gate, up]))
                assert equal(down[e], low)


def test_odd_shard_names_without_index(tmp_path):
    folder = standard_folder(tmp_path / "odd", shards=2, index=False)
    for number in range(2):
        (folder / shard_name(number, 2)).rename(folder / f"model.safetensors-{number + 1:05d}-of-00002.safetensors")
    assert len(validated(folder).files) == 2


def test_layout_is_detected_layer_by_layer(tmp_path):
    hub, fused = tensors("qwen2_moe", "hub"), tensors("qwen2_moe", "fused")
    mixed = {k: v for k, v in hub.items() if "layers.1.mlp.experts" not in k}
    mixed |= {k: v for k, v in fused.items() if "layers.1.mlp.experts" in k}
    checkpoint = validated(write_folder(tmp_path / "mixed", QWEN2_MOE, mixed))
    reference = validated(standard_folder(tmp_path / "hub"))
    assert [layout.kind for layout in checkpoint.layout.experts] == ["per_expert", "fused"]
    for layer in range(LAYERS):
        assert all(equal(a, b) for a, b in zip(checkpoint.experts(layer), reference.experts(layer), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_float_types(tmp_path, dtype):
    weights = tensors("qwen2_moe", "hub", dtype=dtype)
    checkpoint = validated(write_folder(tmp_path / "hf", QWEN2_MOE, weights))
    gate_up, down = checkpoint.experts(0)
    assert gate_up.dtype == down.dtype == dtype
    assert equal(gate_up[1, :INNER], weights["model.layers.0.mlp.experts.1.gate_proj.weight"])
    name = "model.layers.1.self_attn.q_proj.weight"
    assert equal(dict(checkpoint.dense())[name], weights[name].astype(ml_dtypes.bfloat16))
    assert equal(dict(checkpoint.dense(dtype=None))[name], weights[name])


def test_mixed_types_in_a_layer_become_float32(tmp_path):
    weights = tensors("qwen2_moe", "hub")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    weights[name] = np.random.default_rng(1).standard_normal((INNER, HIDDEN), np.float32)
    gate_up, down = validated(write_folder(tmp_path / "hf", QWEN2_MOE, weights)).experts(0)
    assert equal(gate_up[1, INNER:], weights[name])
    assert equal(down[2], weights["model.layers.0.mlp.experts.2.down_proj.weight"].astype(np.float32))


def test_dense_layers_between_moe_layers(tmp_path):
    config = QWEN2_MOE | {"mlp_only_layers": [0]}
    weights = {k: v for k, v in tensors("qwen2_moe", "hub").items() if "layers.0.mlp" not in k}
    for name, shape in (("gate_proj", (28, HIDDEN)), ("up_proj", (28, HIDDEN)), ("down_proj", (HIDDEN, 28))):
        weights[f"model.layers.0.mlp.{name}.weight"] = np.ones(shape, ml_dtypes.bfloat16)
    checkpoint = validated(write_folder(tmp_path / "hf", config, weights))
    assert "model.layers.0.mlp.up_proj.weight" in dict(checkpoint.dense())
    gate_up, _ = checkpoint.experts(0)  # MoE layer 0 is decoder layer 1
    assert equal(gate_up[0, :INNER], weights["model.layers.1.mlp.experts.0.gate_proj.weight"])


def test_shared_expert_gate_without_its_leading_1(tmp_path):
    weights = tensors("qwen2_moe", "hub")
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    row = weights[name]
    weights[name] = row[0].copy()
    assert equal(dict(validated(write_folder(tmp_path / "hf", QWEN2_MOE, weights)).dense())[name], row)


def test_tied_head_absent_or_equal(tmp_path):
    config = QWEN2_MOE | {"tie_word_embeddings": True}
    weights = tensors("qwen2_moe", "hub")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert "lm_head.weight" not in dict(validated(write_folder(tmp_path / "with", config, weights)).dense())
    del weights["lm_head.weight"]
    validated(write_folder(tmp_path / "without", config, weights))


def test_rotary_buffers_are_ignored_even_if_not_finite(tmp_path):
    weights = tensors("mixtral", "hub")
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.full(2, np.inf, np.float32)
    assert not any("rotary" in name for name, _ in validated(write_folder(tmp_path / "hf", MIXTRAL, weights)).dense())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_models_saved_by_transformers(tmp_path, family, layout):
    hf_models = pytest.importorskip("tests.hf_models")
    model = hf_models.save_tiny_checkpoint(tmp_path, family, seed=3, layout=layout, shards=3, dtype="float32")
    dense, experts = hf_models.dense_and_experts(model)
    checkpoint = validated(tmp_path)
    read = dict(checkpoint.dense(dtype=None))
    assert read.keys() == dense.keys()
    assert all(equal(read[name], dense[name]) for name in dense)
    for layer, (gate_up, down) in experts.items():
        read_gate_up, read_down = checkpoint.experts(layer)
        assert equal(read_gate_up, gate_up) and equal(read_down, down)
    assert {layout.kind for layout in checkpoint.layout.experts} == {"per_expert" if layout == "hub" else "fused"}


def test_files_to_copy(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        (folder / name).write_text("{}")
    names = {path.name for path in HFCheckpoint(folder).tokenizer_files()}
    assert names == {"config.json", "tokenizer.json", "generation_config.json"}


def test_progress_counts_every_byte(tmp_path):
    checkpoint = HFCheckpoint(standard_folder(tmp_path / "hf", shards=2))
    seen = []
    checkpoint.check_finite(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


# Fingerprint


def test_fingerprint_tells_sources_apart(tmp_path):
    folder = standard_folder(tmp_path / "hf", shards=2)
    shutil.copytree(folder, tmp_path / "copy")
    first = HFCheckpoint(folder).fingerprint()
    assert HFCheckpoint(tmp_path / "copy").fingerprint() == first
    other = write_folder(tmp_path / "retrained", QWEN2_MOE, tensors("qwen2_moe", "hub", seed=1), shards=2)
    assert HFCheckpoint(other).fingerprint() != first  # same headers and sizes
    (tmp_path / "copy" / "config.json").write_text(json.dumps(QWEN2_MOE | {"rope_theta": 1e6}))
    assert HFCheckpoint(tmp_path / "copy").fingerprint() != first
    assert load_file(folder / shard_name(0, 2)).keys() == load_file(other / shard_name(0, 2)).keys()
