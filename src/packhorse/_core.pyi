"""Types of the C++ core (csrc/bind/bind.cpp). `isa` is 0 portable, 1 AVX2, 2 AVX-512, 3 with VBMI2;
arrays are one-dimensional uint8 unless said otherwise. `side` is empty where a frame has no side
data, `base` where it has no base."""

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Table = NDArray[np.uint32]  # (chunks, 1 + planes): CRC32C, then descriptors
_Elements = NDArray[np.uint16]  # (rows, columns)
_Planes = NDArray[np.uint8]  # (rows, bytes of a row)
_Numbers = NDArray[np.int32]

def detect_isa() -> int: ...
def fail_at_exit() -> None: ...

class FileMapper:
    def __init__(self) -> None: ...
    def map(self, descriptor: int, offset: int, nbytes: int) -> memoryview: ...
    @property
    def has_lost(self) -> bool: ...

def environment(name: str) -> str | None: ...
def encode_chunks(
    src: _Bytes,
    unit_nbytes: int,
    split: int,
    chunk_log: int,
    level: int,
    side: bytes,
    n_rows: int,
    base: _Bytes,
    is_float: bool,
    cast: int,
    plain_nbytes: int,
    dst: _Bytes,
    table: _Table,
    leaves: _Bytes,
    base_leaves: _Bytes,
    threads: int,
    isa: int,
) -> int: ...
def decode_range(
    payload: _Bytes,
    table: _Table,
    unit_nbytes: int,
    split: int,
    chunk_log: int,
    nbytes: int,
    side: _Bytes,
    n_rows: int,
    base: _Bytes,
    is_float: bool,
    cast: int,
    start: int,
    dst: _Bytes,
    check: bool,
    threads: int,
    isa: int,
) -> tuple[int, int]: ...
def check_table(
    table: _Table, unit_nbytes: int, split: int, chunk_log: int, nbytes: int, has_base: bool
) -> tuple[int, int, int, int]: ...
def estimate_delta(
    src: _Bytes,
    unit_nbytes: int,
    split: int,
    chunk_log: int,
    base: _Bytes,
    is_float: bool,
    cast: int,
    plain_nbytes: int,
    level: int,
    isa: int,
) -> int: ...
def estimate_planes(
    src: _Bytes, unit_nbytes: int, split: int, level: int, n_samples: int, isa: int
) -> tuple[list[tuple[int, int]], bool]: ...
def estimate_side_data(
    src: _Bytes, unit_nbytes: int, n_rows: int, most_rows: int, most_columns: int, isa: int
) -> tuple[int, int]: ...
def make_side_data(src: _Bytes, unit_nbytes: int, n_rows: int, side: _Bytes, isa: int) -> None: ...
def encode_plane(src: _Bytes, mode: int, dst: _Bytes, isa: int) -> int: ...
def decode_plane(stream: _Bytes, mode: int, dst: _Bytes, isa: int) -> int: ...
def split(src: _Bytes, unit_nbytes: int, split: int, planes: _Bytes, isa: int) -> None: ...
def merge(planes: _Bytes, unit_nbytes: int, split: int, dst: _Bytes, isa: int) -> None: ...
def crc32c(src: _Bytes | bytes, isa: int) -> int: ...
def leaf_digests(src: _Bytes, digests: _Bytes, threads: int, isa: int) -> None: ...
def copy_with_leaves(src: _Bytes, dst: _Bytes, leaves: _Bytes, isa: int) -> None: ...
def plan_chunks(
    payload: _Bytes,
    table: NDArray[np.uint32],
    unit_nbytes: int,
    split: int,
    chunk_log: int,
    nbytes: int,
) -> tuple[tuple[int, int, int, int], _Bytes, tuple[int, int, int, int, int, int]]: ...
def zstd_frame_nbytes(src: _Bytes, header_nbytes: int, has_checksum: bool) -> int: ...
def pack_weights(
    elements: _Elements,
    bits: int,
    low_bytes: _Planes,
    high_bits: _Planes,
    first_exponents: _Bytes,
    counts: _Numbers,
    threads: int,
    isa: int,
) -> _Numbers: ...
def count_weight_exceptions(
    elements: _Elements, bits: int, row_step: int, threads: int, isa: int
) -> int: ...
def unpack_weights(
    low_bytes: _Planes,
    high_bits: _Planes,
    first_exponents: _Bytes,
    exception_starts: _Numbers,
    exceptions: _Numbers,
    bits: int,
    row_start: int,
    dst: _Elements,
    threads: int,
    isa: int,
) -> int: ...
def check_weights(
    low_bytes: _Planes,
    high_bits: _Planes,
    first_exponents: _Bytes,
    exception_starts: _Numbers,
    exceptions: _Numbers,
    bits: int,
    n_columns: int,
    isa: int,
) -> tuple[int, int, int, int]: ...
