"""The tables that packed tables are measured on: embeddings of a sentence model, bags of words of
WordNet, pictures of Fashion-MNIST."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.data import fashion_mnist, sets, wordnet
from packhorse import open_file

__all__ = ["TABLES", "Table", "make"]

EMBEDDING = "embeddings.word_embeddings.weight"
MAX_ROWS = 6000  # of a table whose packing is measured; they are spread evenly
MEAN, DEVIATION = 0.2860, 0.3530  # of Fashion-MNIST, as is customary


class Table(NamedTuple):
    """A table.

    Attributes:
        name: what it is.
        dtype: safetensors' name of its dtype.
        words: unsigned integers of its elements, (rows, columns).
    """

    name: str
    dtype: str
    words: NDArray[Any]


def _words(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _embedding() -> NDArray[np.float32]:
    with open_file(sets.model_path()) as file:
        return file.get_tensor(EMBEDDING)  # type: ignore[no-any-return]


def _cast(kind: Any) -> Callable[[], NDArray[Any]]:
    return lambda: _embedding().astype(kind)


def _kept_as_float(kind: Any) -> Callable[[], NDArray[Any]]:
    return lambda: _embedding().astype(kind).astype(np.float32)


def _scaled(kind: Any, most: float) -> Callable[[], NDArray[Any]]:
    """Rows with a scale each, as quantisers keep them."""

    def make() -> NDArray[Any]:
        rows = _embedding()
        scaled = rows / np.abs(rows).max(1, keepdims=True) * most
        return (np.rint(scaled) if kind is np.int8 else scaled).astype(kind)

    return make


def _glosses(n_words: int, kind: str) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        n = len(wordnet.load().labels)
        return wordnet.features(n_words, kind, slice(None, None, max(1, n // MAX_ROWS)))

    return make


def _pictures() -> NDArray[np.float32]:
    return fashion_mnist.load("train").images.astype(np.float32) / np.float32(255)


_SOURCES: dict[str, tuple[str, Callable[[], NDArray[Any]]]] = {
    "MiniLM words, BF16": ("BF16", _cast(ml_dtypes.bfloat16)),
    "MiniLM words, FP16": ("F16", _cast(np.float16)),
    "MiniLM words, FP32": ("F32", _embedding),
    "the same, BF16 kept as FP32": ("F32", _kept_as_float(ml_dtypes.bfloat16)),
    "the same, FP16 kept as FP32": ("F32", _kept_as_float(np.float16)),
    "the same, FP8 e4m3, row scale": ("F8_E4M3", _scaled(ml_dtypes.float8_e4m3fn, 448.0)),
    "the same, int8, row scale": ("I8", _scaled(np.int8, 127.0)),
    "WordNet, 3,703 words, 1 / n": ("F32", _glosses(3703, "share")),
    "WordNet, 8,710 words, 0 or 1": ("F32", _glosses(8710, "present")),
    "WordNet, 500 words, TF-IDF": ("F32", _glosses(500, "tf-idf")),
    "Fashion-MNIST / 255, FP32": ("F32", _pictures),
    "the same, standardised": (
        "F32",
        lambda: (_pictures() - np.float32(MEAN)) / np.float32(DEVIATION),
    ),
    "the same, BF16": ("BF16", lambda: _pictures().astype(ml_dtypes.bfloat16)),
    "the same, bytes": ("U8", lambda: fashion_mnist.load("train").images),
}
TABLES = tuple(_SOURCES)


def make(names: tuple[str, ...] = TABLES) -> Iterator[Table]:
    """Tables by name, at most 6,000 rows of each, evenly spread.

    Raises:
        FileNotFoundError: `make data` was not run.
    """
    for name in names:
        dtype, source = _SOURCES[name]
        rows = source()
        yield Table(name, dtype, _words(rows[:: max(1, len(rows) // MAX_ROWS)][:MAX_ROWS]))
