"""The training model: its checkpoint, its parity with transformers, its losses and one step of the loop."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pwjax.demo.export import hub_tensors, load_params, save_checkpoint
from pwjax.demo.model import DemoConfig, DemoMoe
from pwjax.demo.training import TrainConfig, balance_loss, batches, starved_loss, train_model

SMALL = DemoConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, max_position_embeddings=32,
)  # fmt: skip


def small_corpus() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "natural": rng.integers(0, 64, 1000).astype(np.uint16),
        "synthetic": rng.integers(0, 64, (8, 16)).astype(np.uint16),
    }


def test_checkpoint_round_trip_is_exact(tmp_path: Path):
    _, params = nnx.split(DemoMoe(SMALL, nnx.Rngs(0)))
    save_checkpoint(params, SMALL, 63, tmp_path, shards=2)
    _, loaded = load_params(tmp_path, SMALL)
    expected, found = hub_tensors(params), hub_tensors(loaded)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensor.astype(np.float32), found[name].astype(np.float32), err_msg=name)


def test_logits_match_transformers(tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, params = nnx.split(DemoMoe(SMALL, nnx.Rngs(0)))
    save_checkpoint(params, SMALL, 63, tmp_path)
    graph, params = load_params(tmp_path, SMALL)
    model = nnx.merge(graph, params)
    ids = np.random.default_rng(0).integers(0, 64, (2, 20))
    with jax.default_matmul_precision("highest"):  # a GPU would multiply in TF32
        ours = model.logits(model.hidden(jnp.asarray(ids), jnp.float32)[0])
    reference, info = transformers.Qwen2MoeForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    with torch.no_grad():
        theirs = reference(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4)


def test_starved_loss_touches_starved_experts_only():
    log_prob = jnp.log(jnp.array([[0.7, 0.2, 0.099, 0.001]]))
    stats = {"share": jnp.array([[0.6, 0.3, 0.1, 0.0]]), "log_prob": log_prob}
    assert float(starved_loss(stats, 0.1)) == pytest.approx(-float(log_prob[0, 3]))
    assert float(starved_loss(stats | {"share": jnp.full((1, 4), 0.25)}, 0.1)) == 0


def test_balance_loss_is_one_when_uniform():
    uniform = {"share": jnp.full((2, 4), 0.25), "prob": jnp.full((2, 4), 0.25)}
    assert float(balance_loss(uniform)) == pytest.approx(1.0)


def test_schedules():
    train = TrainConfig()
    assert train.learning_rate(0, 0.0) == pytest.approx(train.peak_learning_rate / train.warmup_steps)
    assert train.learning_rate(5000, 0.5) == train.peak_learning_rate
    assert train.learning_rate(5000, 1.0) == 0
    assert train.balance_weight(0.0) == train.balance_start
    assert train.balance_weight(1.0) == pytest.approx(train.balance_end)


def test_batches_visit_every_synthetic_window_once_an_epoch():
    train = TrainConfig(batch_windows=4, window_tokens=16, synthetic_share=0.5)
    source = batches(small_corpus(), train)
    seen = [next(source) for _ in range(4)]
    assert sorted(np.concatenate([rows for _, rows in seen])) == list(range(8))
    assert all(0 <= start <= 1000 - 16 for starts, _ in seen for start in starts)


def test_training_saves_first_and_last_and_learns_something():
    train = dataclasses.replace(
        TrainConfig(), seconds=1.0, batch_windows=4, window_tokens=16, warmup_steps=1, log_every_steps=1
    )
    saved, lines = [], []
    corpus = {name: np.full_like(part, 7) for name, part in small_corpus().items()}  # one token, over and over
    train_model(SMALL, train, corpus, lambda params: saved.append(hub_tensors(params)), lines.append)
    assert len(saved) == 2
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
