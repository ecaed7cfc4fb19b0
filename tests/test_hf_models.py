"""The test checkpoints are what they claim: transformers reads back the model that was returned."""

import json

import numpy as np
import pytest

from tests.hf_models import END_OF_TEXT, hf_logits, save_tiny_checkpoint, transformers


@pytest.mark.parametrize(("family", "layout", "shards"), [
    ("qwen2_moe", "hub", 1),
    ("qwen2_moe", "fused", 3),
    ("mixtral", "hub", 3),
    ("mixtral", "fused", 1),
])  # fmt: skip
def test_round_trip(tmp_path, family, layout, shards):
    model = save_tiny_checkpoint(tmp_path, family, seed=1, layout=layout, shards=shards)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if shards == 1 else len(files) >= shards
    assert ("rope_theta" in json.loads((tmp_path / "config.json").read_text())) == (layout == "hub")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    tokens = np.arange(10)[None] * 7
    np.testing.assert_allclose(hf_logits(again, tokens), hf_logits(model, tokens), rtol=1e-5, atol=1e-5)


def test_byte_tokenizer(tmp_path):
    save_tiny_checkpoint(tmp_path, "mixtral", seed=1, num_hidden_layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("Hé 12")
    assert len(ids) == len("Hé 12".encode()) and tokenizer.decode(ids) == "Hé 12"
    assert len(tokenizer) == 257 and tokenizer.eos_token == END_OF_TEXT and tokenizer.eos_token_id == 256
