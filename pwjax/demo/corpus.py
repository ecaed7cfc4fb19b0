"""Training text for the demo model: read, split by document, tokenize in parallel, pack into windows."""

import hashlib
import json
import lzma
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pwjax.demo.synthetic import KEYS, arithmetic_document, retrieval_document
from pwjax.demo.tokenizer import end_of_text_id, load_tokenizer

# Public-domain, CC BY, GPL/GFDL and WordNet-licensed text; the model card lists names and licences.
TEXT_FILES = (
    "gutenberg_books_1",
    "gutenberg_books_2",
    "openstax_textbooks",
    "dictionaries",
    "wordnet_glosses",
    "essays_and_manuals",
)
_HELD_OUT_MODULUS = 100
# Characters of filler that, with the codes and questions, still fit a window of 4,096 tokens.
_MAX_FILLER_CHARS = 9_000


def is_held_out(text: str) -> bool:
    """Whether a document is validation text: about 1% of documents, chosen by a hash of their content."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % _HELD_OUT_MODULUS == 0


def read_documents(path: Path) -> Iterator[str]:
    """The `text` fields of a `.jsonl.xz` file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _tokenize(job: tuple[Path, list[str]]) -> np.ndarray:
    tokenizer_directory, texts = job
    tokenizer = load_tokenizer(tokenizer_directory)
    end = end_of_text_id(tokenizer)
    pieces = [np.array([*tokenizer.encode(text).ids, end], np.uint16) for text in texts]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)


def tokenize_documents(
    pool, tokenizer_directory: Path, documents: Sequence[str], job_chars: int = 500_000
) -> np.ndarray:
    """One stream of token ids, `<|endoftext|>` after each document, tokenized by the processes of `pool`."""
    jobs, batch, size = [], [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= job_chars:
            jobs.append((tokenizer_directory, batch))
            batch, size = [], 0
    jobs.append((tokenizer_directory, batch))
    return np.concatenate(pool.map(_tokenize, jobs, chunksize=1))


def _filler(rng: random.Random, document: str) -> list[str]:
    """A stretch of natural text, as lines, for codes to hide in."""
    size = rng.randint(500, _MAX_FILLER_CHARS)
    start = rng.randrange(max(1, len(document) - size))
    return [line for line in document[start : start + size].split("\n") if line.strip()]


def synthetic_documents(seed: int, num_groups: int, natural: Sequence[str]) -> list[str]:
    """Groups of two arithmetic documents and one of retrieval over 3 to 96 keys: about half of the tokens each.

    Four retrieval documents in ten hide their codes in lines of `natural`.
    """
    rng = random.Random(f"synthetic-train-{seed}")
    documents = []
    for _ in range(num_groups):
        documents += [arithmetic_document(rng), arithmetic_document(rng)]
        num_keys = rng.randint(3, min(96, len(KEYS)))
        filler = _filler(rng, rng.choice(natural)) if natural and rng.random() < 0.4 else ()
        documents.append(retrieval_document(rng, num_keys, filler=filler))
    rng.shuffle(documents)
    return documents


def _synthetic_windows(job: tuple[Path, int, int, list[str], int]) -> np.ndarray:
    """Packs synthetic documents into windows; one that is cut by the end of a window starts the next one again."""
    tokenizer_directory, seed, num_groups, natural, window_tokens = job
    tokenizer = load_tokenizer(tokenizer_directory)
    end = end_of_text_id(tokenizer)
    windows, row = [], []
    for text in synthetic_documents(seed, num_groups, natural):
        ids = [*tokenizer.encode(text).ids, end]
        row += ids
        if len(row) >= window_tokens:
            windows.append(row[:window_tokens])
            # From its beginning, as half a list of codes teaches nothing; one that fills a window is not repeated.
            row = ids if len(row) > window_tokens > len(ids) else []
    return np.array(windows, np.uint16).reshape(-1, window_tokens)


def build_corpus(
    data_directory: Path,
    tokenizer_directory: Path,
    window_tokens: int,
    synthetic_groups_per_job: int,
    files: Sequence[str] = TEXT_FILES,
    max_documents: int | None = None,
    num_processes: int = 16,
) -> dict[str, np.ndarray]:
    """Returns `natural` and `held_out` token streams and `synthetic` windows `[n, window_tokens]`, all uint16."""
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        paths = [data_directory / f"{name}.jsonl.xz" for name in files]
        documents = [text for part in pool.map(_read_all, [(path, max_documents) for path in paths]) for text in part]
        train = [text for text in documents if not is_held_out(text)]
        held_out = [text for text in documents if is_held_out(text)]
        random.Random("document-order").shuffle(train)
        # Filler comes in slices, so that no process receives the whole corpus.
        samples = [[text[:60_000] for text in train[i :: num_processes * 4][:40]] for i in range(num_processes)]
        jobs = [
            (tokenizer_directory, seed, synthetic_groups_per_job, samples[seed], window_tokens)
            for seed in range(num_processes)
        ]
        return {
            "synthetic": np.concatenate(pool.map(_synthetic_windows, jobs, chunksize=1)),
            "natural": tokenize_documents(pool, tokenizer_directory, train),
            "held_out": tokenize_documents(pool, tokenizer_directory, held_out),
        }


def _read_all(job: tuple[Path, int | None]) -> list[str]:
    path, max_documents = job
    documents = []
    for text in read_documents(path):
        documents.append(text)
        if max_documents is not None and len(documents) >= max_documents:
            break
    return documents
