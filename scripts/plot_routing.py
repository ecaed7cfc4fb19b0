"""Draws the routing mass of the demo model's experts for two kinds of text: Figure 2 of the paper.

    python scripts/plot_routing.py --text "WikiText-2=test.txt" --text "dictionary=glosses.txt" [--out FILE.png]

The routing mass of an expert is the sum of its routing weights over the tokens that chose it, divided by the layer's
sum over all experts. Without `--text` the two are an excerpt of WordNet's glosses and arithmetic word problems. Prints,
for every layer and text, the number of experts that no token chose and the busiest one's mass over the mean. About half
a minute on a CPU; needs matplotlib.
"""

import argparse
import importlib.resources
import json
import lzma
import random
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx

from pwjax.demo.export import load_params
from pwjax.demo.model import DemoConfig
from pwjax.demo.synthetic import arithmetic_document
from pwjax.demo.tokenizer import load_tokenizer

_COLORS = ("#0072B2", "#D55E00")  # Okabe and Ito's: told apart by people with colour-blindness too


def default_texts() -> dict[str, str]:
    """Two texts that come with the package."""
    excerpt = importlib.resources.files("pwjax.calibration") / "wordnet_excerpt.txt.xz"
    rng = random.Random("plot-routing")
    return {
        "WordNet glosses": lzma.decompress(excerpt.read_bytes()).decode(),
        "word problems": "".join(arithmetic_document(rng) for _ in range(40)),
    }


def routing_mass(directory: Path, texts: Mapping[str, str], num_tokens: int) -> dict[str, np.ndarray]:
    """Routing mass `[layers, experts]` by text, over its first `num_tokens` tokens in windows of 1,024."""
    window_tokens = 1024
    graph, params = load_params(directory, DemoConfig())
    tokenizer = load_tokenizer(directory)
    run = jax.jit(lambda params, ids: nnx.merge(graph, params).hidden(ids, jnp.float32)[1]["mass"])
    mass = {}
    for name, text in texts.items():
        ids = tokenizer.encode(text[: 8 * num_tokens]).ids[:num_tokens]
        if len(ids) < window_tokens:
            raise SystemExit(f"{name}: {len(ids)} tokens are fewer than one window of {window_tokens}")
        windows = np.array(ids[: len(ids) // window_tokens * window_tokens]).reshape(-1, 1, window_tokens)
        total = np.mean([np.asarray(run(params, row)) for row in windows], axis=0)
        mass[name] = total / total.sum(axis=-1, keepdims=True)
    return mass


def draw(mass: Mapping[str, np.ndarray], out: Path) -> None:
    """One panel a layer, experts in falling order of the first text: bars for it, dots for the second."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    (first, bars), (second, dots) = mass.items()
    num_layers, num_experts = bars.shape
    columns = min(3, num_layers)
    rows = -(-num_layers // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(10, 2.7 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for layer, axis in enumerate(axes.flat[:num_layers]):
        order = np.argsort(-bars[layer])
        axis.bar(range(num_experts), bars[layer][order], color=_COLORS[0], label=first)
        axis.plot(range(num_experts), dots[layer][order], "o", color=_COLORS[1], markersize=4, label=second)
        axis.axhline(1 / num_experts, color="black", linewidth=0.8, linestyle="--", label="mean")
        axis.set_title(f"layer {layer}", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks([])
    figure.supxlabel(f"the {num_experts} experts of a layer, by mass on {first}", fontsize=11)
    figure.supylabel("routing mass", fontsize=11)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"))
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="twice, or not at all")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each text")
    parser.add_argument("--out", type=Path, default=Path("docs/images/routing.png"))
    args = parser.parse_args()

    pairs = [item.partition("=") for item in args.text]
    texts = {name: Path(file).read_text(encoding="utf-8") for name, _, file in pairs} or default_texts()
    if len(texts) != 2:
        parser.error("give --text twice, with two names")
    mass = routing_mass(args.model, texts, args.tokens)
    draw(mass, args.out)
    report = {}
    for name, layers in mass.items():
        dead, ratio = (layers == 0).sum(-1), layers.max(-1) / layers.mean(-1)
        for layer, (count, times) in enumerate(zip(dead, ratio, strict=True)):
            print(f"{name}, layer {layer}: {count} dead, busiest {times:.1f} x the mean")
        report[name] = {"dead": dead.tolist(), "busiest_over_mean": [round(float(times), 2) for times in ratio]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
