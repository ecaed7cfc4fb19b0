"""A prepared model of random weights, made in memory: real geometry without a checkpoint.

It has the interface that the engine uses of `checkpoints.store.PreparedModel`. Dense weights, and the experts of method
bf16, are drawn on the device. Pages are drawn for a few experts once; all experts of all layers hold copies of them, in
slots of their own: a kernel reads as many different bytes as with a real model, and loading takes seconds.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.manifest import Manifest
from checkpoints.store import moe_geometry
from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, MIN_BITS, BlockLayout, MoEGeometry
from pwjax.anyprec.choices import choose_slot_words
from pwjax.bench.blocks import RandomBlocks
from pwjax.config import ModelConfig
from pwjax.errors import UserError
from pwjax.models.loading import dense_weight_shapes
from pwjax.paging.host_store import UNIT_NAMES, HostStore, Kind

DISTINCT_WEIGHTS = 2**25  # of all linear-blocks of a unit that are drawn on their own; the others repeat them


class IdTokenizer:
    """Stands in for a tokenizer where prompts are ids and nobody reads the text."""

    eos_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids themselves.

        Raises:
            UserError: text, no ids, or an id outside the vocabulary.
        """
        if isinstance(prompt, str) or not len(prompt):
            raise UserError("a model without a tokenizer takes prompts as lists of token ids")
        ids = [int(token_id) for token_id in prompt]
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(f"the prompt has ids outside the model's vocabulary of {self.vocab_size}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return ""

    def is_silent(self, token_id: int) -> bool:
        return True


class RepeatingHostStore(HostStore):
    """Pinned pages of one layer, from which the pages of all layers are fetched."""

    def __init__(self, source: Any, geometry: MoEGeometry, shape: tuple[int, int], *args: Any, **kwargs: Any) -> None:
        self._experts = shape[1]
        super().__init__(source, geometry, (1, shape[1]), *args, **kwargs)

    def fetch(self, kind: Kind, rows: np.ndarray) -> jax.Array:
        return super().fetch(kind, np.asarray(rows) % self._experts)


class SyntheticModel:
    """Random weights of a geometry; the same seed gives the same model.

    Scales are those of a trained model as far as speed can tell: activations stay near 1 through all layers, and
    logits of router and head have a standard deviation of 1, so that routing spreads over the experts.

    Args:
        max_bits: pages above it are not made.
        lut_rows: rows that share a lookup table, 1 or 32.
    """

    path = Path("synthetic")
    host_store = RepeatingHostStore

    def __init__(self, config: ModelConfig, *, max_bits: int = MAX_BITS, lut_rows: int = 1, seed: int = 0) -> None:
        if not MIN_BITS <= max_bits <= MAX_BITS:
            raise UserError(f"--max-bits is {max_bits}; it must lie between {MIN_BITS} and {MAX_BITS}")
        slot_words, _ = choose_slot_words(config, (lut_rows, lut_rows))
        self.config, self._seed = config, seed
        self.manifest = Manifest(
            model=config.to_dict(),
            slot_words=slot_words,
            lut_rows=dict.fromkeys(UNIT_NAMES, lut_rows),
            max_bits=max_bits,
            page_bits=max_bits,
            source=True,
        )
        self.tokenizer = IdTokenizer(config.vocab_size)

    def geometry(self) -> MoEGeometry:
        return moe_geometry(self.config, self.manifest.lut_rows, self.manifest.slot_words)

    def tables(self) -> dict[str, np.ndarray]:
        """Sensitivity `[L, E, 2, 6]`: a quarter with every bit, scattered over the linear-blocks."""
        shape = (self.config.num_moe_layers, self.config.num_experts, len(UNIT_NAMES), 1)
        scale = np.random.default_rng(self._seed).lognormal(size=shape)
        return {"sensitivity": (scale * 4.0 ** -np.array(BITS)).astype(np.float32)}

    def iter_dense(self) -> Iterator[tuple[str, jax.Array]]:
        """Dense weights on the device, bf16, by hub name."""
        for name, shape in dense_weight_shapes(self.config).items():
            if name.endswith("norm.weight"):
                yield name, jnp.ones(shape, jnp.bfloat16)
            else:
                yield name, _normal(self._key(name), shape, self._deviation(name, shape))

    def load_layer(self, layer: int) -> dict[str, dict[int, np.ndarray]]:
        """Pages of a layer, `{"gate_up": {3: uint32 [E, words], ..}, "down": {..}}`; the same for every layer."""
        geometry = self.geometry()
        return {unit: self._pages(getattr(geometry, unit), unit) for unit in UNIT_NAMES}

    def load_source(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """bf16 experts of a layer on the device: gate_up `[E, 2I, H]`, down `[E, H, I]`."""
        gate_up, down = (
            _normal(
                self._key(f"{layer}.{unit}"),
                (self.config.num_experts, *self.config.unit_shape(index)),
                self.config.unit_shape(index)[1] ** -0.5,
            )
            for index, unit in enumerate(UNIT_NAMES)
        )
        return gate_up, down

    def _pages(self, layout: BlockLayout, unit: str) -> dict[int, np.ndarray]:
        rng = np.random.default_rng([self._seed, UNIT_NAMES.index(unit)])
        count = min(distinct_blocks(layout), self.config.num_experts)
        copies = np.arange(self.config.num_experts) % count
        pages = RandomBlocks.draw(rng, layout, count, self.manifest.page_bits).pages()
        return {bits: page[copies] for bits, page in pages.items()}

    def _key(self, name: str) -> jax.Array:
        # RBG: several times faster than the default generator on a GPU.
        return jax.random.fold_in(jax.random.key(self._seed, impl="rbg"), zlib.crc32(name.encode()))

    def _deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation: outputs of linear layers near 1, what is added to the residual smaller with depth."""
        if name.endswith(".bias"):
            return 0.1
        if "embed_tokens" in name:
            return 1.0
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        return shape[-1] ** -0.5 * ((2 * self.config.num_layers) ** -0.5 if adds else 1.0)


def distinct_blocks(layout: BlockLayout) -> int:
    """How many linear-blocks of a unit are worth drawing on their own."""
    return max(1, DISTINCT_WEIGHTS // (layout.rows * layout.cols))


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(deviation, jnp.bfloat16)
