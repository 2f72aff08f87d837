"""Codecs of pairs of checkpoints, ours and the rivals', behind the interface of
codecs/peers.py.

Among the rivals, only zipnn supports bases itself. The others get the XOR of the two checkpoints,
which NumPy makes inside the timed part, in both directions, into existing memory. BitX is such a
XOR with byte planes and zstd. If a pair is a whole state, each part is packed by itself, because
users save tensors and not their concatenation. A rival then uses the base of a part only if the
result is shorter; finding this out is not timed.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.codecs.peers import (
    BloscCodec,
    BytesCodec,
    Codec,
    CopyCodec,
    DcpCodec,
    Entry,
    OpenzlCodec,
    Packed,
    PackhorseCodec,
    PcodecCodec,
    PlanesCodec,
    Setup,
    ZipnnCodec,
    bz2_codec,
    carve,
    parts,
    zstandard_codec,
)
from benchmarks.data.sets import DataSet
from benchmarks.snapshots.pairs import STATE, Pair

__all__ = ["CODECS", "ONLY_ON", "available"]

Make = Callable[[Any, Setup], Codec]
INDEX_DTYPE = np.dtype(np.uint32)


def _as_uint(array: Any) -> Any:
    return array.view(f"u{array.itemsize}")


def _as_bytes(array: Any) -> memoryview:
    return memoryview(array.view(np.uint8))


class PackhorseDeltaCodec:
    """packhorse.numpy with bases, all tensors in one call, into the caller's memory.

    In a state the bases of masters and moments are their older values. The base of the bf16 copy is
    the masters of its own step, which have just been decoded.
    """

    def __init__(self, data: Pair, setup: Setup) -> None:
        self._ph = importlib.import_module("packhorse.numpy")
        self._threads = setup.threads
        bound = importlib.import_module("packhorse.frame").max_frame_nbytes
        self._parts = data.parts or (data,)
        tensors = [t for part in self._parts for _, t in part.tensors]
        names = [part.dtype for part in self._parts for _ in part.tensors]
        sizes = [bound(name, t.shape) for name, t in zip(names, tensors, strict=True)]
        self._packed = carve(sizes)
        memory = carve([t.nbytes for t in tensors])
        self._dst = [m.view(t.dtype).reshape(t.shape) for m, t in zip(memory, tensors, strict=True)]
        ends = np.cumsum([len(part.tensors) for part in self._parts])
        self._runs = [slice(e - len(p.tensors), e) for e, p in zip(ends, self._parts, strict=True)]
        self.part_nbytes: list[int] = []

    def prepare(self, data: Pair) -> Any:
        tensors = [t for part in self._parts for _, t in part.tensors]
        return tensors, self._bases(tensors)

    def _bases(self, tensors: Sequence[Any]) -> list[Any]:
        """The base of each tensor; a copy finds its masters in `tensors`."""
        out = []
        for part in self._parts:
            known = part.cast_of is None
            out += part.bases if known else tensors[self._runs[part.cast_of]]
        return out

    def encode(self, source: Any) -> Packed:
        tensors, bases = source
        frames = self._ph.compress_all(
            tensors, outs=self._packed, bases=bases, threads=self._threads
        )
        self.part_nbytes = [sum(frame.nbytes for frame in frames[run]) for run in self._runs]
        return [frame.buffer() for frame in frames]

    def decode(self, packed: Packed) -> Packed:
        bases = self._bases(self._dst)
        # First come the tensors whose bases are not decoded in this call.
        for casts in (False, True):
            runs = [
                run
                for part, run in zip(self._parts, self._runs, strict=True)
                if (part.cast_of is not None) == casts
            ]
            for run in runs:
                options = {"outs": self._dst[run], "bases": bases[run], "threads": self._threads}
                self._ph.decompress_all(packed[run], **options)
        return [array.reshape(-1).view(np.uint8) for array in self._dst]


class ZipnnDeltaCodec:
    """zipnn's own delta: it XORs with the base, and overwrites only the result."""

    def __init__(self, data: Pair, setup: Setup) -> None:
        zipnn = importlib.import_module("zipnn")
        options = {
            "input_format": "byte",
            "bytearray_dtype": data.array.dtype.name,
            "delta_compressed_type": "byte",
            "threads": setup.threads,
        }
        self._encoder, self._decoder = zipnn.ZipNN(**options), zipnn.ZipNN(**options)
        self._base = _as_bytes(data.base)

    def prepare(self, data: Pair) -> Any:
        return _as_bytes(data.array)

    def encode(self, source: Any) -> Packed:
        return self._encoder.compress(source, delta_second_data=self._base)

    def decode(self, packed: Packed) -> Packed:
        return self._decoder.decompress(packed, delta_second_data=self._base)


class XorCodec:
    """A codec without bases, on the XOR of the two arrays; with `integers` it gets them as
    integers."""

    def __init__(self, data: Pair, setup: Setup, *, make: Make, integers: bool = False) -> None:
        self._base = _as_uint(data.base)
        self._xor = _as_uint(data.array) ^ self._base  # adapters may examine their data
        self._dst = np.zeros_like(self._xor)
        seen = self._xor if integers else self._xor.view(data.array.dtype)
        dtype = f"U{8 * seen.itemsize}" if integers else data.dtype
        self._seen = DataSet(data.name, dtype, seen, "", data.source)
        self._codec = make(self._seen, setup)
        self._source = self._codec.prepare(self._seen)  # a view of what `encode` writes

    def prepare(self, data: Pair) -> Any:
        return _as_uint(data.array)

    def encode(self, source: Any) -> Packed:
        np.bitwise_xor(source, self._base, out=self._xor)
        return self._codec.encode(self._source)

    def decode(self, packed: Packed) -> Packed:
        (piece,) = parts(self._codec.decode(packed))
        xor = np.frombuffer(piece, self._base.dtype)
        return np.bitwise_xor(xor, self._base, out=self._dst).view(np.uint8)


class IndexValueCodec:
    """The place and the new value of each change: four bytes and an element, nothing packed.

    Updates in reinforcement learning are sent in this way, as sparse safetensors.
    """

    def __init__(self, data: Pair, setup: Setup) -> None:
        self._base = _as_uint(data.base)
        self._dst = np.zeros_like(self._base)

    def prepare(self, data: Pair) -> Any:
        return _as_uint(data.array)

    def encode(self, source: Any) -> Packed:
        index = np.flatnonzero(source != self._base)
        return [index.astype(INDEX_DTYPE), source[index]]

    def decode(self, packed: Packed) -> Packed:
        index, values = packed
        np.copyto(self._dst, self._base)
        self._dst[index] = values
        return self._dst.view(np.uint8)


class EachPartCodec:
    """A codec on each part of a state, run in the way that is shortest for the part."""

    def __init__(self, data: Pair, setup: Setup, ways: Sequence[Make]) -> None:
        self._codecs = [_shortest(part, setup, ways) for part in data.parts]
        self._counts: list[int] = []
        self.part_nbytes: list[int] = []

    def prepare(self, data: Pair) -> Any:
        return [codec.prepare(part) for codec, part in zip(self._codecs, data.parts, strict=True)]

    def encode(self, source: Any) -> Packed:
        out: list[Any] = []
        self._counts.clear()
        self.part_nbytes.clear()
        for codec, of_part in zip(self._codecs, source, strict=True):
            packed = codec.encode(of_part)
            pieces = packed if isinstance(packed, list) else [packed]
            self._counts.append(len(pieces) if isinstance(packed, list) else 0)
            self.part_nbytes.append(sum(piece.nbytes for piece in parts(packed)))
            out += pieces
        return out

    def decode(self, packed: Packed) -> Packed:
        out: list[Any] = []
        left = list(packed)
        for codec, count in zip(self._codecs, self._counts, strict=True):
            pieces = [left.pop(0) for _ in range(count or 1)]
            out += parts(codec.decode(pieces if count else pieces[0]))
        return out


def _shortest(part: Pair, setup: Setup, ways: Sequence[Make]) -> Codec:
    codecs = [make(part, setup) for make in ways]
    sizes = [sum(p.nbytes for p in parts(c.encode(c.prepare(part)))) for c in codecs]
    return codecs[sizes.index(min(sizes))]


def _codec(data: Pair, setup: Setup, *, ways: Sequence[Make]) -> Codec:
    """The first way on a pair; on a whole state the best of all for each part."""
    return EachPartCodec(data, setup, ways) if data.parts else ways[0](data, setup)


def _on_xor(make: Make, *, integers: bool = False) -> Make:
    with_base = partial(XorCodec, make=make, integers=integers)
    return partial(_codec, ways=(with_base, make))


def _full(data: Pair, setup: Setup) -> Codec:
    return _codec(data, setup, ways=(partial(PackhorseCodec, level="default"),))


_XOR = "on the XOR, made by NumPy into memory that exists"
_PLANES = f"byte planes, for bf16 and fp32 with the sign moved last, {_XOR}"
_OWN = "each tensor in its own shape, packed and unpacked into the caller's memory"

# In the order of the tables.
CODECS: dict[str, Entry] = {
    "np.copyto": Entry(CopyCodec, "the ceiling: a copy into the caller's memory, without a base"),
    "packhorse": Entry(
        PackhorseDeltaCodec,
        f"level default with a base for each tensor; {_OWN}; of a state the masters and moments "
        "against the older ones, the bf16 copy against the masters of its own step",
    ),
    "packhorse-full": Entry(_full, f"level default without bases; {_OWN}"),
    "zipnn-delta": Entry(
        partial(_codec, ways=(ZipnnDeltaCodec, ZipnnCodec)),
        "its own delta, with the dtype of the data; it makes the XOR itself; its output is always "
        "new memory",
    ),
    "zipnn": Entry(
        partial(_codec, ways=(ZipnnCodec,)),
        "without a base; it overwrites its input, so it gets a scratch copy that is not timed",
    ),
    "bitx-like": Entry(
        _on_xor(partial(zstandard_codec, PlanesCodec, level=3)), f"zstd level 3 on {_PLANES}"
    ),
    "bitx-like-1": Entry(
        _on_xor(partial(zstandard_codec, PlanesCodec, level=1)), f"zstd level 1 on {_PLANES}"
    ),
    "xor+zstandard-3": Entry(
        _on_xor(partial(zstandard_codec, BytesCodec, level=3)), f"level 3 {_XOR}"
    ),
    "xor+zstandard-1": Entry(
        _on_xor(partial(zstandard_codec, BytesCodec, level=1)), f"level 1 {_XOR}"
    ),
    "xor+pcodec": Entry(
        _on_xor(partial(PcodecCodec, level=8), integers=True),
        f"its default level, 8, as unsigned integers, {_XOR}",
    ),
    "xor+openzl": Entry(
        _on_xor(partial(OpenzlCodec, coder="Fse")),
        f"the densest graph for the dtype, made by hand, with FSE, {_XOR}",
    ),
    "xor+blosc2-bitshuffle-zstd": Entry(
        _on_xor(partial(BloscCodec, codec="ZSTD")), f"level 5 {_XOR}"
    ),
    "xor+planes+bz2": Entry(
        _on_xor(partial(bz2_codec, PlanesCodec)), f"level 9 on {_PLANES}", True
    ),
    "index+value": Entry(
        IndexValueCodec, "four bytes of index and the new value for each change, not packed further"
    ),
    "dcp-zstd": Entry(
        partial(_codec, ways=(DcpCodec,)),
        "the ZStandard extension of PyTorch's distributed checkpoints over the raw bytes, without "
        "a base and without the pickling",
    ),
}
# Codecs that take part only in pairs where their result is not known already.
ONLY_ON = {"index+value": ("bf16_sparse",), "dcp-zstd": (STATE,)}


def available(pair: str) -> list[str]:
    """The codecs that take part in a pair; on a whole state those that take minutes do not.

    Args:
        pair: its name.
    """
    return [
        name
        for name, entry in CODECS.items()
        if pair in ONLY_ON.get(name, (pair,)) and not (entry.slow and pair == STATE)
    ]
