"""Measures the codecs' speed in memory, tensor by tensor, on the tensors of one file.

Each tensor is read once, then compressed and decompressed several times in the same memory, as a
training loop or a loader would do. So neither the disk nor page faults are measured. The fastest
run counts, because disturbances only make a run slower. Outside the timed part, the last decoded
copy of each tensor is compared with the original.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packhorse.cli.rows import BenchRow, gb_per_s, ratio
from packhorse.disk.base_files import BaseTensor, open_bases
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.storage.locations import Place
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source import open_source

__all__ = ["Settings", "bench_file"]

_TOTAL = "all"
_Bytes = NDArray[np.uint8]


@dataclass
class _Sum:
    """Running sums over the tensors of one dtype."""

    n_tensors: int = 0
    nbytes: int = 0
    packed_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    bit_exact: bool = True

    def add(self, other: "_Sum") -> None:
        self.n_tensors += other.n_tensors
        self.nbytes += other.nbytes
        self.packed_nbytes += other.packed_nbytes
        self.encode_seconds += other.encode_seconds
        self.decode_seconds += other.decode_seconds
        self.bit_exact &= other.bit_exact

    def row(self, dtype: str) -> BenchRow:
        return BenchRow(
            dtype=dtype,
            n_tensors=self.n_tensors,
            nbytes=self.nbytes,
            packed_nbytes=self.packed_nbytes,
            ratio=ratio(self.nbytes, self.packed_nbytes),
            encode_gb_per_s=gb_per_s(self.nbytes, self.encode_seconds),
            decode_gb_per_s=gb_per_s(self.nbytes, self.decode_seconds),
            bit_exact=self.bit_exact,
        )


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        level: the level's name.
        threads: the number of threads, to encode and to decode.
        repeats: how many timed runs; the fastest counts.
    """

    level: str
    threads: int
    repeats: int


def bench_file(
    path: Place,
    settings: Settings,
    advance: Callable[[int], None] | None = None,
    *,
    base: Place | None = None,
) -> list[BenchRow]:
    """Time every tensor of a safetensors file.

    Args:
        path: the file.
        settings: how to measure.
        advance: called with the bytes of each tensor when it is done.
        base: a model file or folder to pack against; None to pack without a base.

    Returns:
        A row for each dtype, in the order of the file, then the total.
    """
    sums: dict[str, _Sum] = {}
    total = _Sum()
    for entry, measured in _measure(path, base, settings):
        sums.setdefault(entry.dtype, _Sum()).add(measured)
        total.add(measured)
        if advance is not None:
            advance(entry.nbytes)
    return [*(part.row(dtype) for dtype, part in sums.items()), total.row(_TOTAL)]


def _measure(
    path: Place, base: Place | None, settings: Settings
) -> Iterator[tuple[TensorEntry, _Sum]]:
    with open_source(path) as source, open_bases(base) as opened:
        header = source.header()
        largest = max((entry.nbytes for entry in header.entries), default=0)
        src, dst = np.zeros(largest, np.uint8), np.zeros(largest, np.uint8)
        frames = (max_frame_nbytes(entry.dtype, entry.shape) for entry in header.entries)
        out = np.zeros(max(frames, default=0), np.uint8)
        bases = opened.for_packing(header.entries, path, path.name) if opened else {}
        for entry in header.entries:
            data = src[: entry.nbytes]
            data[:] = source.map(header.data_offset + entry.start, entry.nbytes)
            back, against = dst[: entry.nbytes], bases.get(entry.name)
            yield entry, _measure_one(entry, data, back, out, against, settings)
        source.check()
        if opened is not None:
            opened.check_unchanged()


def _measure_one(
    entry: TensorEntry,
    data: _Bytes,
    back: _Bytes,
    out: _Bytes,
    against: BaseTensor | None,
    settings: Settings,
) -> _Sum:
    level, threads = settings.level, settings.threads
    # A copy, because a mapped base would be read from the disk during the first run.
    base = np.array(np.frombuffer(against.read(threads), np.uint8)) if against else None

    def encode() -> Frame:
        return compress_buffer(
            data, entry.dtype, entry.shape, level=level, threads=threads, out=out, name=entry.name,
            base=base, base_dtype=against.dtype if against else None,
        )  # fmt: skip

    def decode() -> None:
        frame.decompress_into(back, threads=threads, base=base)

    frame = encode()
    encode_seconds = _best(encode, settings.repeats)
    decode_seconds = _best(decode, settings.repeats)
    return _Sum(
        n_tensors=1,
        nbytes=entry.nbytes,
        packed_nbytes=frame.nbytes,
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
        bit_exact=bool(np.array_equal(data, back)),
    )


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
