"""The battery that every codec, dtype, size and code path must pass, and the data it runs on.

Tensors are handed over in guarded memory: read-only pages, with an unmapped page right behind the
last byte and another before the first page. A write to the input, a read behind its end, or a write
behind the end of the output ends the test run with a fault. `check_tensor` checks the whole
contract of a frame in one call: the round trip is exact, every code path and number of threads
gives the same bytes, and the slow decoder agrees.

`SAMPLES` are the frames that the tests of hostile input damage: one built by hand for each mode,
and some made by the encoder. To add a mode to all these tests, add a line to `frame_builder.SMALL`,
and one to `REAL` if the encoder chooses the mode.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import frame_builder as fb
import ml_dtypes
import numpy as np

from packhorse import _core
from packhorse.codecs.base import ISA_VARIABLE, available_isas
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.layout import (
    BASE_BLOCK_NBYTES,
    CHUNK_NBYTES,
    DTYPE_BY_NAME,
    FIXED_HEADER_NBYTES,
    HEADER_CRC_OFFSET,
    Mode,
)
from packhorse.reference import decode_frame

__all__ = [
    "FLOATS",
    "ISAS",
    "KINDS",
    "LARGE",
    "REAL",
    "SAMPLES",
    "SANITIZED",
    "SMALL",
    "Sample",
    "check_paths",
    "check_tensor",
    "forced",
    "guarded",
    "guarded_output",
    "large_sizes",
    "make_data",
    "sample",
    "second_moment",
    "symbols",
    "tensor_shape",
]

SMALL = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 8191, 8192, 8193)  # units
LARGE = ("chunk-1", "chunk", "chunk+1", "1.5 chunks", "3 chunks+17")
REFERENCE_NBYTES = 8000  # above this the slow decoder would take all the time

# The address sanitizer reserves a large address space, and treats lack of memory as a fault.
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_PROT_NONE = 0


def _available() -> tuple[str, ...]:
    """The code paths of this machine, or the one that the environment asks for."""
    if os.environ.get(ISA_VARIABLE):
        return (os.environ[ISA_VARIABLE],)
    return tuple(isa.name.lower() for isa in available_isas())


ISAS = _available()


@contextlib.contextmanager
def forced(isa: str) -> Iterator[None]:
    """Run a code path, in this process and until the end of the `with`."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        if before is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = before


def _protect(region: mmap.mmap, offset: int, nbytes: int, protection: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(region)) + offset
    if nbytes and _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded_output(nbytes: int) -> memoryview:
    """Writable memory full of 0xA5 between unmapped pages, right before the second of them."""
    end = (1 + -(-nbytes // _PAGE)) * _PAGE
    region = mmap.mmap(-1, end + _PAGE)
    region.write(b"\xa5" * end)
    _protect(region, 0, _PAGE, _PROT_NONE)
    _protect(region, end, _PAGE, _PROT_NONE)
    return memoryview(region)[end - nbytes : end]


def guarded(data: bytes) -> memoryview:
    """Read-only memory that holds `data` and ends at an unmapped page."""
    view = guarded_output(len(data))
    view[:] = data
    region = view.obj
    assert isinstance(region, mmap.mmap)
    _protect(region, _PAGE, len(region) - 2 * _PAGE, mmap.PROT_READ)
    return view.toreadonly()


# Kinds of data. Each makes `n` units of `size` bytes.

FLOATS = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "C64": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
Kind = Callable[[np.random.Generator, int, int], np.ndarray]


def _uint(size: int) -> np.dtype:
    return np.dtype(f"<u{size}")


def _noise(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    return rng.integers(0, 256, (n, size), np.uint8).view(_uint(size)).reshape(n)


def _constant(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    return np.repeat(_noise(rng, 1, size), n)


def _sparse(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    units = np.zeros(n, _uint(size))
    places = rng.integers(0, max(n, 1), n // 50)
    units[places] = _noise(rng, places.size, size)
    return units


def _sorted(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    return np.cumsum(rng.integers(0, 3, n)).astype(_uint(size))


def _pick(rng: np.random.Generator, n: int, size: int, n_values: int) -> np.ndarray:
    values = _noise(rng, n_values, size)
    return values[np.minimum(rng.geometric(0.35, n) - 1, n_values - 1)]


def _few(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    return _pick(rng, n, size, 5)


def _alternating(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    return np.resize(_noise(rng, 2, size), n)


def _outlier(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    units = _constant(rng, n, size)
    if n:
        units[rng.integers(n)] ^= np.array(1, _uint(size))
    return units


@functools.lru_cache(maxsize=1000)
def symbols(n: int, n_values: int, seed: int = 0) -> np.ndarray:
    """`n` bytes of `n_values` values, skewed enough to pay; all of them occur if `n` allows."""
    rng = np.random.default_rng([seed, n, n_values])
    values = rng.permutation(256)[:n_values].astype(np.uint8)
    plane = values[np.minimum(rng.geometric(min(0.8, 3 / n_values), n), n_values) - 1]
    plane[: min(n, n_values)] = values[:n]
    return rng.permutation(plane)


def _bytes_of(n_values: int) -> Kind:
    def make(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
        rows = [symbols(min(n, 8193), n_values, p) for p in range(size)]
        planes = [rng.permutation(np.resize(row, n)) for row in rows]
        return np.stack(planes, axis=1).reshape(-1).view(_uint(size))

    return make


def _ids(rng: np.random.Generator, n: int, unit_nbytes: int) -> np.ndarray:
    """Phrases that come again and again, with other values between them, and a long run."""
    most = min(1 << 15, 1 << 8 * unit_nbytes)
    phrases = [rng.integers(0, most, rng.integers(2, 40)) for _ in range(60)]
    parts, size = [np.full(min(n, 700), 3)], 700
    while size < n:
        parts += [phrases[rng.integers(60)], rng.integers(0, most, rng.integers(0, 4))]
        size += parts[-2].size + parts[-1].size
    return np.concatenate(parts)[:n].astype(_uint(unit_nbytes))


def _steps(rng: np.random.Generator, n: int, unit_nbytes: int) -> np.ndarray:
    """Numbers that rise by small steps, and fall now and then."""
    steps = rng.integers(0, 9, n) - 3000 * (rng.random(n) < 0.001)
    return (1 << 40 | np.cumsum(steps)).astype(np.uint64).astype(_uint(unit_nbytes))


KINDS: dict[str, Kind] = {
    "weights": _noise,  # `make_data` knows what weights look like in each dtype
    "constant": _constant,
    "sparse": _sparse,
    "noise": _noise,
    "sorted": _sorted,
    "few": _few,
    "alternating": _alternating,
    "outlier": _outlier,
    "ids": _ids,
    "steps": _steps,
    **{f"{n} values": _bytes_of(n) for n in (31, 32, 33, 100, 255, 256)},
}


def _weights(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray:
    normal = rng.standard_normal(n)
    if dtype in FLOATS:
        return (normal * 0.05).astype(FLOATS[dtype])
    return (normal * 20).astype(np.int64).astype(_uint(DTYPE_BY_NAME[dtype].unit_nbytes))


def _halves(rng: np.random.Generator, n: int, unit_nbytes: int) -> np.ndarray:
    """Weights of four bits, two in a byte."""
    shape = (n, unit_nbytes, 2)
    halves = np.clip(np.rint(rng.standard_normal(shape) * 2.5 + 7.5), 0, 15).astype(np.uint8)
    return halves[..., 0] | halves[..., 1] << 4


def make_data(kind: str, dtype: str, n_units: int, seed: int = 0) -> bytes:
    """About `n_units` units: as many as whole elements need."""
    row = DTYPE_BY_NAME[dtype]
    element = {6: 3}.get(row.bits, max(1, row.bits // 8)) // row.unit_nbytes or 1
    n = -(-n_units // element) * element
    rng = np.random.default_rng([seed, n, len(kind)])
    if kind == "weights":
        return _weights(rng, n, dtype).tobytes()
    if kind == "halves":
        return _halves(rng, n, row.unit_nbytes).tobytes()
    return KINDS[kind](rng, n, row.unit_nbytes).tobytes()


def tensor_shape(data: bytes, dtype: str) -> tuple[int, ...]:
    return (len(data) * 8 // DTYPE_BY_NAME[dtype].bits,)


def large_sizes(dtype: str) -> dict[str, int]:
    """Units of tensors around the limits of a chunk."""
    chunk = CHUNK_NBYTES // DTYPE_BY_NAME[dtype].unit_nbytes
    sizes = (chunk - 1, chunk, chunk + 1, chunk * 3 // 2, 3 * chunk + 17)
    return dict(zip(LARGE, sizes, strict=True))


def check_tensor(data: bytes, dtype: str, *, level: str = "default") -> Frame:
    """Pack and unpack a tensor in every code path, with 1, 2 and 3 threads.

    Args:
        data: the tensor's bytes.
        dtype: safetensors' name.
        level: how hard to try.

    Returns:
        The frame, for further questions.
    """
    shape = tensor_shape(data, dtype)
    source, threads = guarded(data), cycle((1, 2, 3))
    frames = []
    for isa in (ISAS * 2)[: max(2, len(ISAS))]:
        out = guarded_output(max_frame_nbytes(dtype, shape))
        with forced(isa):
            frames.append(
                compress_buffer(source, dtype, shape, level=level, threads=next(threads), out=out)
            )
    packed = frames[0].to_bytes()
    assert all(frame.to_bytes() == packed for frame in frames[1:]), "the paths' bytes differ"
    assert source == data
    stream = guarded(packed)
    for isa in ISAS:
        with forced(isa):
            _check_decoding(stream, data, dtype, next(threads))
    if len(data) <= REFERENCE_NBYTES:
        assert decode_frame(packed).data == data, "the reference decoder reads other bytes"
    return frames[0]


def check_paths(data: bytes, pack: Callable[[int], Frame]) -> Frame:
    """Every code path writes the same bytes, and reads them, whole and in part.

    Args:
        data: the tensor's bytes.
        pack: packs them with this number of threads, another one in each path.

    Returns:
        The frame, for further questions.
    """
    frames = []
    for threads, isa in enumerate(ISAS, 1):
        with forced(isa):
            frames.append(pack(threads))
    packed = frames[0].to_bytes()
    assert all(frame.to_bytes() == packed for frame in frames), "the paths' bytes differ"
    for isa in ISAS:
        with forced(isa):
            frame = Frame.from_buffer(guarded(packed))
            target = guarded_output(len(data))
            frame.decompress_into(target, threads=2)
            assert bytes(target) == data
            first, stop = len(data) // 3, len(data) - len(data) // 5
            part = guarded_output(stop - first)
            frame.decompress_into(part, start=first, stop=stop)
            assert bytes(part) == data[first:stop]
            frame.verify()
    return frame


# Frames for the tests that damage them.


def scaled(n_rows: int, n_columns: int) -> bytes:
    """BF16 numbers whose sizes depend on their rows and columns, as in optimizers."""
    rng = np.random.default_rng(n_rows)
    sizes = np.exp(2 * rng.standard_normal((n_rows, 1)) + 2 * rng.standard_normal(n_columns))
    return (rng.standard_normal((n_rows, n_columns)) * sizes).astype(ml_dtypes.bfloat16).tobytes()


def trained(dtype: str, step: float) -> bytes:
    """2,500 weights, each some step away from where it began."""
    rng = np.random.default_rng(1)
    weights = 0.02 * rng.standard_normal(2500)
    weights += step * rng.standard_normal(2500)
    if dtype == "I32":
        return np.rint(1e6 * weights).astype(np.int32).tobytes()
    narrow = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    return weights.astype(narrow[dtype]).tobytes()


@dataclass(frozen=True)
class Real:
    """A frame that the encoder makes.

    Attributes:
        dtype: safetensors' name.
        level: how hard to try.
        mode: one that is met.
        data: the tensor's bytes.
        shape: None for one dimension.
        base: what it may differ from.
    """

    dtype: str
    level: str
    mode: Mode
    data: Callable[[], bytes]
    shape: tuple[int, ...] | None = None
    base: fb.Base | None = None


def _real(dtype: str, kind: str, level: str, mode: Mode, n: int = 2500) -> Real:
    return Real(dtype, level, mode, lambda: make_data(kind, dtype, n))


def _real_delta(dtype: str, base_dtype: str) -> Real:
    base = fb.Base(trained(base_dtype, 0), base_dtype)
    return Real(dtype, "default", Mode.DELTA, lambda: trained(dtype, 1e-3), base=base)


REAL = {
    "real rans": _real("BF16", "weights", "default", Mode.RANS),
    "real rans of several planes": _real("U32", "100 values", "max", Mode.RANS),
    "real plain rans": _real("F8_E4M3", "100 values", "max", Mode.RANS),
    "real palette": _real("BF16", "weights", "fast", Mode.PALETTE),
    "real zstd": _real("BOOL", "ids", "default", Mode.ZSTD),
    "real matches": _real("I64", "sorted", "default", Mode.MATCHES),
    "real nibbles": _real("I32", "halves", "default", Mode.NIBBLES),
    "real stored": _real("F32", "noise", "default", Mode.STORED),
    "real constant": _real("F32", "constant", "default", Mode.CONSTANT),
    "real outlier": _real("F16", "outlier", "default", Mode.ZSTD),
    "real lead": _real("BF16", "weights", "max", Mode.CLASSED_RANS, 60_000),
    "real delta": _real_delta("BF16", "BF16"),
    "real delta of F32": _real_delta("F16", "F32"),
    "real delta of integers": _real_delta("I32", "I32"),
    "real prediction": Real("BF16", "max", Mode.CLASSED_RANS, lambda: scaled(128, 256), (128, 256)),
}
SAMPLES = (*fb.SMALL, *fb.DELTAS, *REAL)


@dataclass(frozen=True)
class Sample:
    """A good frame.

    Attributes:
        frame: its bytes.
        source: what it decodes to.
        base: what it is decoded with.
    """

    frame: bytes
    source: bytes
    base: bytes | None = None

    @property
    def payload_offset(self) -> int:
        return int.from_bytes(self.frame[12:16], "little")

    @functools.cached_property
    def _chunks(self) -> list[tuple[int, int, int]]:
        """The place of each chunk's checksum, and where the chunk begins and ends."""
        header = Frame.from_buffer(self.frame).header
        n_chunks, n_columns = header.table.shape
        table = FIXED_HEADER_NBYTES + 8 * len(header.shape)
        table += 0 if self.base is None else BASE_BLOCK_NBYTES
        starts = [header.chunk_offset(chunk) for chunk in range(n_chunks)]
        ends = [*starts[1:], len(self.frame)]
        places = range(table, table + 4 * n_columns * n_chunks, 4 * n_columns)
        return list(zip(places, starts, ends, strict=False))  # no chunk, and yet an end

    def flipped(self, bit: int) -> bytearray:
        """The frame with one bit flipped."""
        damaged = bytearray(self.frame)
        damaged[bit // 8] ^= 1 << bit % 8
        return damaged

    def sealed(self, damaged: bytearray) -> bytes:
        """A damaged copy of the frame with corrected checksums of chunks and header.

        The places of chunks and checksums are those of the good frame.
        """
        for at, start, stop in self._chunks:
            damaged[at : at + 4] = _crc(damaged[start:stop])
        place = slice(HEADER_CRC_OFFSET, HEADER_CRC_OFFSET + 4)
        damaged[place] = bytes(4)
        damaged[place] = _crc(damaged[: self.payload_offset])
        return bytes(damaged)


def _crc(data: bytearray) -> bytes:
    return _core.crc32c(np.frombuffer(bytes(data), np.uint8)).to_bytes(4, "little")


@functools.cache
def sample(name: str) -> Sample:
    """One of `SAMPLES`."""
    if name in (small := {**fb.SMALL, **fb.DELTAS}):
        built = small[name]()
        return Sample(bytes(built), built.source, built.base)
    real = REAL[name]
    data = real.data()
    shape = real.shape or tensor_shape(data, real.dtype)
    given = {"base": real.base.data, "base_dtype": real.base.dtype} if real.base else {}
    frame = compress_buffer(data, real.dtype, shape, level=real.level, **given)
    return Sample(frame.to_bytes(), data, real.base.data if real.base else None)


def _check_decoding(stream: memoryview, data: bytes, dtype: str, threads: int) -> None:
    frame = Frame.from_buffer(stream)
    assert (frame.dtype, frame.shape) == (dtype, tensor_shape(data, dtype))
    target = guarded_output(len(data))
    frame.decompress_into(target, threads=threads)
    assert target == data, "the tensor came back changed"
    frame.verify(threads=threads)


def second_moment(shape: tuple[int, ...], seed: int = 1, spread: float = 3) -> np.ndarray:
    """Squares whose size follows row and column, as Adam's second moment does."""
    rng = np.random.default_rng(seed)
    rows, columns = shape[0], int(np.prod(shape[1:]))
    scale = np.exp(spread * rng.standard_normal((rows, 1)))
    scale = scale * np.exp(spread * rng.standard_normal((1, columns)))
    return (1e-3 * scale * rng.standard_normal((rows, columns)) ** 2).reshape(shape)
