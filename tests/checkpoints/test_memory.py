"""Host memory of a layer on its way from the Hugging Face folder into the store: below 1.5 layers and a constant."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from packaging.version import Version

from tests.checkpoints.hf_folders import QWEN2_MOE, expert_tensors, tensors, write_folder

ROOT = Path(__file__).parents[2]
EXPERTS, HIDDEN, INNER = 8, 1024, 2048
LAYER_BYTES = EXPERTS * 3 * HIDDEN * INNER * 2  # 96 MiB
CONSTANT_BYTES = 48 * 2**20
CHECK_BYTES = 24 * 2**20

MEASURE = """
import json, resource, sys
from pathlib import Path
import numpy as np
from checkpoints.hf_reader import HFCheckpoint
from checkpoints.store import PreparedWriter
from tests.checkpoints import small_store

def peak_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

folder, out = map(Path, sys.argv[1:])
with PreparedWriter(out / "warm", "x", num_moe_layers=2) as writer:  # imports and thread pools come first
    small_store.write_layer(writer, 0)
    writer.read_layer(0)
checkpoint = HFCheckpoint(folder)
checkpoint.validate()
peaks = {"start": peak_bytes()}
checkpoint.check_finite()
peaks["check_finite"] = peak_bytes()
experts = checkpoint.experts(0)
peaks["experts"] = peak_bytes()
with PreparedWriter(out / "store", "x", num_moe_layers=2) as writer:
    writer.write_source(0, *experts)
    peaks["write_source"] = peak_bytes()
    words = experts[0].view(np.uint32).reshape(experts[0].shape[0], -1)
    few = experts[1].view(np.uint32).reshape(experts[1].shape[0], -1)
    writer.write_layer(0, {"gate_up": {3: words}, "down": {3: few}})
    peaks["write_layer"] = peak_bytes()
    del experts, words, few
    pages = writer.read_layer(0)
    peaks["read_layer"] = peak_bytes()
print(json.dumps(peaks))
"""


@pytest.mark.skipif(
    Version(version("orbax-checkpoint")) < Version("0.12.8"),
    reason="older releases than pyproject.toml admits copy host arrays before they save them",
)
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_peak_of_a_layer(tmp_path, layout):
    config = QWEN2_MOE | {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "hidden_size": HIDDEN}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    config |= {"shared_expert_intermediate_size": 8}
    write_folder(tmp_path / "hf", config, large_layer(layout))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "hf"), str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    peaks = json.loads(output.splitlines()[-1])
    grown = {name: peak - peaks["start"] for name, peak in peaks.items()}
    assert grown["experts"] > 0.9 * LAYER_BYTES, f"the measurement is broken: {grown}"
    assert grown["check_finite"] < CHECK_BYTES, grown
    assert max(grown.values()) < 1.5 * LAYER_BYTES + CONSTANT_BYTES, grown
    print({name: round(value / LAYER_BYTES, 2) for name, value in grown.items()})


def large_layer(layout):
    """One MoE layer of 96 MiB with the smallest possible rest."""
    ones = {}
    for name, value in tensors("qwen2_moe", layout).items():
        if "layers.1." in name or ".experts." in name:
            continue
        shape = [{16: HIDDEN, 24: 8, 20: 8, 3: EXPERTS}.get(size, size) for size in value.shape]
        if "k_proj" in name or "v_proj" in name:
            shape[0] = 16
        ones[name] = np.ones(shape, ml_dtypes.bfloat16)
    gate = np.ones((EXPERTS, INNER, HIDDEN), ml_dtypes.bfloat16)
    down = np.ones((EXPERTS, HIDDEN, INNER), ml_dtypes.bfloat16)
    return ones | expert_tensors("qwen2_moe", layout, "model.layers.0.mlp.experts", gate, gate, down)
