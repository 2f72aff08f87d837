"""Types of the C++ core (csrc/bind/). Arrays are one-dimensional uint8 unless said otherwise.

Every function that computes uses the best instruction set of this machine, unless the environment
variable `PACKHORSE_SIMD` names another one. It raises `ValueError` if that is an unknown name, and
`MissingBackendError` if this machine lacks it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Table = NDArray[np.uint32]  # (chunks, 1 + planes): CRC32C, then descriptors
_Elements = NDArray[np.uint16]  # (rows, columns)
_Planes = NDArray[np.uint8]  # (rows, bytes of a row)
_Numbers = NDArray[np.int32]
_Integers = NDArray[np.int64]
_Addresses = NDArray[np.uint64]
_Slots = NDArray[np.uint64]
_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]
_Entry = TypeVar("_Entry")

# Instruction sets are 0 portable, 1 AVX2, 2 AVX-512, 3 with VBMI2: the best of this machine, and
# the one that is used. `best` is for tests: what the machine is taken to have.
def detect_isa() -> int: ...
def choose_isa(best: int = -1) -> int: ...
def has_isa(isa: int) -> bool: ...
def fail_at_exit() -> None: ...

class FileMapper:
    def __init__(self) -> None: ...
    def map(self, descriptor: int, offset: int, nbytes: int) -> memoryview: ...
    @property
    def has_lost(self) -> bool: ...

class Geometry:
    """How a tensor is cut: into units, units into planes, and runs of units into chunks. Geometries
    are immutable, and equal if their numbers are.

    Raises:
        ValueError: numbers that do not fit each other.
    """

    def __init__(self, unit_nbytes: int, split: int, chunk_log: int, nbytes: int) -> None: ...
    @property
    def unit_nbytes(self) -> int: ...
    @property
    def split(self) -> int: ...  # a `layout.Split`
    @property
    def chunk_log(self) -> int: ...  # log2 of the units of a chunk
    @property
    def nbytes(self) -> int: ...  # of the tensor
    @property
    def n_units(self) -> int: ...
    @property
    def n_planes(self) -> int: ...  # of a chunk
    @property
    def n_chunks(self) -> int: ...
    @property
    def chunk_nbytes(self) -> int: ...  # of a full chunk

class Side:
    """Side data: a byte for each row, then one for each column."""

    def __init__(self, values: _Bytes, n_rows: int) -> None: ...

class Base:
    """All bytes of a base.

    `is_float` says whether units are ordered by their values; `cast` is 0 if the base has the
    tensor's dtype, 1 if the tensor is BF16 rounded from its F32, 2 if it is F16.
    """

    def __init__(self, data: _Bytes, is_float: bool, cast: int) -> None: ...
    @property
    def data(self) -> _Bytes: ...
    @property
    def is_float(self) -> bool: ...
    @property
    def cast(self) -> int: ...

class EncodeContext:
    """What the encoder of a tensor is told beside the tensor. Chunks of differences have no mode
    after `last_mode`, and chunks of few differences at most `max_classes`, if it is not 0. Chunks
    of whole units get the mode `whole`, matches or nibbles, if it is not 0."""

    def __init__(
        self,
        level: int,
        side: Side | None,
        base: Base | None,
        plain_nbytes: int,
        last_mode: int = 7,
        max_classes: int = 0,
        whole: int = 0,
    ) -> None: ...

class EncodeOutput:
    """Where the encoder of a tensor writes. Without `base_leaves`, nothing may change the base
    meanwhile. `kept` is the base, if it is to become the tensor. There are no leaves then, and
    `changes` get, for each chunk, how the content sum changes: three u64."""

    def __init__(
        self,
        payload: _Bytes,
        table: _Table,
        leaves: _Bytes | None,
        base_leaves: _Bytes | None = None,
        kept: _Bytes | None = None,
        changes: _Bytes | None = None,
    ) -> None: ...

class EncodedTensor:
    """What a tensor is decoded from; the table must not change meanwhile."""

    def __init__(
        self,
        payload: _Bytes,
        table: _Table,
        geometry: Geometry,
        side: Side | None,
        base: Base | None,
    ) -> None: ...

class OpenFrame:
    """A frame whose header was checked; it keeps the frame's bytes alive."""

    @property
    def has_zstd(self) -> bool: ...  # any chunk is of mode zstd
    @property
    def stands_alone(self) -> bool: ...  # no base, no side data, no chunk of Zstandard
    @property
    def memory(self) -> Any: ...  # what owns the bytes; None where the caller gave it
    @property
    def frame_nbytes(self) -> int: ...
    @property
    def dtype_code(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def nbytes(self) -> int: ...  # of the tensor
    @property
    def content_hash(self) -> bytes: ...
    @property
    def base_hash(self) -> bytes | None: ...
    @property
    def text(self) -> bytes: ...  # the header

# The fault, its place, what was found, and what would fit; see `frame.header_faults.Found`.
def open_frame(memory: object, max_nbytes: int | None) -> OpenFrame | tuple[int, int, int, int]: ...

# Frames that stand alone. Returns (status, frame, chunk) of the first fault.
def unpack_frames(
    frames: Sequence[OpenFrame], dsts: Sequence[_Bytes], check: bool, threads: int
) -> tuple[int, int, int]: ...

# Opens frames of one buffer, as far as they are frames of tensors of these dtypes and shapes.
def open_frames(
    memory: object,
    starts: Sequence[int],
    lengths: Sequence[int],
    codes: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> list[OpenFrame]: ...

# Opens buffers of plain bytes; None for one that is no such buffer, or is not right.
def open_each(buffers: list[Any]) -> list[OpenFrame | None]: ...

class Views:
    """Where the bytes of tensors lie, as far as the core knows; it keeps them alive."""

    def __init__(self, n: int) -> None: ...  # all unknown
    def __len__(self) -> int: ...
    def unknown(self) -> list[int]: ...
    def nbytes(self, i: int) -> int: ...
    def forget(self, i: int) -> None: ...
    def part(self, numbers: Sequence[int]) -> Views: ...

def views_of_arrays(arrays: list[Any], kind: type, codes: dict[Any, int]) -> Views: ...
def views_of_tensors(
    tensors: list[Any],
    kinds: tuple[type, ...],
    table: object,  # a capsule
    codes: dict[Any, int],
    is_negated: Callable[[Any], bool],
) -> Views: ...

# Buffers of plain bytes: of tensors of these dtypes and shapes, or without those, of no tensors.
def views_of_buffers(
    buffers: list[Any], codes: Sequence[int], shapes: Sequence[Sequence[int]]
) -> Views: ...
def views_of_frames(frames: Sequence[OpenFrame]) -> Views: ...
def views_of_rooms(memory: object, lengths: Sequence[int]) -> Views: ...

# The forms (dtype, shape) of tensors, each once, and the number of each tensor's form.
_Forms: TypeAlias = tuple[list[tuple[int, tuple[int, ...]]], list[int]]

def forms_of_frames(frames: Sequence[OpenFrame]) -> _Forms: ...
def forms_of_views(views: Views) -> _Forms: ...

# Returns (status, frame, chunk) of the first fault, and which frames are left to the caller.
def unpack_to_views(
    frames: Sequence[OpenFrame], dsts: Views, threads: int
) -> tuple[int, int, int, list[int]]: ...

# Which tensors are not known to be writable memory for the tensors of frames.
def misfits(frames: Sequence[OpenFrame], dsts: Views) -> list[int]: ...

# Floats, at a level below max. None for a tensor that is unknown, another one, or needs a plan.
# Without `outs`, frames lie in new bytes, or at the beginning of what `room` makes.
def pack_views(
    srcs: Views,
    outs: Views | None,
    room: Callable[[int], _Bytes] | None,
    level: int,
    threads: int,
) -> list[OpenFrame | None]: ...

# The same to memory of the caller. The length of each frame; 0 where that has None.
def pack_lengths(srcs: Views, outs: Views, level: int, threads: int) -> list[int]: ...

# Moves short frames, each in a room of its own, behind those before. Returns pieces (start, stop).
def close_gaps(
    memory: _Bytes, rooms: Sequence[int], lengths: Sequence[int], max_moved_nbytes: int
) -> list[tuple[int, int]]: ...

# Which tensors do not have the content that their frames declare, or need more to tell: those of
# several leaves, and of frames whose hashes are sums.
def content_faults(frames: Sequence[OpenFrame], views: Views) -> list[int]: ...

# JSON: the entries of frames that follow each other.
def rows_of_frames(names: list[str], lengths: Sequence[int]) -> bytes: ...

# JSON: the entries of tensors that follow each other; the number of the tensor in each row; and the
# entries. `forms` are (rank, dtype, shape, JSON of both, length). The order is by rank and name.
def rows_of_tensors(
    names: list[str],
    numbers: Sequence[int],
    forms: Sequence[tuple[int, str, tuple[int, ...], str, int]],
    kind: type[_Entry],
) -> tuple[bytes, list[int], list[_Entry]]: ...

# The tensors of a header that is written as usual, and the JSON of its metadata.
def file_entries(
    text: bytes, kind: type[_Entry], dtypes: dict[str, int]
) -> tuple[list[_Entry], bytes] | None: ...

# For each view of a tensor that side data are tried for, how many dimensions make its rows.
def side_views(shape: Sequence[int], n_units: int) -> list[int]: ...

# What a sample must show: one part of plane 0 in this many is saved. Then its rows and columns.
def side_rule(level: int) -> tuple[int, int, int]: ...

# Whether memory to write to shares nothing with other such memory, nor with memory to read.
def are_apart(written: Sequence[Views], read: Sequence[Views]) -> bool: ...
def needs_no_plan(src: _Bytes, code: int, shape: Sequence[int], level: int) -> bool: ...
def cut_tensor(unit_nbytes: int, split: int, nbytes: int, chunk_nbytes: int) -> Geometry: ...

# (bits, bytes of a unit, a bit for each split) by the code of a dtype; zeros where there is none.
def dtype_rows() -> list[tuple[int, int, int]]: ...
def xxh3_128(src: _Bytes) -> bytes: ...
def encode_chunks(
    src: _Bytes,
    geometry: Geometry,
    context: EncodeContext,
    output: EncodeOutput,
    threads: int,
    first: int = 0,
) -> int: ...
def decode_range(
    tensor: EncodedTensor, start: int, dst: _Bytes, check: bool, threads: int
) -> tuple[int, int]: ...
def decode_links(
    tensors: Sequence[EncodedTensor],
    kinds: Sequence[tuple[bool, int]],
    dst: _Bytes,
    check: bool,
    threads: int,
) -> tuple[int, int, int]: ...
def patch_base(tensor: EncodedTensor, target: _Bytes, threads: int) -> tuple[int, int]: ...

class TensorPatch:
    """What is written to a base to make it a tensor."""

    @property
    def nbytes(self) -> int: ...  # of memory
    def write(self, target: _Bytes, threads: int) -> None: ...

# The status, the chunk, the patch, and how it changes the content sum: by how much its two numbers
# change, and what the first one had before of what is replaced.
def prepare_patch(
    tensor: EncodedTensor, threads: int
) -> tuple[int, int, TensorPatch, tuple[int, int, int]]: ...
def find_changes(tensor: EncodedTensor, threads: int) -> tuple[int, int, _Bytes, _Bytes]: ...
def check_table(
    table: _Table, geometry: Geometry, has_base: bool, last_mode: int
) -> tuple[int, int, int, int]: ...
def estimate_delta(
    src: _Bytes, geometry: Geometry, base: Base, plain_nbytes: int, level: int
) -> int: ...
def plan_short(
    src: _Bytes, code: int, n_dims: int, level: int
) -> tuple[Geometry, list[tuple[int, int]]] | None: ...
def may_match(src: _Bytes, unit_nbytes: int, planes_nbytes: int) -> bool: ...
def estimate_matches(src: _Bytes, unit_nbytes: int, level: int) -> int: ...
def estimate_nibbles(
    src: _Bytes, unit_nbytes: int, level: int, n_samples: int
) -> tuple[int, int]: ...
def estimate_planes(
    src: _Bytes, geometry: Geometry, level: int, n_samples: int
) -> tuple[list[tuple[int, int]], bool]: ...
def estimate_side_data(
    src: _Bytes, geometry: Geometry, n_rows: int, most_rows: int, most_columns: int
) -> tuple[int, int]: ...
def make_side_data(src: _Bytes, geometry: Geometry, n_rows: int, side: _Bytes) -> None: ...
def encode_plane(src: _Bytes, mode: int, dst: _Bytes) -> int: ...
def decode_plane(stream: _Bytes, mode: int, dst: _Bytes) -> int: ...
def split(src: _Bytes, geometry: Geometry, planes: _Bytes) -> None: ...
def merge(planes: _Bytes, geometry: Geometry, dst: _Bytes) -> None: ...
def crc32c(src: _Bytes | bytes) -> int: ...
def crc32c_unfolded(src: _Bytes) -> int: ...  # for tests
def leaf_digests(src: _Bytes, digests: _Bytes, threads: int) -> None: ...
def copy_with_leaves(src: _Bytes, dst: _Bytes, leaves: _Bytes) -> None: ...
def content_sum(src: _Bytes, first_byte: int, threads: int) -> tuple[int, int]: ...
def content_key(word: int) -> int: ...
def gather_rows(sources: _Addresses, dst: _Bytes) -> None: ...
def guess_row_nbytes(part: _Bytes, hint: int) -> int: ...
def find_repeats(
    part: _Bytes,
    start: int,
    row_nbytes: int,
    has_past: bool,
    slots: _Slots,
    tokens: _Bytes,
    literals: _Bytes,
) -> tuple[int, int]: ...
def restore_rows(
    memory: _Bytes,
    start: int,
    literals_nbytes: int,
    row_nbytes: int,
    skipped_nbytes: int,
    tokens: _Bytes,
) -> bool: ...
def add_to_moments(mean: _Doubles, squares: _Doubles, rows: list[_Floats], count: int) -> None: ...
def will_need(ranges: list[memoryview]) -> None: ...
def read_now(ranges: list[memoryview]) -> None: ...
def will_sample(range: memoryview) -> None: ...
def count_mappings() -> int: ...  # of this process; 0 if the system does not say
def want_huge_pages(memory: object) -> None: ...
def plan_chunks(
    payload: _Bytes, table: _Table, geometry: Geometry
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
) -> _Numbers: ...
def count_weight_exceptions(elements: _Elements, bits: int, row_step: int, threads: int) -> int: ...
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
) -> int: ...
def check_weights(
    low_bytes: _Planes,
    high_bits: _Planes,
    first_exponents: _Bytes,
    exception_starts: _Numbers,
    exceptions: _Numbers,
    bits: int,
    n_columns: int,
) -> tuple[int, int, int, int]: ...

_Words32 = NDArray[np.uint32]
_Words64 = NDArray[np.uint64]

def pack_table_rows(
    fields: _Words64,
    values: _Words64,
    src: _Planes,
    rows: _Planes,
    counts: _Words32,
    threads: int,
) -> tuple[NDArray[np.uint16], _Bytes]: ...
def gather_table_rows(
    fields: _Words64,
    values: _Words64,
    rows: _Planes,
    marks: _Words32,
    ranks: _Words32,
    starts: _Words32,
    columns: NDArray[np.uint16],
    elements: _Bytes,
    ids: NDArray[np.int64],
    dst: _Planes,
    threads: int,
) -> int: ...
def sum_table_rows(
    fields: _Words64,
    values: _Words64,
    rows: _Planes,
    marks: _Words32,
    ranks: _Words32,
    starts: _Words32,
    columns: NDArray[np.uint16],
    elements: _Bytes,
    ids: NDArray[np.int64],
    bag_starts: NDArray[np.int64],
    dst: _Planes,
    threads: int,
) -> int: ...

_Segments = Sequence[tuple[int, float, int, float]]  # n, bound, bits, center

def max_bounded_nbytes(segments: _Segments, dtype_code: int) -> tuple[int, int, int, int]: ...
def encode_bounded(
    src: _Bytes,
    segments: _Segments,
    dtype_code: int,
    rounding: int,
    seed: int,
    doublings: int,  # -1: the plain form
    dst: _Bytes,
    threads: int,
) -> tuple[int, int, int]: ...
def decode_bounded(
    message: _Bytes, dtype_code: int, dst: _Bytes, threads: int
) -> tuple[int, int, int, int]: ...

class CodeTables:
    """Tables made from serialised models of the codes of bounded messages."""

    def __init__(self, models: _Bytes) -> None: ...
    @property
    def is_valid(self) -> bool: ...
    @property
    def crc(self) -> int: ...
    @property
    def models_nbytes(self) -> int: ...

def choose_code_models(message: _Bytes) -> bytes: ...
def max_coded_nbytes(nbytes: int, tables: CodeTables) -> int: ...
def encode_coded(
    message: _Bytes, tables: CodeTables, with_models: bool, dst: _Bytes, threads: int
) -> int: ...
def read_coded(coded: _Bytes, capacity: int) -> tuple[int, bool, int, int, int]: ...
def decode_coded(coded: _Bytes, tables: CodeTables, dst: _Bytes, threads: int) -> int: ...
def join_ids(
    sources: _Addresses, counts: _Addresses, limits: _Addresses, bases: _Addresses, keys: _Integers
) -> int: ...
def group_keys(
    keys: _Integers, unique: _Integers, inverse: _Integers, order: _Integers, starts: _Integers
) -> int: ...
def sum_rows(
    sources: _Addresses,
    source_counts: _Addresses,
    order: _Integers,
    via: _Integers | None,
    starts: _Integers,
    targets: _Addresses,
    target_counts: _Addresses,
    width: int,
    threads: int,
) -> None: ...
def pack_numbers(numbers: _Integers, bits: int, dst: _Bytes) -> None: ...
def unpack_numbers(packed: _Bytes, bits: int, numbers: _Integers) -> None: ...
def mark_ids(ids: _Integers, bitmap: _Bytes) -> None: ...
def find_ids(bitmap: _Bytes, ids: _Integers) -> int: ...
