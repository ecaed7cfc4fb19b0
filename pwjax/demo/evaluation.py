"""Scores of the demo model: nats a token on held-out text, the two tasks decoded greedily, and routing statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from pwjax.demo.synthetic import arithmetic_answer, arithmetic_test_set, retrieval_answer, retrieval_test_set
from pwjax.demo.training import next_token_nats


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScores:
    """Nats a token on held-out text, and by layer and expert the share of choices and the mean routing weight."""

    nats: float
    num_tokens: int
    share: np.ndarray  # [layers, experts]
    mass: np.ndarray  # [layers, experts]


def held_out_scores(
    graph: nnx.GraphDef, params: nnx.State, tokens: np.ndarray, window_tokens: int, batch_windows: int
) -> HeldOutScores:
    """Scores the whole windows of a stream that fill whole batches."""
    count = len(tokens) // window_tokens // batch_windows * batch_windows
    if not count:
        raise ValueError(f"{len(tokens)} tokens are fewer than one batch of {batch_windows} x {window_tokens}")
    windows = tokens[: count * window_tokens].reshape(-1, batch_windows, window_tokens).astype(np.int32)
    score = jax.jit(lambda params, ids: next_token_nats(nnx.merge(graph, params), ids, jnp.bfloat16))
    nats, stats = zip(*(jax.device_get(score(params, ids)) for ids in windows), strict=True)
    return HeldOutScores(
        nats=float(np.mean(nats)),
        num_tokens=count * window_tokens,
        share=np.mean([part["share"] for part in stats], axis=0),
        mass=np.mean([part["mass"] for part in stats], axis=0),
    )


@partial(jax.jit, static_argnums=(0, 4))
def _decode(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array, lengths: jax.Array, num_new: int) -> jax.Array:
    """Greedy decoding without a cache: right padding is invisible under the causal mask, so rows differ in length."""
    model = nnx.merge(graph, params)
    rows = jnp.arange(tokens.shape[0])

    def body(i: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden, _ = model.hidden(tokens, jnp.bfloat16)
        logits = model.logits(hidden[rows, lengths + i - 1])
        return tokens.at[rows, lengths + i].set(jnp.argmax(logits, axis=-1).astype(tokens.dtype))

    return jax.lax.fori_loop(0, num_new, body, tokens)


def greedy(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    num_new: int,
    padded_tokens: int,
) -> list[str]:
    """Continuations of `num_new` tokens; every prompt must fit `padded_tokens - num_new`."""
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    longest = max(map(len, ids))
    if longest + num_new > padded_tokens:
        raise ValueError(f"a prompt of {longest} tokens and {num_new} new ones exceed {padded_tokens}")
    tokens = np.zeros((len(ids), padded_tokens), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    out = np.asarray(_decode(graph, params, jnp.asarray(tokens), jnp.asarray(lengths), num_new))
    return [tokenizer.decode(row[n : n + num_new].tolist()) for row, n in zip(out, lengths, strict=True)]


def task_scores(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokenizer: Tokenizer,
    num_items: int,
    filler: Sequence[str],
    log: Callable[[str], None],
) -> dict[str, float]:
    """Share of exact answers by task; `filler` spreads 16 codes over a context of several thousand tokens."""
    arithmetic = {f"arithmetic_{family}": arithmetic_test_set(num_items, family) for family in ("one-step", "two-step")}
    retrieval = {f"retrieval_{keys}_keys": retrieval_test_set(num_items, keys) for keys in (4, 16, 64)}
    if filler:
        retrieval["retrieval_16_keys_in_filler"] = retrieval_test_set(num_items, 16, filler)
    scores = {}
    for tasks, answer, num_new in ((arithmetic, arithmetic_answer, 32), (retrieval, retrieval_answer, 14)):
        for name, items in tasks.items():
            padded = 4096 if "filler" in name else 1280 if tasks is retrieval else 512
            texts = greedy(graph, params, tokenizer, [item.prompt for item in items], num_new, padded)
            right = [answer(text) == item.answer for text, item in zip(texts, items, strict=True)]
            scores[name] = float(np.mean(right))
            wrong = [(t, i.answer) for t, i, ok in zip(texts, items, right, strict=True) if not ok][:2]
            log(f"{name}: {sum(right)} of {len(items)}; wrong: {wrong}")
    return scores
