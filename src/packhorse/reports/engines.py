"""Compares other ways to pack bytes with ours, on one sample of a tensor.

The ways are those of the LMC paper (arXiv 2505.09810): general-purpose engines on the bytes as they
are and on bytes that are grouped by their place in the element; the same on the XOR with a base;
Huffman codes of grouped bytes, which is what the paper chooses; then zipnn and openzl, where they
are installed, and the levels of Packhorse.

Each way must restore the sample bit for bit; a rival that does not is left out, with the reason.
Ways take turns, round after round, so that a disturbance meets all of them, and the fastest round
of each counts. Grouping, the XOR and
their inverses are part of the time. A way that would need more than its share of the time gets
a part from the middle of the sample; its row says how many bytes.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from packhorse.codecs.base import as_bytes
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.results import EngineRow, EngineTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["compare_engines", "huffman_nbytes"]

_Bytes = NDArray[np.uint8]
_ROUNDS = 3  # if the time allows
_TRIAL_NBYTES = 1 << 17  # on which a way is tried first, to see how fast it is
_MIN_NBYTES = 1 << 18  # what every way gets, however slow it is
_ALIGNMENT = 1 << 16  # bytes; a part begins and ends at a multiple of it


@dataclass(frozen=True)
class _Engine:
    """A coder of bytes."""

    name: str
    pack: Callable[[Any], Buffer]
    unpack: Callable[[Any], Buffer]


@dataclass(frozen=True)
class _Way:
    """One way to pack: with `base`, or without one if it is None.

    `pack` takes the bytes and the base's, and returns the packed pieces; `unpack` takes these and
    the base's bytes. If `sized` is given, the way has no coder and there is only its size.
    """

    name: str
    pack: Callable[[_Bytes, _Bytes | None], Any] | None = None
    unpack: Callable[[Any, _Bytes | None], Buffer] | None = None
    sized: Callable[[_Bytes, _Bytes | None], int] | None = None
    is_ours: bool = False
    overwrites: bool = False  # its input, so that it gets a copy
    note: str = ""


@dataclass
class _Contender:
    """A way, its part of the sample, and the seconds of its rounds."""

    way: _Way
    data: _Bytes
    base: _Bytes | None
    packed_nbytes: int = 0
    pack_seconds: list[float] = field(default_factory=list)
    unpack_seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """One round; the packed bytes must restore the part."""
        way = self.way
        if way.sized is not None:
            self.packed_nbytes = way.sized(self.data, self.base)
            return
        assert way.pack is not None
        assert way.unpack is not None
        data = self.data.copy() if way.overwrites else self.data
        packed, seconds = _timed(way.pack, data, self.base)
        self.pack_seconds.append(seconds)
        self.packed_nbytes = sum(_nbytes(piece) for piece in packed)
        back, seconds = _timed(way.unpack, packed, self.base)
        self.unpack_seconds.append(seconds)
        if not np.array_equal(np.frombuffer(back, np.uint8), self.data):
            raise RuntimeError(f"{way.name} does not restore it bit for bit")

    @property
    def seconds(self) -> float:
        """Seconds of one round."""
        return sum(min(s, default=0.0) for s in (self.pack_seconds, self.unpack_seconds))


def compare_engines(
    sample: Buffer,
    dtype: str,
    base: Buffer | None = None,
    *,
    seconds: float,
    title: str = "",
    shape: Sequence[int] | None = None,
) -> EngineTable:
    """Compares ways to pack a sample of a tensor, on one thread.

    Args:
        sample: whole elements of a tensor, some megabytes of them; only read.
        dtype: safetensors' name of their dtype, such as "BF16".
        base: the same elements of another tensor, such as the same parameter some steps earlier.
            Then all ways pack the difference from it.
        seconds: processor time for all ways together. Each way packs at least 256 KiB, or the whole
            sample, so that many slow ways may need some seconds more.
        title: of the table.
        shape: of the sample, for the level "max", whose contexts are rows and columns; None for
            elements in a row.

    Returns:
        The table: rivals first, ways of ours last.

    Raises:
        ValueError: the dtype is unknown; the sample is empty or no whole number of elements; the
            base or the shape has another size; `seconds` is not positive.
        RuntimeError: a way of ours does not restore the sample.

    Example:
        >>> import numpy as np
        >>> from packhorse.reports.engines import compare_engines
        >>> weights = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
        >>> table = compare_engines(weights, "F32", seconds=0.5)
        >>> ours = [row for row in table.rows if row.is_ours]
        >>> [row.name for row in ours]
        ['Packhorse fast', 'Packhorse default', 'Packhorse max']
    """
    data, other, numel = _checked(sample, dtype, base, seconds)
    if shape is not None and int(np.prod(shape, dtype=np.int64)) != numel:
        raise ValueError(f"shape {tuple(shape)} does not fit a sample of {numel} elements")
    skipped: dict[str, str] = {}
    ways = list(_ways(dtype, other is not None, shape, skipped))
    contenders = _enter(ways, data, other, seconds, skipped)
    contenders = _compete(contenders, seconds, skipped)
    rows = tuple(_row(contender, contenders) for contender in contenders)
    return EngineTable(title, other is not None, rows, skipped)


def _checked(
    sample: Buffer, dtype: str, base: Buffer | None, seconds: float
) -> tuple[_Bytes, _Bytes | None, int]:
    """The sample and the base as bytes, and the number of elements."""
    if dtype not in DTYPE_BY_NAME:
        raise ValueError(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPE_BY_NAME)}")
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}; it must be positive")
    data = as_bytes(sample, "sample")
    numel, rest = divmod(8 * data.size, DTYPE_BY_NAME[dtype].bits)
    if rest or not numel:
        raise ValueError(f"the sample has {data.size} bytes, which are not elements of {dtype}")
    if base is None:
        return data, None, numel
    other = as_bytes(base, "base")
    if other.size != data.size:
        raise ValueError(f"the base has {other.size} bytes, the sample {data.size}")
    return data, other, numel


def _enter(
    ways: Sequence[_Way],
    data: _Bytes,
    base: _Bytes | None,
    seconds: float,
    skipped: dict[str, str],
) -> list[_Contender]:
    """Try each way on a small part, and give it the part that it packs and unpacks in its share of
    the time. What fast ways leave of their shares goes to the slow ones."""
    trials = [_Contender(way, *_middle(data, base, _TRIAL_NBYTES)) for way in ways]
    for _ in range(2):  # the first round also imports and allocates
        trials = _round(trials, skipped)
    costs = sorted(trial.seconds / trial.data.size * data.size for trial in trials)
    left = share = seconds / _ROUNDS
    for i, cost in enumerate(costs):
        share = left / (len(costs) - i)
        left -= min(cost, share)
    contenders = []
    for trial in trials:
        nbytes = int(share * trial.data.size / max(trial.seconds, 1e-9))
        contenders.append(_Contender(trial.way, *_middle(data, base, max(nbytes, _MIN_NBYTES))))
    return contenders


def _middle(data: _Bytes, base: _Bytes | None, nbytes: int) -> tuple[_Bytes, _Bytes | None]:
    """A part from the middle of the sample; all of it, if that has few bytes more."""
    if data.size < nbytes + _ALIGNMENT:
        return data, base
    n_blocks = nbytes // _ALIGNMENT
    start = (data.size // _ALIGNMENT - n_blocks) // 2 * _ALIGNMENT
    part = slice(start, start + n_blocks * _ALIGNMENT)
    return data[part], None if base is None else base[part]


def _compete(
    contenders: list[_Contender], seconds: float, skipped: dict[str, str]
) -> list[_Contender]:
    """Run all in turn; a round begins only if the time suffices for it."""
    begun = time.process_time()
    for done in range(_ROUNDS):
        spent = time.process_time() - begun
        if done and spent * (done + 1) / done > seconds:
            break
        contenders = _round(contenders, skipped)
    return contenders


def _round(contenders: Sequence[_Contender], skipped: dict[str, str]) -> list[_Contender]:
    """Run each once; returns those that did not fail. Whatever is wrong with a rival, the rest of
    the comparison stands without it."""
    left = []
    for contender in contenders:
        try:
            contender.run()
        except Exception as error:
            if contender.way.is_ours:
                raise
            skipped[contender.way.name] = f"it failed on this sample: {error}"
        else:
            left.append(contender)
    return left


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    begun = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - begun


def _nbytes(piece: Frame | Buffer) -> int:
    return piece.nbytes if isinstance(piece, Frame) else memoryview(piece).nbytes


def _row(contender: _Contender, contenders: Sequence[_Contender]) -> EngineRow:
    way, nbytes = contender.way, contender.data.size
    others = [other for other in contenders if other.way.is_ours != way.is_ours]
    return EngineRow(
        way.name,
        way.is_ours,
        contender.packed_nbytes,
        nbytes,
        _rate(nbytes, contender.pack_seconds),
        _rate(nbytes, contender.unpack_seconds),
        any(_beats(other, contender) for other in others),
        way.note,
    )


def _rate(nbytes: int, seconds: Sequence[float]) -> float | None:
    return nbytes / max(min(seconds), 1e-9) / 1e9 if seconds else None


def _beats(one: _Contender, other: _Contender) -> bool:
    """Whether one way packs shorter, and packs and unpacks faster. Where there is only the size of
    the other, that decides; where there is only the size of the first, it beats nothing."""
    if one.way.sized is not None:
        return False
    shorter = one.packed_nbytes * other.data.size < other.packed_nbytes * one.data.size
    if other.way.sized is not None:
        return shorter
    pairs = ((one.pack_seconds, other.pack_seconds), (one.unpack_seconds, other.unpack_seconds))
    return shorter and all(
        min(mine) * other.data.size < min(theirs) * one.data.size for mine, theirs in pairs
    )


def _ways(
    dtype: str, has_base: bool, shape: Sequence[int] | None, skipped: dict[str, str]
) -> Iterator[_Way]:
    """All ways that can run here; the others go to `skipped`, with the reason."""
    width = DTYPE_BY_NAME[dtype].unit_nbytes
    engines = list(_engines(skipped))
    for engine in engines:
        yield _on_bytes(engine, has_base)
    if width > 1:
        for engine in engines:
            yield _on_groups(engine, width, has_base)
    else:
        skipped["grouped"] = f"units of {dtype} have one byte, so that there is one group"
    yield _lmc(width, has_base)
    yield _on_groups(_HUFFMAN, width, has_base)
    for name, make in (("zipnn", _zipnn), ("openzl", _openzl)):
        try:
            yield make(dtype, has_base)
        except ImportError:
            skipped[name] = f"it is not installed; install it with: pip install {name}"
        except _UnfitError as error:
            skipped[name] = str(error)
    for level in ("fast", "default", "max"):
        yield _ours(dtype, level, has_base, shape)


class _UnfitError(Exception):
    """A rival that does not take this dtype."""


def _engines(skipped: dict[str, str]) -> Iterator[_Engine]:
    """The engines of the paper, each at the level that it has by default."""
    yield _Engine("gzip 6", partial(gzip.compress, compresslevel=6, mtime=0), gzip.decompress)
    yield _Engine("bz2 9", bz2.compress, bz2.decompress)
    yield _Engine("xz 6", lzma.compress, lzma.decompress)
    packer, unpacker = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    yield _Engine("zstd 3", packer.compress, unpacker.decompress)
    try:
        lz4 = import_module("lz4.block")
    except ImportError:
        skipped["lz4"] = "it is not installed; install it with: pip install lz4"
    else:
        yield _Engine("lz4", lz4.compress, lz4.decompress)


def _huffman_only(data: _Bytes) -> bytes:
    """Deflate without matches: Huffman codes of at most 15 bits, a code for each 32 KiB or so."""
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY, wbits=-15, memLevel=9)
    return coder.compress(data) + coder.flush()


_HUFFMAN = _Engine("Huffman of zlib", _huffman_only, partial(zlib.decompress, wbits=-15))


def _named(engine: str, has_base: bool, *, is_grouped: bool) -> str:
    words = ["XOR"] * has_base + ["grouped"] * is_grouped
    return ", ".join([engine, *words])


def _xor(data: _Bytes, base: _Bytes | None) -> _Bytes:
    return data if base is None else data ^ base


def _on_bytes(engine: _Engine, has_base: bool) -> _Way:
    """An engine on the bytes as they are."""

    def pack(data: _Bytes, base: _Bytes | None) -> list[Buffer]:
        return [engine.pack(_xor(data, base))]

    def unpack(packed: list[Buffer], base: _Bytes | None) -> _Bytes:
        return _xor(np.frombuffer(engine.unpack(packed[0]), np.uint8), base)

    return _Way(_named(engine.name, has_base, is_grouped=False), pack, unpack)


def _groups(data: _Bytes, width: int) -> NDArray[np.uint8]:
    """Byte i of all elements together, for each i; shape (width, elements)."""
    return np.ascontiguousarray(data.reshape(-1, width).T)


def _on_groups(engine: _Engine, width: int, has_base: bool) -> _Way:
    """An engine on the bytes grouped by their place in the element, each group on its own."""

    def pack(data: _Bytes, base: _Bytes | None) -> list[Buffer]:
        return [engine.pack(group) for group in _groups(_xor(data, base), width)]

    def unpack(packed: list[Buffer], base: _Bytes | None) -> _Bytes:
        groups = [np.frombuffer(engine.unpack(piece), np.uint8) for piece in packed]
        return _xor(np.stack(groups, axis=1).reshape(-1), base)

    return _Way(_named(engine.name, has_base, is_grouped=width > 1), pack, unpack)


def _lmc(width: int, has_base: bool) -> _Way:
    """What LMC packs: Huffman codes of grouped bytes. The paper's code is not public."""

    def sized(data: _Bytes, base: _Bytes | None) -> int:
        groups = _groups(_xor(data, base), width)
        return sum(huffman_nbytes(np.bincount(group, minlength=256)) for group in groups)

    name = _named("LMC: Huffman", has_base, is_grouped=width > 1)
    return _Way(name, sized=sized, note="size only, with one code for each group")


def huffman_nbytes(counts: NDArray[np.int64]) -> int:
    """What a plane of bytes takes as a canonical Huffman code: the codes, and a table of lengths.

    Args:
        counts: how often each of the 256 values occurs; (256,).

    Returns:
        Bytes: the bits of all codes, and a byte for each value up to the greatest that occurs. The
        shortest code has one bit, even if there is one value only.
    """
    weights = [int(n) for n in counts if n]
    if not weights:
        return 0
    table = int(np.flatnonzero(counts)[-1]) + 1
    if len(weights) == 1:
        return table + -(-weights[0] // 8)
    # Each merge of the two lightest subtrees makes all codes below it a bit longer.
    heapify(weights)
    n_bits = 0
    while len(weights) > 1:
        merged = heappop(weights) + heappop(weights)
        n_bits += merged
        heappush(weights, merged)
    return table + -(-n_bits // 8)


def _zipnn(dtype: str, has_base: bool) -> _Way:
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
    if dtype not in names:
        raise _UnfitError(f"it packs no {dtype}, only {', '.join(names)}")
    zipnn = import_module("zipnn")
    options = {"input_format": "byte", "bytearray_dtype": names[dtype], "threads": 1}
    options |= {"delta_compressed_type": "byte"} if has_base else {}
    packer, unpacker = zipnn.ZipNN(**options), zipnn.ZipNN(**options)

    def pack(data: _Bytes, base: _Bytes | None) -> list[Buffer]:
        if base is not None:
            return [packer.compress(data, delta_second_data=memoryview(base))]
        return [packer.compress(memoryview(data))]

    def unpack(packed: list[Any], base: _Bytes | None) -> Any:
        if base is not None:
            return unpacker.decompress(packed[0], delta_second_data=memoryview(base))
        return unpacker.decompress(packed[0])

    # It rearranges the bits of its input in place.
    return _Way(_named("zipnn", has_base, is_grouped=False), pack, unpack, overwrites=True)


def _openzl(dtype: str, has_base: bool) -> _Way:
    zl = import_module("openzl.ext")
    compressor = zl.Compressor()
    compressor.select_starting_graph(_openzl_graph(zl, compressor, dtype))
    packer, unpacker = zl.CCtx(), zl.DCtx()
    packer.ref_compressor(compressor)
    packer.set_parameter(zl.CParam.StickyParameters, 1)
    packer.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
    width = DTYPE_BY_NAME[dtype].unit_nbytes

    def pack(data: _Bytes, base: _Bytes | None) -> list[Buffer]:
        units = _xor(data, base).view(f"u{width}")
        return [packer.compress([zl.Input(zl.Type.Numeric, units)])]

    def unpack(packed: list[Buffer], base: _Bytes | None) -> _Bytes:
        kept = unpacker.decompress(packed[0])
        return _xor(kept[0].content.as_nparray().view(np.uint8).copy(), base)

    return _Way(_named("openzl", has_base, is_grouped=False), pack, unpack)


def _openzl_graph(zl: Any, compressor: Any, dtype: str) -> Any:
    """Exponents, and the rest byte by byte, each coded with its FSE; integers as it likes."""
    coded = zl.graphs.Fse()(compressor)
    lanes = zl.nodes.TransposeSplit()(compressor, coded)
    if dtype == "BF16":
        return zl.nodes.BFloat16Deconstruct()(compressor, sign_frac=coded, exponent=coded)
    if dtype == "F32":
        return zl.nodes.Float32Deconstruct()(compressor, sign_frac=lanes, exponent=coded)
    if dtype == "F16":
        return zl.nodes.ConvertNumToStructLE()(compressor, lanes)
    return zl.graphs.Compress()(compressor)


def _ours(dtype: str, level: str, has_base: bool, shape: Sequence[int] | None) -> _Way:
    """Packhorse, from and into memory that the caller has, as its API offers."""
    bits = DTYPE_BY_NAME[dtype].bits
    memory: dict[int, tuple[_Bytes, _Bytes]] = {}

    def pack(data: _Bytes, base: _Bytes | None) -> list[Frame]:
        numel = 8 * data.size // bits
        whole = shape is not None and int(np.prod(shape, dtype=np.int64)) == numel
        own = tuple(shape) if shape is not None and whole else (numel,)
        if data.size not in memory:
            sizes = max_frame_nbytes(dtype, own), data.size
            memory[data.size] = np.zeros(sizes[0], np.uint8), np.zeros(sizes[1], np.uint8)
        out = memory[data.size][0]
        return [compress_buffer(data, dtype, own, level=level, threads=1, out=out, base=base)]

    def unpack(packed: list[Frame], base: _Bytes | None) -> _Bytes:
        back = memory[packed[0].logical_nbytes][1]
        packed[0].decompress_into(back, threads=1, base=base)
        return back

    name = f"Packhorse {level}" + ", delta" * has_base
    return _Way(name, pack, unpack, is_ours=True)
