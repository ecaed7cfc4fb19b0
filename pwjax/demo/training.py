"""The training loop: AdamW on a wall-clock budget, 70% natural text and 30% synthetic documents in every batch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pwjax.demo.model import DemoConfig, DemoMoe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The recipe. `seconds` is the budget of training alone, compilation left out.

    Experts with less than `starved_share` of the mean load are pulled up by `starved_loss`.
    """

    seconds: float = 400.0
    batch_windows: int = 24
    window_tokens: int = 4096
    synthetic_share: float = 0.3
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 200
    tail: float = 0.3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    balance_start: float = 3e-3
    balance_end: float = 1e-4
    starved_weight: float = 3e-3
    starved_share: float = 0.1
    seed: int = 0
    log_every_steps: int = 100
    save_every_seconds: float = 120.0

    def learning_rate(self, step: int, progress: float) -> float:
        """Linear warm-up by step; constant; linear to zero over the last `tail` of the time."""
        return self.peak_learning_rate * min(1.0, (step + 1) / self.warmup_steps, (1 - progress) / self.tail)

    def balance_weight(self, progress: float) -> float:
        """Strong enough early to keep every expert alive, then weak, so that experts may differ in load."""
        mix = min(1.0, max(0.0, (progress - 0.2) / 0.4))
        return self.balance_start + mix * (self.balance_end - self.balance_start)


def _decayed(params: nnx.State) -> nnx.State:
    """Weight decay on matrices only: no norms, no biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(name in jax.tree_util.keystr(path) for name in ("norm", "bias")), params
    )


def balance_loss(stats: dict[str, jax.Array]) -> jax.Array:
    """Switch-style: experts x sum(share of tokens x mean probability), averaged over layers; 1 when uniform."""
    share, prob = stats["share"], stats["prob"]
    return jnp.mean(jnp.sum(jax.lax.stop_gradient(share) * prob, axis=-1)) * share.shape[-1]


def starved_loss(stats: dict[str, jax.Array], starved_share: float) -> jax.Array:
    """Mean of -log p of the experts that get less than `starved_share` of the mean load, averaged over layers.

    The balance loss reaches an expert in proportion to its probability, which is nothing once it has died; the
    logarithm's gradient doesn't vanish. An expert that is used enough isn't touched, so loads stay unequal.
    """
    share = jax.lax.stop_gradient(stats["share"])
    starved = share < starved_share / share.shape[-1]
    return jnp.mean(jnp.sum(jnp.where(starved, -stats["log_prob"], 0.0), axis=-1))


def next_token_nats(model: DemoMoe, tokens: jax.Array, dtype) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of tokens 1.. given those before, and the routing statistics."""
    hidden, stats = model.hidden(tokens, dtype)

    # Row by row: float32 logits of a whole batch would be the largest array of the step.
    @jax.checkpoint
    def row(total: jax.Array, pair: tuple[jax.Array, jax.Array]):
        states, ids = pair
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(states[:-1]), ids[1:])
        return total + losses.mean(), None

    total, _ = jax.lax.scan(row, jnp.zeros((), jnp.float32), (hidden, tokens))
    return total / tokens.shape[0], stats


def make_step(graph: nnx.GraphDef, train: TrainConfig) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer and one jitted, donated step over (params, optimizer state); token arrays stay on the device."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(train.weight_decay, mask=_decayed),
    )

    def loss_fn(params: nnx.State, tokens: jax.Array, balance_weight: jax.Array):
        nats, stats = next_token_nats(nnx.merge(graph, params), tokens, jnp.bfloat16)
        starved = train.starved_weight * starved_loss(stats, train.starved_share)
        return nats + balance_weight * balance_loss(stats) + starved, (nats, stats)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, corpus, starts, rows, learning_rate, balance_weight):
        offsets = starts[:, None] + jnp.arange(train.window_tokens)
        tokens = jnp.concatenate([corpus["natural"][offsets], corpus["synthetic"][rows]]).astype(jnp.int32)
        (_, (nats, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens, balance_weight)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
        return params, opt_state, nats, stats

    return optimizer, step


def batches(corpus: dict[str, np.ndarray], train: TrainConfig) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless (starts of natural windows, rows of synthetic windows); every window once an epoch, at a new phase."""
    num_synthetic = round(train.batch_windows * train.synthetic_share)
    num_natural = train.batch_windows - num_synthetic
    rng = np.random.default_rng(train.seed)
    window, size = train.window_tokens, len(corpus["natural"])

    def natural() -> Iterator[int]:
        while True:
            phase = int(rng.integers(window))
            yield from (phase + window * rng.permutation((size - phase) // window)).tolist()

    def synthetic() -> Iterator[int]:
        while True:
            yield from rng.permutation(len(corpus["synthetic"])).tolist()

    starts, rows = natural(), synthetic()
    while True:
        yield (
            np.array([next(starts) for _ in range(num_natural)], np.int32),
            np.array([next(rows) for _ in range(num_synthetic)], np.int32),
        )


def routing_lines(share: np.ndarray) -> str:
    """Per layer: busiest expert / mean, rarest / mean, and dead experts, from shares `[layers, experts]`."""
    relative = np.asarray(share) * share.shape[-1]
    return " ".join(f"{row.max():.1f}/{row.min():.2f}/{int((row == 0).sum())}" for row in relative)


def train_model(
    config: DemoConfig,
    train: TrainConfig,
    corpus: dict[str, np.ndarray],
    save: Callable[[nnx.State], None],
    log: Callable[[str], None],
    initial: tuple[nnx.GraphDef, nnx.State] | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Trains until the time is up; calls `save(params)` at the start, every `save_every_seconds` and at the end."""
    graph, params = initial or nnx.split(DemoMoe(config, nnx.Rngs(train.seed)))
    params = jax.tree.map(jnp.asarray, params)
    save(params)  # fail before training, not after it
    source = batches(corpus, train)
    optimizer, step = make_step(graph, train)
    opt_state = optimizer.init(params)
    device_corpus = {name: jnp.asarray(corpus[name]) for name in ("natural", "synthetic")}

    began = time.monotonic()
    starts, rows = next(source)
    arguments = (params, opt_state, device_corpus, starts, rows, jnp.float32(0), jnp.float32(0))
    compiled = step.lower(*arguments).compile()
    log(f"compiled in {time.monotonic() - began:.1f} s: {compiled.memory_analysis()}")

    began = last_save = last_log = time.monotonic()
    count = logged = 0
    while (progress := (time.monotonic() - began) / train.seconds) < 1:
        rates = (train.learning_rate(count, progress), train.balance_weight(progress))
        params, opt_state, nats, stats = compiled(
            params, opt_state, device_corpus, starts, rows, *(jnp.float32(rate) for rate in rates)
        )
        starts, rows = next(source)
        nats.block_until_ready()  # the schedule reads the clock, so the host must not run ahead
        count += 1
        if count % train.log_every_steps == 0 or count == 1:
            now = time.monotonic()
            speed = (count - logged) * train.batch_windows * train.window_tokens / (now - last_log)
            log(
                f"step {count} {now - began:.0f} s loss {float(nats):.3f} lr {rates[0]:.1e} {speed / 1e6:.2f} Mtok/s "
                f"max/min/dead {routing_lines(np.asarray(stats['share']))}"
            )
            last_log, logged = now, count
        if time.monotonic() - last_save > train.save_every_seconds:
            save(params)
            last_save = time.monotonic()
    save(params)
    log(f"{count} steps, {count * train.batch_windows * train.window_tokens / 1e6:.0f} M tokens")
    return graph, params
