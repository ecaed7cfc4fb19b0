"""Checks a demo checkpoint against transformers: every key is loaded, float32 logits agree, greedy answers are right.

    python scripts/check_demo.py --model checkpoints/demo-moe [--items 10]

Needs torch and transformers (CPU is enough); the JAX side is the training model of `pwjax/demo/model.py`.
"""

import argparse
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import AutoTokenizer, Qwen2MoeForCausalLM

from pwjax.demo.export import load_params
from pwjax.demo.model import DemoConfig
from pwjax.demo.synthetic import arithmetic_answer, arithmetic_test_set, retrieval_answer, retrieval_test_set

_MAX_LOGIT_ERROR = 1e-4


def load_reference(directory: Path, dtype: torch.dtype) -> Any:
    """The transformers model; raises if a key is missing, unexpected or of another shape."""
    # With `output_loading_info` the result is a pair, which the stubs of transformers don't say.
    loaded: Any = Qwen2MoeForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    model, info = loaded
    problems = {name: found for name, found in info.items() if found}
    if problems:
        raise ValueError(f"{directory} does not load cleanly: {problems}")
    return model.eval()


def check_logits(directory: Path, token_ids: list[int]) -> float:
    """Largest difference between JAX and torch logits in float32."""
    graph, params = load_params(directory, DemoConfig())
    model = nnx.merge(graph, params)
    hidden, _ = model.hidden(jnp.array([token_ids]), jnp.float32)
    ours = np.asarray(model.logits(hidden)[0])
    with torch.no_grad():
        theirs = load_reference(directory, torch.float32)(torch.tensor([token_ids])).logits[0].numpy()
    error = float(np.abs(ours - theirs).max())
    if error > _MAX_LOGIT_ERROR * max(1.0, float(np.abs(theirs).max())):
        raise ValueError(f"logits differ by {error}")
    return error


def main() -> None:
    """Loads, compares, decodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"))
    parser.add_argument("--items", type=int, default=10, help="test items a task")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = "".join(item.prompt + "\n" for item in retrieval_test_set(1, 16)) + "The history of the town begins in 1820."
    ids = tokenizer(text)["input_ids"]
    if tokenizer.decode(ids) != text:
        raise ValueError("the tokenizer does not round-trip")
    print(f"{type(tokenizer).__name__}, eos {tokenizer.eos_token_id}, bos {tokenizer.bos_token_id}")
    print(f"largest logit difference over {len(ids)} tokens: {check_logits(args.model, ids):.2e}")

    model = load_reference(args.model, torch.bfloat16)
    tasks = [
        (f"arithmetic {family}", arithmetic_test_set(args.items, family), arithmetic_answer, 32)
        for family in ("one-step", "two-step")
    ]
    tasks += [
        (f"retrieval among {keys}", retrieval_test_set(args.items, keys), retrieval_answer, 14) for keys in (16, 64)
    ]
    for name, items, answer, num_new in tasks:
        right = 0
        for item in items:
            inputs = tokenizer(item.prompt, return_tensors="pt")
            out = model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
            right += answer(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])) == item.answer
        print(f"{name}: {right} of {len(items)}")


if __name__ == "__main__":
    main()
