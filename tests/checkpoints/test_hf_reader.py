"""Every way a Hugging Face folder can be good, and every fault that must be named before anything is written."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.hf_reader import HFCheckpoint
from pwjax.errors import UserError
from tests.checkpoints.hf_folders import (
    CONFIGS,
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


def fault(folder, *words, finite=False):
    """The one-line error of a folder, which must contain every one of `words`."""
    with pytest.raises(UserError) as caught:
        checkpoint = HFCheckpoint(folder)
        checkpoint.validate()
        if finite:
            checkpoint.check_finite()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message
    return message


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


# Faults of the folder


def test_no_folder_no_config_no_weights(tmp_path):
    fault(tmp_path / "absent", tmp_path / "absent", "no such folder")
    (tmp_path / "empty").mkdir()
    fault(tmp_path / "empty", "config.json", "missing")
    folder = standard_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fault(folder, folder, "no *.safetensors", "pytorch_model.bin", "convert")
    (folder / "config.json").write_text("{")
    fault(folder, "config.json", "JSON")


def test_quantized_checkpoint_is_refused(tmp_path):
    config = QWEN2_MOE | {"quantization_config": {"quant_method": "gptq"}}
    fault(write_folder(tmp_path / "hf", config, tensors("qwen2_moe", "hub")), "config.json", "gptq")


def test_missing_shard(tmp_path):
    folder = standard_folder(tmp_path / "hf", shards=3)
    (folder / shard_name(1, 3)).unlink()
    fault(folder, "model.safetensors.index.json", shard_name(1, 3), "1 of 3")


def test_missing_shard_without_index(tmp_path):
    folder = standard_folder(tmp_path / "hf", shards=3, index=False)
    (folder / shard_name(1, 3)).unlink()
    fault(folder, folder, "missing")


def test_stale_index_naming_other_shards(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    index = {"weight_map": {name: shard_name(0, 4) for name in tensors("qwen2_moe", "hub")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fault(folder, "model.safetensors.index.json", shard_name(0, 4), "found model.safetensors", "stale")


def test_stale_index_placing_tensors_elsewhere(tmp_path):
    folder = standard_folder(tmp_path / "hf", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard_name(0, 2)
    path.write_text(json.dumps(index))
    fault(folder, "model.safetensors.index.json", "model.norm.weight", shard_name(0, 2), shard_name(1, 2))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_unreadable_index(tmp_path, text):
    folder = standard_folder(tmp_path / "hf", shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    fault(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("keep", [0, 5, 20, 600, -1])
def test_truncated_shard(tmp_path, keep):
    folder = standard_folder(tmp_path / "hf", shards=2)
    file = folder / shard_name(1, 2)
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    fault(folder, file, "truncated")


def test_file_longer_than_its_header_says(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"more")
    fault(folder, "model.safetensors", "longer")


def test_damaged_header(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[8:12] = b"\x00\xff\x00\xff"
    (folder / "model.safetensors").write_bytes(content)
    fault(folder, "model.safetensors", "header")


def test_overlapping_tensors(tmp_path):
    """Offsets that fit the file but not the format."""
    folder = standard_folder(tmp_path / "hf")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    one, two = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    header[one]["data_offsets"] = header[two]["data_offsets"]
    raw = json.dumps(header, separators=(",", ":")).encode()
    assert len(raw) <= header_bytes
    file.write_bytes(content[:8] + raw.ljust(header_bytes) + content[8 + header_bytes :])
    fault(folder, file, "not a valid safetensors file")


def test_git_lfs_pointer(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    fault(folder, "model.safetensors", "git lfs pull")


def test_tensor_in_two_files(tmp_path):
    folder = standard_folder(tmp_path / "hf")
    save_file({"model.norm.weight": np.ones(HIDDEN, np.float32)}, folder / "extra.safetensors")
    fault(folder, "model.norm.weight", "extra.safetensors", "model.safetensors")


# Faults of the tensors


@pytest.mark.parametrize(
    "family, name",
    [
        ("qwen2_moe", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen2_moe", "model.layers.0.mlp.experts.2.up_proj.weight"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w2.weight"),
        ("mixtral", "model.norm.weight"),
    ],
)
def test_missing_tensor(tmp_path, family, name):
    weights = tensors(family, "hub")
    del weights[name]
    fault(write_folder(tmp_path / "hf", CONFIGS[family], weights), tmp_path / "hf", "1 tensor is missing", name)


def test_missing_fused_tensor(tmp_path):
    weights = tensors("qwen2_moe", "fused")
    del weights["model.layers.1.mlp.experts.down_proj"]
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    fault(folder, "1 tensor is missing", "model.layers.1.mlp.experts.down_proj")


def test_missing_tensors_are_counted(tmp_path):
    weights = {k: v for k, v in tensors("qwen2_moe", "hub").items() if "layers.1." not in k}
    count = len(tensors("qwen2_moe", "hub")) - len(weights)
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    message = fault(folder, f"{count} tensors are missing", "model.layers.1.input_layernorm.weight")
    assert len(message) < 400


def test_missing_head_of_an_untied_model(tmp_path):
    weights = tensors("qwen2_moe", "hub")
    del weights["lm_head.weight"]
    fault(write_folder(tmp_path / "hf", QWEN2_MOE, weights), "lm_head.weight", "tie_word_embeddings")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.3.gate_proj.weight",  # one expert too many
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq.scale",  # not quite an ignorable name
    ],
)
def test_unexpected_tensor(tmp_path, name):
    weights = tensors("qwen2_moe", "hub") | {name: np.ones((INNER, HIDDEN), ml_dtypes.bfloat16)}
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    fault(folder, "1 unexpected tensor", name, "model.safetensors")


def test_both_layouts_in_one_layer(tmp_path):
    weights = tensors("mixtral", "hub") | tensors("mixtral", "fused")
    fault(write_folder(tmp_path / "hf", MIXTRAL, weights), "layer 0", "both layouts")


def test_router_under_both_names(tmp_path):
    weights = tensors("mixtral", "hub")
    weights["model.layers.0.mlp.gate.weight"] = weights["model.layers.0.block_sparse_moe.gate.weight"].copy()
    folder = write_folder(tmp_path / "hf", MIXTRAL, weights)
    fault(folder, "unexpected", "model.layers.0.block_sparse_moe.gate.weight")


@pytest.mark.parametrize(
    "name, shape",
    [
        ("model.layers.0.self_attn.k_proj.weight", (HIDDEN, HIDDEN)),
        ("model.layers.0.mlp.experts.1.down_proj.weight", (INNER, HIDDEN)),  # transposed
        ("model.layers.0.mlp.shared_expert_gate.weight", (2, HIDDEN)),
        ("model.embed_tokens.weight", (25, HIDDEN)),
    ],
)
def test_wrong_shape(tmp_path, name, shape):
    weights = tensors("qwen2_moe", "hub") | {name: np.ones(shape, ml_dtypes.bfloat16)}
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    fault(folder, folder / "model.safetensors", name, list(shape))


def test_wrong_shape_in_the_fused_layout(tmp_path):
    weights = tensors("qwen2_moe", "fused")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights[name] = np.ascontiguousarray(weights[name].transpose(0, 2, 1))
    fault(write_folder(tmp_path / "hf", QWEN2_MOE, weights), name, [EXPERTS, HIDDEN, 2 * INNER])


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_unsupported_type(tmp_path, dtype):
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    weights = tensors("qwen2_moe", "hub")
    weights[name] = np.ones((HIDDEN, INNER)).astype(dtype)
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    fault(folder, folder / "model.safetensors", name, "BF16, F16, F32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_values_that_are_not_finite(tmp_path, value, dtype):
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weights = tensors("qwen2_moe", "fused", dtype=dtype)
    weights[name][1, 5, 7] = value
    weights[name][2, 0, 0] = value
    folder = write_folder(tmp_path / "hf", QWEN2_MOE, weights)
    fault(folder, folder / "model.safetensors", name, "[1, 5, 7]", value, finite=True)


def test_first_bad_index_past_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints.hf_reader._CHECK_CHUNK_BYTES", 50)
    weights = tensors("mixtral", "hub")
    weights["lm_head.weight"][23, 15] = np.nan
    fault(write_folder(tmp_path / "hf", MIXTRAL, weights), "lm_head.weight", "[23, 15]", finite=True)
    validated(standard_folder(tmp_path / "good"))


def test_largest_finite_values_pass(tmp_path):
    for dtype in (ml_dtypes.bfloat16, np.float16):
        weights = tensors("mixtral", "hub", dtype=dtype)
        weights["model.norm.weight"][:] = ml_dtypes.finfo(dtype).max
        validated(write_folder(tmp_path / np.dtype(dtype).name, MIXTRAL, weights))


def test_tied_head_that_differs(tmp_path):
    config = QWEN2_MOE | {"tie_word_embeddings": True}
    folder = write_folder(tmp_path / "hf", config, tensors("qwen2_moe", "hub"))
    fault(folder, "lm_head.weight", "tie_word_embeddings", finite=True)


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
