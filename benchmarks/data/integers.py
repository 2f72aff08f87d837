"""Integers that machine learning stores beside weights, made from text and from WordNet."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import wordnet
from benchmarks.data.vocabulary import Vocabulary

__all__ = ["event_times", "graph_columns", "graph_pairs", "packed_tokens", "padded_tokens"]

Tensors = dict[str, NDArray[Any]]


def packed_tokens(texts: Iterable[str], n_words: int, limit: int) -> Tensors:
    """Ids of 16 bits end to end, as files of training data hold them."""
    encoded = [text.encode() for text in texts]
    ids = Vocabulary.of(encoded, n_words).encode(encoded)[:limit]
    return {"train.bin": ids.astype(np.uint16)}


def padded_tokens(sequences: Sequence[NDArray[np.int64]], width: int, seed: int) -> Tensors:
    """Batches as a tokenizer returns them: int64, each row a piece of a sequence of any length up
    to `width`, filled up with zeros."""
    rng = np.random.default_rng(seed)
    pieces: list[NDArray[np.int64]] = []
    for ids in sequences:
        ends = np.cumsum(rng.integers(1, width + 1, 1 + 4 * ids.size // width))
        pieces += [piece[:width] for piece in np.split(ids, ends[ends < ids.size])]
    rows = np.zeros((len(pieces), width), np.int64)
    for row, piece in zip(rows, pieces, strict=True):
        row[: piece.size] = piece
    return {"input_ids": rows}


def graph_pairs() -> Tensors:
    """WordNet as torch_geometric holds graphs: pairs sorted by their source.

    Raises:
        FileNotFoundError: `make data` was not run.
    """
    source, target = edges = wordnet.load().edges
    return {"edge_index": edges[:, np.lexsort((target, source))]}


def graph_columns() -> Tensors:
    """WordNet as scipy holds graphs: the pairs sorted by their target, as column pointers and rows.
    This is a set of its own, because nearly all relations go both ways: a codec that takes all
    tensors of a set as one array would find the rows among the pairs.

    Raises:
        FileNotFoundError: `make data` was not run.
    """
    found = wordnet.load()
    source, target = found.edges
    counts = np.bincount(target, minlength=len(found.labels))
    return {
        "indptr": np.concatenate([[0], np.cumsum(counts)]),
        "indices": source[np.lexsort((source, target))],
    }


def event_times(n: int, seed: int) -> Tensors:
    """Milliseconds since 1970 of events that come at random, 25 a second."""
    gaps = np.random.default_rng(seed).integers(1, 80, n)
    return {"timestamps": 1_700_000_000_000 + np.cumsum(gaps)}
