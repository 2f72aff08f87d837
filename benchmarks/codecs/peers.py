"""One small adapter for each codec, ours and the rivals', behind one interface.

Every adapter gets the same data set. A rival that offers several settings runs with the best one
that its Python API allows for the dtype, because beating a bad setting proves nothing. Things that
a rival needs but a user would not time, such as a scratch copy for a rival that overwrites its
input, are made in `prepare`, outside the timed part. Decoding goes into existing memory wherever
the API allows it, except in runs that show the cost of fresh memory: there, every output is new.

`CODECS` says in one line how each codec is run; the report prints these lines.
"""

import bz2
import importlib
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.codecs import nvcomp
from benchmarks.data.sets import DataSet

__all__ = [
    "CODECS",
    "BloscCodec",
    "BytesCodec",
    "Codec",
    "CopyCodec",
    "DcpCodec",
    "Entry",
    "OpenzlCodec",
    "Packed",
    "PackhorseCodec",
    "PcodecCodec",
    "PlanesCodec",
    "Setup",
    "UnsupportedError",
    "ZipnnCodec",
    "build",
    "bz2_codec",
    "carve",
    "parts",
    "versions",
    "zstandard_codec",
]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Buffer = Any  # whatever memoryview takes; collections.abc.Buffer came with Python 3.12
Packed = Buffer | list[Buffer]
PACKAGES = (
    *("packhorse", "numpy", "zipnn", "openzl", "pcodec", "zstandard", "torch", "blosc2"),
    *("lz4", "ml_dtypes", nvcomp.PACKAGE),
)
POISON = 0xA5
ALIGNMENT = 64
ZIPNN_DTYPES = {"bfloat16", "float16", "float32", "float8_e4m3fn"}
# With the sign moved to the end, the exponent is a byte of its own. For fp16 that gains nothing.
ROTATED_DTYPES = {"bfloat16", "float32"}
PCODEC_DTYPES = {f"{kind}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64)}
PCODEC_DTYPES |= {"float16", "float32", "float64"}


class UnsupportedError(Exception):
    """The codec cannot take this dtype or this number of threads."""


@dataclass(frozen=True)
class Setup:
    """How a codec is to run.

    Attributes:
        threads: how many it may use.
        fresh: every output goes into new memory.
    """

    threads: int = 1
    fresh: bool = False


class Codec(Protocol):
    """The interface that run.py measures. One object serves one data set and one setup."""

    def prepare(self, data: DataSet) -> Any:
        """Make the source for `encode`, outside the timed part; by default the array itself."""

    def encode(self, source: Any) -> Packed:
        """Packs the result of `prepare`; returns the packed bytes in one piece or in several."""

    def decode(self, packed: Packed) -> Packed:
        """The original bytes, valid until the next call."""


def parts(packed: Packed) -> list[memoryview]:
    """The pieces of a result of `encode` or `decode`."""
    return [memoryview(piece) for piece in (packed if isinstance(packed, list) else [packed])]


def _as_bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _as_uint(array: Array) -> Array:
    """The same bits as unsigned integers: most libraries do not know bf16 and fp8."""
    return array.view(f"u{array.itemsize}")


class _Memory:
    """Memory for an output: the same for every call, or new for each one."""

    def __init__(self, nbytes: int, setup: Setup) -> None:
        self._nbytes = nbytes
        # A pattern, so that the pages exist and unwritten bytes are noticed.
        self._kept = None if setup.fresh else np.full(nbytes, POISON, np.uint8)

    def take(self) -> Bytes:
        return np.empty(self._nbytes, np.uint8) if self._kept is None else self._kept


def _single(setup: Setup, who: str) -> None:
    if setup.threads > 1:
        raise UnsupportedError(f"{who} has one thread")


class CopyCodec:
    """np.copyto into existing memory: the ceiling for every codec that writes its output once."""

    def __init__(self, data: DataSet, setup: Setup) -> None:
        _single(setup, "np.copyto")
        self._packed = _Memory(data.array.nbytes, setup)
        self._dst = _Memory(data.array.nbytes, setup)

    def prepare(self, data: DataSet) -> Any:
        return _as_bytes(data.array)

    def encode(self, source: Any) -> Packed:
        packed = self._packed.take()
        np.copyto(packed, source)
        return packed

    def decode(self, packed: Packed) -> Packed:
        dst = self._dst.take()
        np.copyto(dst, packed)
        return dst


class PackhorseCodec:
    """packhorse.numpy: all tensors in one call, encoded and decoded into the caller's memory."""

    def __init__(self, data: DataSet, setup: Setup, *, level: str) -> None:
        self._ph = importlib.import_module("packhorse.numpy")
        self._level, self._threads = level, setup.threads
        tensors = [tensor for _, tensor in data.tensors]
        self._packed: list[Any] | None = None
        self._dst: list[Any] | None = None
        if not setup.fresh:
            bound = importlib.import_module("packhorse.frame").max_frame_nbytes
            self._packed = carve([bound(data.dtype, t.shape) for t in tensors])
            memory = carve([t.nbytes for t in tensors])
            self._dst = [
                m.view(t.dtype).reshape(t.shape) for m, t in zip(memory, tensors, strict=True)
            ]

    def prepare(self, data: DataSet) -> Any:
        return [tensor for _, tensor in data.tensors]

    def encode(self, source: Any) -> Packed:
        options: dict[str, Any] = {"level": self._level, "threads": self._threads}
        frames = self._ph.compress_all(source, outs=self._packed, **options)
        return [frame.buffer() for frame in frames]

    def decode(self, packed: Packed) -> Packed:
        arrays = self._ph.decompress_all(packed, outs=self._dst, threads=self._threads)
        return [_as_bytes(array) for array in arrays]


def carve(sizes: list[int]) -> list[Bytes]:
    """Buffers of these sizes, carved from one piece of memory."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size + -size % ALIGNMENT)
    whole = np.full(starts[-1], POISON, np.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class ZipnnCodec:
    """zipnn. It rewrites its input in place, so each encoding gets its own copy."""

    def __init__(self, data: DataSet, setup: Setup) -> None:
        # zipnn takes only floats, so a user can pass anything else only as the bytes of bf16.
        name = data.array.dtype.name
        zipnn = importlib.import_module("zipnn")
        options = {
            "input_format": "byte",
            "bytearray_dtype": name if name in ZIPNN_DTYPES else "bfloat16",
            "threads": setup.threads,
        }
        self._encoder, self._decoder = zipnn.ZipNN(**options), zipnn.ZipNN(**options)

    def prepare(self, data: DataSet) -> Any:
        return bytearray(_as_bytes(data.array))

    def encode(self, source: Any) -> Packed:
        return self._encoder.compress(source)

    def decode(self, packed: Packed) -> Packed:
        return self._decoder.decompress(packed)


class OpenzlCodec:
    """openzl with a graph made by hand for the dtype; its default graph is far slower and larger.

    `coder` is the entropy coder. "Entropy" (Huffman here) goes with the fastest graph that splits
    the dtype, "Fse" with the densest.
    """

    def __init__(self, data: DataSet, setup: Setup, *, coder: str) -> None:
        _single(setup, "openzl's Python API")
        self._zl = zl = importlib.import_module("openzl.ext")
        self._compressor = zl.Compressor()
        graph = _openzl_graph(zl, self._compressor, data.array, coder)
        self._compressor.select_starting_graph(graph)
        self._cctx, self._dctx = zl.CCtx(), zl.DCtx()
        self._cctx.ref_compressor(self._compressor)
        self._cctx.set_parameter(zl.CParam.StickyParameters, 1)
        self._cctx.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)

    def prepare(self, data: DataSet) -> Any:
        return self._zl.Input(self._zl.Type.Numeric, _as_uint(data.array))

    def encode(self, source: Any) -> Packed:
        return self._cctx.compress([source])

    def decode(self, packed: Packed) -> Packed:
        self._kept = self._dctx.decompress(packed)  # frees the output of the call before
        return _as_bytes(self._kept[0].content.as_nparray())


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
    """Whether sign and mantissa of bf16 look random: storing them costs no ratio and saves time."""
    sample = _as_uint(array)[: 1 << 16] & 0x807F
    return np.unique(sample).size > 160  # of 256; second moments have no sign


class PcodecCodec:
    """pcodec on numbers: fp32 and fp16 as floats, all other dtypes as unsigned integers."""

    def __init__(self, data: DataSet, setup: Setup, *, level: int) -> None:
        _single(setup, "pcodec's Python API")
        pcodec = importlib.import_module("pcodec")
        self._pco = pcodec.standalone
        self._config = pcodec.ChunkConfig(compression_level=level, enable_8_bit=True)
        self._dtype = self._numbers(data).dtype
        self._dst = _Memory(data.array.nbytes, setup)

    def prepare(self, data: DataSet) -> Any:
        return self._numbers(data)

    @staticmethod
    def _numbers(data: DataSet) -> Array:
        known = data.array.dtype.name in PCODEC_DTYPES
        return data.array if known else _as_uint(data.array)

    def encode(self, source: Any) -> Packed:
        return self._pco.simple_compress(source, self._config)

    def decode(self, packed: Packed) -> Packed:
        dst = self._dst.take()
        self._pco.simple_decompress_into(packed, dst.view(self._dtype))
        return dst


class BytesCodec:
    """A codec of bytes that consists of one function to encode and one to decode."""

    def __init__(
        self,
        data: DataSet,
        setup: Setup,
        *,
        pack: Callable[[Any], Buffer],
        unpack: Callable[[Any], Buffer],
    ) -> None:
        self._pack, self._unpack = pack, unpack

    def prepare(self, data: DataSet) -> Any:
        return _as_bytes(data.array)

    def encode(self, source: Any) -> Packed:
        return self._pack(source)

    def decode(self, packed: Packed) -> Packed:
        return self._unpack(packed)


class PlanesCodec(BytesCodec):
    """A codec of bytes on planes: byte i of all elements together, split and merged by NumPy."""

    def __init__(self, data: DataSet, setup: Setup, **functions: Any) -> None:
        _single(setup, "a codec on planes")
        super().__init__(data, setup, **functions)
        self._width = data.array.itemsize
        self._sign_shift = 8 * self._width - 1
        self._rotates = data.array.dtype.name in ROTATED_DTYPES
        nbytes = data.array.nbytes
        self._dst, self._turned, self._spare = (_Memory(nbytes, setup) for _ in range(3))
        self._plane = _Memory(nbytes // self._width, setup)

    def prepare(self, data: DataSet) -> Any:
        return _as_uint(data.array)

    def encode(self, source: Any) -> Packed:
        if self._rotates:
            source = self._rotate(source, self._turned.take(), 1, self._sign_shift)
        table = _as_bytes(source).reshape(-1, self._width)
        plane = self._plane.take()
        packed = []
        for i in range(self._width):
            np.copyto(plane, table[:, i])
            packed.append(self._pack(plane))
        return packed

    def decode(self, packed: Packed) -> Packed:
        dst = self._dst.take()
        turned = self._turned.take() if self._rotates else dst
        table = turned.reshape(-1, self._width)
        for i, part in enumerate(packed):
            table[:, i] = np.frombuffer(self._unpack(part), np.uint8)
        if self._rotates:
            self._rotate(turned.view(f"u{self._width}"), dst, self._sign_shift, 1)
        return dst

    def _rotate(self, source: Array, memory: Bytes, left: int, right: int) -> Array:
        out, spare = memory.view(source.dtype), self._spare.take().view(source.dtype)
        np.left_shift(source, left, out=out)
        np.right_shift(source, right, out=spare)
        return np.bitwise_or(out, spare, out=out)


def bz2_codec(kind: type[BytesCodec], data: DataSet, setup: Setup) -> Codec:
    """bz2 on bytes or on planes, as `kind` says."""
    return kind(data, setup, pack=bz2.compress, unpack=bz2.decompress)


def zstandard_codec(kind: type[BytesCodec], data: DataSet, setup: Setup, *, level: int) -> Codec:
    """zstd on bytes or on planes, as `kind` says."""
    zstandard = importlib.import_module("zstandard")
    # 0 means the calling thread; 1 would add a second one.
    encoder = zstandard.ZstdCompressor(
        level=level, threads=setup.threads if setup.threads > 1 else 0
    )
    decoder = zstandard.ZstdDecompressor()
    return kind(data, setup, pack=encoder.compress, unpack=decoder.decompress)


def _lz4(data: DataSet, setup: Setup) -> Codec:
    _single(setup, "lz4")
    lz4 = importlib.import_module("lz4.block")
    return BytesCodec(data, setup, pack=lz4.compress, unpack=lz4.decompress)


def _nvcomp(data: DataSet, setup: Setup, *, kind: str) -> Codec:
    _single(setup, "nvCOMP on a CPU")
    if kind == "bitcomp":
        return nvcomp.BitcompCodec(data)
    return nvcomp.GdeflateCodec(data, level=1)


class _Kept(io.BytesIO):
    """A stream that stays open when its writer closes it."""

    def close(self) -> None:
        pass


class DcpCodec:
    """The zstd extension of PyTorch's distributed checkpoints, as a stream over the raw bytes.

    A checkpoint would also pickle each tensor and read the stream into new memory; neither is
    charged here.
    """

    def __init__(self, data: DataSet, setup: Setup) -> None:
        _single(setup, "the extension")
        extension = importlib.import_module("torch.distributed.checkpoint._extension")
        self._extension = extension.ZStandard()
        self._dst = _Memory(data.array.nbytes, setup)

    def prepare(self, data: DataSet) -> Any:
        return _as_bytes(data.array)

    def encode(self, source: Any) -> Packed:
        packed = _Kept()
        stream = self._extension.transform_to(packed)
        stream.write(source)
        stream.close()
        return packed.getbuffer()

    def decode(self, packed: Packed) -> Packed:
        dst = self._dst.take()
        left = memoryview(dst)
        stream = self._extension.transform_from(io.BytesIO(packed))
        while left and (n_read := stream.readinto(left)):
            left = left[n_read:]
        return dst


class BloscCodec:
    """blosc2 with its bit shuffle; with lz4 it is the fastest rival that packs weights at all."""

    def __init__(self, data: DataSet, setup: Setup, *, codec: str) -> None:
        self._blosc = importlib.import_module("blosc2")
        self._params = {
            "codec": self._blosc.Codec[codec],
            "clevel": 5,
            "filters": [self._blosc.Filter.BITSHUFFLE],
            "filters_meta": [0],
            "typesize": data.array.itemsize,
            "nthreads": setup.threads,
        }
        self._threads = setup.threads
        self._dst = _Memory(data.array.nbytes, setup)

    def prepare(self, data: DataSet) -> Any:
        return _as_bytes(data.array)

    def encode(self, source: Any) -> Packed:
        return self._blosc.compress2(source, **self._params)

    def decode(self, packed: Packed) -> Packed:
        dst = self._dst.take()
        self._blosc.decompress2(packed, dst=dst, nthreads=self._threads)
        return dst


@dataclass(frozen=True)
class Entry:
    """A codec of the tables.

    Attributes:
        make: its adapter for a data set and a setup.
        how: how it is run, for the report.
        slow: whether it is timed on a part of the data and in fewer rounds; see codecs/measure.py.
    """

    make: Callable[[DataSet, Setup], Codec]
    how: str
    slow: bool = False


_OWN = "each tensor in its own shape, packed and unpacked into the caller's memory"
_NEW = "its output is always new memory"
_PLANES = "byte planes split and merged by NumPy, for bf16 and fp32 with the sign moved last"

# In the order of the tables.
CODECS: dict[str, Entry] = {
    "np.copyto": Entry(CopyCodec, "the ceiling: a copy into the caller's memory"),
    "packhorse-fast": Entry(partial(PackhorseCodec, level="fast"), f"level fast; {_OWN}"),
    "packhorse": Entry(partial(PackhorseCodec, level="default"), f"level default; {_OWN}"),
    "packhorse-max": Entry(partial(PackhorseCodec, level="max"), f"level max; {_OWN}"),
    "zipnn": Entry(
        ZipnnCodec,
        "with the dtype of the data, bf16 for what it does not know; it overwrites its input, so "
        f"it gets a scratch copy that is not timed; {_NEW}",
    ),
    "openzl": Entry(
        partial(OpenzlCodec, coder="Entropy"),
        "the fastest graph that splits the dtype, made by hand, with Huffman; for integers and "
        f"bool its own choice; {_NEW}",
    ),
    "openzl-fse": Entry(
        partial(OpenzlCodec, coder="Fse"),
        f"the densest graph, made by hand, with FSE; else as openzl; {_NEW}",
    ),
    "pcodec": Entry(
        partial(PcodecCodec, level=8),
        "its default level, 8; bf16, fp8 and bool as unsigned integers; decodes into the caller's "
        "memory",
    ),
    "pcodec-12": Entry(partial(PcodecCodec, level=12), "its greatest level; else as pcodec", True),
    "zstandard-1": Entry(
        partial(zstandard_codec, BytesCodec, level=1), f"level 1, raw bytes; {_NEW}"
    ),
    "zstandard-3": Entry(
        partial(zstandard_codec, BytesCodec, level=3), f"level 3, raw bytes; {_NEW}"
    ),
    "planes+zstandard-1": Entry(
        partial(zstandard_codec, PlanesCodec, level=1), f"level 1, {_PLANES}"
    ),
    "planes+zstandard-3": Entry(
        partial(zstandard_codec, PlanesCodec, level=3), f"level 3, {_PLANES}"
    ),
    "planes+bz2": Entry(partial(bz2_codec, PlanesCodec), f"level 9, {_PLANES}", True),
    "dcp-zstd": Entry(
        DcpCodec,
        "the ZStandard extension of PyTorch's distributed checkpoints over the raw bytes, without "
        "the pickling; read into the caller's memory",
    ),
    "blosc2-bitshuffle-lz4": Entry(
        partial(BloscCodec, codec="LZ4"), "level 5; decodes into the caller's memory"
    ),
    "blosc2-bitshuffle-zstd": Entry(
        partial(BloscCodec, codec="ZSTD"), "level 5; decodes into the caller's memory"
    ),
    "nvcomp-bitcomp": Entry(
        partial(_nvcomp, kind="bitcomp"),
        "nvCOMP's for CPUs, on unsigned integers; decodes into the caller's memory",
    ),
    "nvcomp-gdeflate": Entry(
        partial(_nvcomp, kind="gdeflate"),
        "nvCOMP's for CPUs, level 1, 64 KiB of raw bytes at a time; into the caller's memory",
        True,
    ),
    "lz4": Entry(_lz4, f"a block of the raw bytes; {_NEW}"),
}


def build(
    name: str, data: DataSet, setup: Setup, entries: Mapping[str, Entry] | None = None
) -> Codec:
    """The adapter called `name`, ready for `data`.

    Args:
        name: a key of `entries`.
        data: the data that it will pack; adapters take the dtype and the sizes from it.
        setup: threads and memory.
        entries: the codecs to choose from; by default `CODECS`.

    Raises:
        ValueError: there is no such codec.
        UnsupportedError: the codec cannot take this data or setup.
        ImportError: its package is not installed.
    """
    known = CODECS if entries is None else entries
    if name not in known:
        raise ValueError(f"no codec is called {name!r}; there are: {', '.join(known)}")
    return known[name].make(data, setup)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The installed version of each package that takes part, "absent" where it is not installed."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # not installed, or run from its source folder
        found = importlib.util.find_spec(package)
        return importlib.import_module(package).__version__ if found else "absent"
