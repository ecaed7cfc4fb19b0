"""Trains the demo model's tokenizer: byte-level BPE of 4,096 tokens on a sample of the training text.

    python scripts/train_demo_tokenizer.py --data DIR --out checkpoints/demo-moe

Takes about a minute on two cores. `scripts/train_demo.py` reads the files it writes.
"""

import argparse
import random
from pathlib import Path

from pwjax.demo.corpus import TEXT_FILES, is_held_out, read_documents
from pwjax.demo.synthetic import arithmetic_document, retrieval_document
from pwjax.demo.tokenizer import save_tokenizer, train_tokenizer


def main() -> None:
    """Samples the text, trains, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl.xz training files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-length-tokens", type=int, default=4096)
    args = parser.parse_args()

    rng = random.Random("tokenizer-sample")
    texts = []
    for name in TEXT_FILES:
        for text in read_documents(args.data / f"{name}.jsonl.xz"):
            if not is_held_out(text):
                start = rng.randrange(max(1, len(text) - 50_000))
                texts += text[start : start + 50_000].split("\n") if rng.random() < 0.6 else []
    texts += [arithmetic_document(rng) for _ in range(200)] + [retrieval_document(rng, 64) for _ in range(200)]
    print(f"{sum(map(len, texts)) / 1e6:.1f} million characters", flush=True)
    save_tokenizer(train_tokenizer(texts, args.vocab_size), args.out, args.max_length_tokens)


if __name__ == "__main__":
    main()
