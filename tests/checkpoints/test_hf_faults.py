"""Every fault of a Hugging Face folder is named, in one line, before anything is written."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.hf_reader import HFCheckpoint
from pwjax.errors import UserError
from tests.checkpoints.hf_folders import (
    CONFIGS,
    EXPERTS,
    HIDDEN,
    INNER,
    MIXTRAL,
    QWEN2_MOE,
    shard_name,
    standard_folder,
    tensors,
    write_folder,
)


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
