"""One small adapter for each codec, ours and the rivals', behind one interface.

Every adapter gets the same flat array. Where a rival offers several settings, it runs with the best
that its Python API can be made to do for the dtype, because a bar that is too low proves nothing.
What a rival needs but a user would not time (a scratch copy for one that overwrites its input) is
made in `prepare`, outside the timed part. Decoding goes into memory that already exists wherever
the API allows it.
"""

import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODECS", "Codec", "UnsupportedError", "build", "versions"]

Array = NDArray[Any]
POISON = 0xA5
ZIPNN_DTYPES = {"bfloat16", "float16", "float32", "float8_e4m3fn"}
Buffer = Any  # whatever memoryview takes; collections.abc.Buffer came with Python 3.12


class UnsupportedError(Exception):
    """The codec cannot take this dtype or this number of threads."""


class Codec(Protocol):
    """What run.py measures. One object serves one data set and one number of threads."""

    def prepare(self, array: Array) -> Any:
        """Whatever `encode` needs, made outside the timed part; by default the array itself."""

    def encode(self, source: Any) -> Buffer:
        """The packed bytes of what `prepare` returned."""

    def decode(self, payload: Buffer) -> Buffer:
        """The original bytes, valid until the next call."""


def _as_bytes(array: Array) -> NDArray[np.uint8]:
    return array.view(np.uint8)


def _as_uint(array: Array) -> Array:
    """The same bits as unsigned integers: most libraries do not know bf16 and fp8."""
    return array.view(f"u{array.itemsize}")


def _recycled(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose pages exist, filled with a pattern so that an unwritten byte shows."""
    return np.full(nbytes, POISON, np.uint8)


class CopyCodec:
    """np.copyto into memory that exists: the ceiling of every codec that writes its output once."""

    def __init__(self, array: Array, threads: int) -> None:
        if threads > 1:
            raise UnsupportedError("np.copyto has one thread")
        self._packed = _recycled(array.nbytes)
        self._dst = _recycled(array.nbytes)

    def prepare(self, array: Array) -> Any:
        return _as_bytes(array)

    def encode(self, source: Any) -> Buffer:
        np.copyto(self._packed, source)
        return self._packed

    def decode(self, payload: Buffer) -> Buffer:
        np.copyto(self._dst, np.frombuffer(payload, np.uint8))
        return self._dst


class PackhorseCodec:
    """packhorse.numpy, encoding and decoding into the caller's memory."""

    def __init__(self, array: Array, threads: int, *, level: str) -> None:
        self._ph = importlib.import_module("packhorse.numpy")
        frame = importlib.import_module("packhorse.frame")
        self._level, self._threads = level, threads
        _, dtype, shape = self._ph.FRAMEWORK.readable(array)
        self._packed = _recycled(frame.max_frame_nbytes(dtype, shape))
        self._dst = _recycled(array.nbytes).view(array.dtype)

    def prepare(self, array: Array) -> Any:
        return array

    def encode(self, source: Any) -> Buffer:
        frame = self._ph.compress(
            source, level=self._level, threads=self._threads, out=self._packed
        )
        return frame.buffer()

    def decode(self, payload: Buffer) -> Buffer:
        self._ph.decompress(payload, out=self._dst, threads=self._threads)
        return _as_bytes(self._dst)


class ZipnnCodec:
    """zipnn. It rewrites its input in place, so each encoding gets a copy of its own."""

    def __init__(self, array: Array, threads: int) -> None:
        # zipnn takes only floats, so a user can pass anything else only as the bytes of bf16.
        dtype = array.dtype.name if array.dtype.name in ZIPNN_DTYPES else "bfloat16"
        zipnn = importlib.import_module("zipnn")
        self._encoder = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=threads)
        self._decoder = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=threads)

    def prepare(self, array: Array) -> Any:
        return bytearray(_as_bytes(array))

    def encode(self, source: Any) -> Buffer:
        return self._encoder.compress(source)

    def decode(self, payload: Buffer) -> Buffer:
        return self._decoder.decompress(payload)


class OpenzlCodec:
    """openzl with a graph made by hand for the dtype; its default graph is far slower and larger.

    `coder` is the entropy coder. "Entropy" (Huffman here) goes with the fastest graph that splits
    the dtype, "Fse" with the densest.
    """

    def __init__(self, array: Array, threads: int, *, coder: str) -> None:
        if threads > 1:
            raise UnsupportedError("openzl's Python API has no threads")
        self._zl = zl = importlib.import_module("openzl.ext")
        self._compressor = zl.Compressor()
        graph = _openzl_graph(zl, self._compressor, array, coder)
        self._compressor.select_starting_graph(graph)
        self._cctx, self._dctx = zl.CCtx(), zl.DCtx()
        self._cctx.ref_compressor(self._compressor)
        self._cctx.set_parameter(zl.CParam.StickyParameters, 1)
        self._cctx.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)

    def prepare(self, array: Array) -> Any:
        return self._zl.Input(self._zl.Type.Numeric, _as_uint(array))

    def encode(self, source: Any) -> Buffer:
        return self._cctx.compress([source])

    def decode(self, payload: Buffer) -> Buffer:
        self._kept = self._dctx.decompress(payload)  # frees the output of the call before
        return self._kept[0].content.as_nparray().view(np.uint8)


def _openzl_graph(zl: Any, compressor: Any, array: Array, coder: str) -> Any:
    graphs, nodes, dtype = zl.graphs, zl.nodes, array.dtype.name
    coded = getattr(graphs, coder)()(compressor)
    lanes = nodes.TransposeSplit()(compressor, coded)
    if dtype == "bfloat16":
        rest = graphs.Store()(compressor) if _has_dense_mantissas(array) else coded
        return nodes.BFloat16Deconstruct()(compressor, sign_frac=rest, exponent=coded)
    if dtype == "float32" and coder == "Fse":
        return nodes.Float32Deconstruct()(compressor, sign_frac=lanes, exponent=coded)
    if dtype in ("float32", "float16"):
        # Byte planes: twice the speed of Float32Deconstruct for 0.4 % of ratio, and for fp16 better
        # than Float16Deconstruct in both.
        return nodes.ConvertNumToStructLE()(compressor, lanes)
    if dtype == "float8_e4m3fn":
        return nodes.ConvertNumToSerialLE()(compressor, coded)
    return graphs.Compress()(compressor)  # integers, bool: its own choice


def _has_dense_mantissas(array: Array) -> bool:
    """Whether bf16 mantissas look random: storing them costs no ratio and saves time."""
    sample = _as_uint(array)[: 1 << 16] & 0x7F
    return np.unique(sample).size > 64


class ZstdCodec:
    """zstandard on the raw bytes."""

    def __init__(self, array: Array, threads: int, *, level: int) -> None:
        zstandard = importlib.import_module("zstandard")
        self._encoder = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        self._decoder = zstandard.ZstdDecompressor()

    def prepare(self, array: Array) -> Any:
        return _as_bytes(array)

    def encode(self, source: Any) -> Buffer:
        return self._encoder.compress(source)

    def decode(self, payload: Buffer) -> Buffer:
        return self._decoder.decompress(payload)


class BloscCodec:
    """blosc2 with its bit shuffle and lz4: the fastest rival that compresses weights at all."""

    def __init__(self, array: Array, threads: int) -> None:
        self._blosc = importlib.import_module("blosc2")
        self._params = {
            "codec": self._blosc.Codec.LZ4,
            "clevel": 5,
            "filters": [self._blosc.Filter.BITSHUFFLE],
            "filters_meta": [0],
            "typesize": array.itemsize,
            "nthreads": threads,
        }
        self._threads = threads
        self._dst = _recycled(array.nbytes)

    def prepare(self, array: Array) -> Any:
        return _as_bytes(array)

    def encode(self, source: Any) -> Buffer:
        return self._blosc.compress2(source, **self._params)

    def decode(self, payload: Buffer) -> Buffer:
        self._blosc.decompress2(payload, dst=self._dst, nthreads=self._threads)
        return self._dst


# In the order of the tables. The name of a rival starts with the name of its PyPI package.
CODECS: dict[str, Callable[[Array, int], Codec]] = {
    "np.copyto": CopyCodec,
    "packhorse-fast": lambda a, n: PackhorseCodec(a, n, level="fast"),
    "packhorse": lambda a, n: PackhorseCodec(a, n, level="default"),
    "packhorse-max": lambda a, n: PackhorseCodec(a, n, level="max"),
    "zipnn": ZipnnCodec,
    "openzl": lambda a, n: OpenzlCodec(a, n, coder="Entropy"),
    "openzl-fse": lambda a, n: OpenzlCodec(a, n, coder="Fse"),
    "zstandard-1": lambda a, n: ZstdCodec(a, n, level=1),
    "zstandard-3": lambda a, n: ZstdCodec(a, n, level=3),
    "blosc2-bitshuffle-lz4": BloscCodec,
}


def build(name: str, array: Array, threads: int) -> Codec:
    """The adapter called `name`, ready for `array`.

    Args:
        name: a key of `CODECS`.
        array: the data it will meet; adapters take the dtype and the size from it.
        threads: how many the codec may use.

    Raises:
        ValueError: there is no such codec.
        UnsupportedError: it cannot do this.
        ImportError: its package is not installed.
    """
    if name not in CODECS:
        raise ValueError(f"no codec is called {name!r}; there are: {', '.join(CODECS)}")
    return CODECS[name](array, threads)


def versions() -> dict[str, str]:
    """The installed version of each package that takes part, "absent" where it is not installed."""
    packages = ["packhorse", "numpy", "zipnn", "openzl", "zstandard", "blosc2", "ml_dtypes"]
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # not installed, or run from its source folder
        found = importlib.util.find_spec(package)
        return importlib.import_module(package).__version__ if found else "absent"
