"""The header of a safetensors file: checked when read, written as the safetensors library does.

A file is a u64 length, that many bytes of JSON, and the tensors' bytes. Everything is checked once,
when a file is opened and before any tensor is read: the length against the limit and against the
file, the JSON, every tensor's dtype, shape and size, and that the tensors cover the data without
overlaps or holes. Code that has a `FileHeader` need not check any of this again.

Every message names the file, the byte offset of the fault, and the remedy if there is one.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted
from typing import BinaryIO, NamedTuple

from packhorse import _core
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.layout import (
    DTYPE_BY_NAME,
    LENGTH_NBYTES,
    MAX_BITS,
    MAX_DIMS,
    MAX_FILE_HEADER_NBYTES,
    METADATA_KEY,
)
from packhorse.storage.foreign import PEEK_NBYTES, kind_of_file
from packhorse.storage.opening import open_regular
from packhorse.storage.strict_json import check_text, json_kind, parse_json, shown

__all__ = [
    "FileHeader",
    "TensorEntry",
    "build_header",
    "declared_nbytes",
    "lay_out_forms",
    "parse_file_header",
    "parse_header",
    "quoted",
    "read_file_header",
    "read_header",
    "tensor_nbytes",
]

_ALIGNMENT = 8  # the library pads the JSON with spaces to a multiple of this
_FIELDS = ("dtype", "shape", "data_offsets")

# The library's savers write the tensors of the last dtype first; within a dtype, by name.
_SAVE_ORDER = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8"),
    *("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
_RANKS = {dtype: -rank for rank, dtype in enumerate(_SAVE_ORDER)}
_BITS = {name: dtype.bits for name, dtype in DTYPE_BY_NAME.items()}


class TensorEntry(NamedTuple):
    """One tensor as a safetensors header describes it.

    Attributes:
        name: the tensor's name.
        dtype: safetensors' name of the dtype, such as "BF16".
        shape: the dimensions, outermost first.
        start: offset of the first byte in the data section.
        stop: offset after the last byte in the data section.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A checked header.

    Attributes:
        text: the JSON as it is in the file, with its padding, without the length before it.
        entries: the tensors in the order of their offsets.
        metadata: the pairs of `__metadata__`; None if the file has none.
    """

    text: bytes
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None

    @property
    def data_offset(self) -> int:
        """Offset of the data section in the file."""
        return LENGTH_NBYTES + len(self.text)

    @property
    def data_nbytes(self) -> int:
        """The total size of all tensors in bytes."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def file_nbytes(self) -> int:
        """The size of the whole file in bytes."""
        return self.data_offset + self.data_nbytes

    def prefix(self) -> bytes:
        """The bytes of the file before the data section."""
        return len(self.text).to_bytes(LENGTH_NBYTES, "little") + self.text

    def check_limit(self, max_nbytes: int | None, label: str) -> None:
        """Refuse a file whose tensors take more bytes in total than the caller allows.

        Raises:
            CorruptionError: they take more.
        """
        nbytes = self.data_nbytes
        if max_nbytes is not None and nbytes > max_nbytes:
            raise CorruptionError(
                f"{label}: its tensors take {nbytes} bytes in total, more than max_nbytes = "
                f"{max_nbytes}; read only some of them, or allow more"
            )


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor in bytes.

    Args:
        dtype: safetensors' name of a known dtype.
        shape: the dimensions.

    Returns:
        The size in bytes, rounded down if the last element does not end at a byte.
    """
    return math.prod(shape) * DTYPE_BY_NAME[dtype].bits // 8


def read_header(path: str | os.PathLike[str]) -> FileHeader:
    """Read and check the header of a safetensors file.

    Args:
        path: the file.

    Returns:
        The header. The rest of the file is not read, but its length is checked.

    Raises:
        CorruptionError: the file breaks a rule of the safetensors format.
        TruncationError: the file is shorter than its header says.
        CompatibilityError: this release does not know a dtype or the number of dimensions.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        return read_file_header(file, os.fspath(path))


def read_file_header(file: BinaryIO, label: str) -> FileHeader:
    """`read_header` for an open file, from its beginning.

    Args:
        file: a binary file with a descriptor, positioned at its beginning.
        label: the name of the file in messages.

    Returns:
        The checked header.
    """
    file_nbytes = os.fstat(file.fileno()).st_size
    start = file.read(PEEK_NBYTES)
    header_nbytes = declared_nbytes(start, file_nbytes, label)
    file.seek(LENGTH_NBYTES)
    text = file.read(header_nbytes)
    return parse_header(text, data_nbytes=file_nbytes - LENGTH_NBYTES - len(text), label=label)


def parse_file_header(data: memoryview, label: str) -> FileHeader:
    """`read_header` for a file that is in memory.

    Args:
        data: the bytes of the file.
        label: the name of the file in messages.

    Returns:
        The checked header.
    """
    header_nbytes = declared_nbytes(bytes(data[:PEEK_NBYTES]), data.nbytes, label)
    stop = LENGTH_NBYTES + header_nbytes
    return parse_header(
        bytes(data[LENGTH_NBYTES:stop]), data_nbytes=data.nbytes - stop, label=label
    )


def declared_nbytes(start: bytes, file_nbytes: int, label: str) -> int:
    """The header's length, which the first bytes of a file declare, checked against the file.

    Args:
        start: the first `PEEK_NBYTES` bytes, or more; all if there are fewer.
        file_nbytes: the size of the file.
        label: the name of the file in messages.

    Raises:
        CorruptionError: it is not a safetensors file, or is cut short.
    """
    header_nbytes = int.from_bytes(start[:LENGTH_NBYTES], "little")
    is_allowed = len(start) >= LENGTH_NBYTES and header_nbytes <= MAX_FILE_HEADER_NBYTES
    if is_allowed and LENGTH_NBYTES + header_nbytes <= file_nbytes:
        return header_nbytes
    if is_allowed and start[LENGTH_NBYTES : LENGTH_NBYTES + 1] == b"{":
        raise TruncationError(
            f"{label}: cut short: bytes 0 to 7 declare a header of {header_nbytes} bytes, but the "
            f"file has {file_nbytes} bytes; get the file again"
        )
    if len(start) < LENGTH_NBYTES:
        raise TruncationError(
            f"{label}: not a safetensors file, or cut short: it has {len(start)} bytes, but the "
            f"length of the header alone takes {LENGTH_NBYTES}"
        )
    if kind := kind_of_file(start):
        raise CorruptionError(f"{label}: not a safetensors file, but {kind}")
    if header_nbytes > MAX_FILE_HEADER_NBYTES:
        raise CorruptionError(
            f"{label}: not a safetensors file: bytes 0 to 7 declare a header of {header_nbytes} "
            f"bytes, but at most {MAX_FILE_HEADER_NBYTES} are allowed"
        )
    raise TruncationError(
        f"{label}: not a safetensors file, or cut short: bytes 0 to 7 declare a header of "
        f"{header_nbytes} bytes, but {file_nbytes - LENGTH_NBYTES} follow; get the file again"
    )


def parse_header(text: bytes, *, data_nbytes: int | None = None, label: str) -> FileHeader:
    """Check the JSON of a header.

    Args:
        text: the JSON with its padding.
        data_nbytes: how many bytes follow the header; the tensors must cover them exactly. None to
            skip the check where the data ends.
        label: the name of the file in messages.

    Returns:
        The header.

    Raises:
        CorruptionError: a rule of the safetensors format is broken.
        TruncationError: `data_nbytes` is less than the tensors need.
        CompatibilityError: this release does not know a dtype or the number of dimensions.
    """
    if text[:1] != b"{":
        raise CorruptionError(
            f"{label}: not a safetensors file: the header must begin with {'{'!r} at byte "
            f"{LENGTH_NBYTES}, but has {text[:1]!r} there"
        )
    header = _usual_header(text) or _any_header(text, label)
    if data_nbytes is not None:
        _check_end(header, data_nbytes, label)
    return header


def _usual_header(text: bytes) -> FileHeader | None:
    """Reads a header that is written as savers write it, and breaks no rule; None for any other."""
    found = _core.file_entries(text, TensorEntry, _BITS)
    if found is None:
        return None
    entries, pairs = found
    try:
        metadata = _metadata(parse_json(pairs, label=""), "") if pairs else None
    except CorruptionError:
        return None
    return FileHeader(text, tuple(entries), metadata)


def _any_header(text: bytes, label: str) -> FileHeader:
    document = parse_json(text, label=f"{label}: header", offset=LENGTH_NBYTES)
    metadata = _metadata(document.pop(METADATA_KEY, None), label)
    entries = [
        _entry(name, info, f"{label}: tensor {shown(name)}") for name, info in document.items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    header = FileHeader(bytes(text), tuple(entries), metadata)
    _check_cover(header, label)
    return header


def _metadata(value: object, label: str) -> dict[str, str] | None:
    if value is None:
        return None
    where = f"{label}: {METADATA_KEY}"
    if not isinstance(value, dict):
        raise CorruptionError(f"{where} must be an object of strings, but is {json_kind(value)}")
    for key, item in value.items():
        if not isinstance(item, str):
            found = f"{shown(key)} is {json_kind(item)}"
            raise CorruptionError(f"{where} may hold only strings, but {found}")
    return value


def _entry(name: str, info: object, where: str) -> TensorEntry:
    if not isinstance(info, dict):
        raise CorruptionError(f"{where} must be described by an object, not {json_kind(info)}")
    for field in _FIELDS:
        if field not in info:
            raise CorruptionError(f"{where} has no {field!r}")
    shape = _sizes(info["shape"], f"{where}: shape")
    offsets = _sizes(info["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptionError(
            f"{where}: data_offsets must be [start, stop] with start <= stop, but are "
            f"{shown(list(offsets))}"
        )
    entry = TensorEntry(name, _dtype(info["dtype"], where), shape, offsets[0], offsets[1])
    _check_size(entry, where)
    return entry


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise CorruptionError(f"{where} must be a list of integers, but is {json_kind(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < MAX_BITS:
            raise CorruptionError(f"{where}: {shown(item)} is not an integer from 0 to 2^63 - 1")
    return tuple(value)


def _dtype(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CorruptionError(f"{where}: dtype must be a string, but is {json_kind(value)}")
    if value not in DTYPE_BY_NAME:
        raise CompatibilityError(
            f"{where}: unknown dtype {shown(value)}; this release knows "
            f"{', '.join(DTYPE_BY_NAME)}; a newer release may know more"
        )
    return value


def _check_size(entry: TensorEntry, where: str) -> None:
    if len(entry.shape) > MAX_DIMS:
        found = f"{len(entry.shape)} dimensions"
        raise CompatibilityError(f"{where} has {found}, but at most {MAX_DIMS} are supported")
    bits = DTYPE_BY_NAME[entry.dtype].bits
    # Zeros count as one: as in a frame, a dimension of zero must not hide that the others overflow.
    if math.prod(max(size, 1) for size in entry.shape) * bits >= MAX_BITS:
        raise CorruptionError(f"{where}: shape {list(entry.shape)} is larger than any memory")
    numel = math.prod(entry.shape)
    if numel * bits != entry.nbytes * 8:
        raise CorruptionError(
            f"{where}: {entry.dtype} of shape {list(entry.shape)} takes {numel * bits} bits, but "
            f"data_offsets [{entry.start}, {entry.stop}] span {entry.nbytes * 8}"
        )


def _check_cover(header: FileHeader, label: str) -> None:
    end, before = 0, "the start of the data"
    for entry in header.entries:
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a hole after"
            raise CorruptionError(
                f"{label}: tensor {shown(entry.name)} {fault} {before}: it starts at byte "
                f"{header.data_offset + entry.start}, but must start at byte "
                f"{header.data_offset + end}"
            )
        end, before = entry.stop, f"tensor {shown(entry.name)}"


def _check_end(header: FileHeader, data_nbytes: int, label: str) -> None:
    missing = header.data_nbytes - data_nbytes
    if missing > 0:
        raise TruncationError(
            f"{label}: cut short: the header says {header.file_nbytes} bytes, but the file has "
            f"{header.file_nbytes - missing}; get the file again"
        )
    if missing < 0:
        raise CorruptionError(
            f"{label}: the tensors end at byte {header.file_nbytes}, but {-missing} more bytes "
            "follow; the file must end there"
        )


def build_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> FileHeader:
    """Lay out tensors as the safetensors library does when it saves: order, JSON and padding.

    Args:
        tensors: dtype name and shape by tensor name.
        metadata: pairs for `__metadata__`, written in this order (the library's order is random).

    Returns:
        The header; the tensors' data must follow in the order of its entries.

    Raises:
        TypeError: a name is not a string, or `metadata` is not a mapping of strings to strings.
        ValueError: a safetensors file cannot hold a name or a metadata pair.
        CompatibilityError: safetensors does not have a dtype.
    """
    forms: dict[tuple[str, tuple[int, ...]], int] = {}  # tensors have few
    numbers = [
        forms.setdefault((dtype, tuple(shape)), len(forms)) for dtype, shape in tensors.values()
    ]
    return lay_out_forms(list(tensors), list(forms), numbers, metadata)[0]


def lay_out_forms(
    names: list[str],
    forms: Sequence[tuple[str, tuple[int, ...]]],
    numbers: Sequence[int],
    metadata: Mapping[str, str] | None,
) -> tuple[FileHeader, list[int]]:
    """`build_header` for tensors that share forms.

    Args:
        names: the tensors' names, each once.
        forms: dtype names and shapes.
        numbers: which form each tensor has.
        metadata: as for `build_header`.

    Returns:
        The header, and the number of the tensor of each entry.

    Raises:
        TypeError, ValueError, CompatibilityError: as for `build_header`.
    """
    checked = None if metadata is None else _checked_pairs(metadata)
    pairs = b"" if checked is None else f"{quoted(METADATA_KEY)}:{_written(checked)}".encode()
    _check_savable(names, forms, numbers)
    described = [
        (
            _RANKS[dtype],
            dtype,
            shape,
            f'"dtype":{quoted(dtype)},"shape":{_written(shape)}',
            tensor_nbytes(dtype, shape),
        )
        for dtype, shape in forms
    ]
    rows, order, entries = _core.rows_of_tensors(names, numbers, described, TensorEntry)
    text = b"".join([b"{", pairs, b"," if pairs and rows else b"", rows, b"}"])
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_FILE_HEADER_NBYTES:
        raise ValueError(
            f"the header would take {len(text)} bytes, but at most {MAX_FILE_HEADER_NBYTES} are "
            "allowed: use fewer tensors or shorter metadata"
        )
    return FileHeader(text, tuple(entries), checked), order


def _check_savable(
    names: Sequence[str],
    forms: Sequence[tuple[str, tuple[int, ...]]],
    numbers: Sequence[int],
) -> None:
    """Refuse tensors that no safetensors file can hold."""
    firsts: dict[int, str] = {}  # the name of the first tensor of each form
    for name, k in zip(names, numbers, strict=True):
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a string, not {name!r}")
        if name == METADATA_KEY:
            raise ValueError(
                f"no tensor can have the name {METADATA_KEY!r}; safetensors reserves it"
            )
        if not name.isascii():
            check_text(name)
        if k not in firsts:
            firsts[k] = name
    for k, name in firsts.items():
        dtype, shape = forms[k]
        if dtype not in _RANKS:
            raise CompatibilityError(f"tensor {name!r}: safetensors has no dtype {dtype!r}")
        where = f"header to be written: tensor {shown(name)}"
        sizes = _sizes(list(shape), f"{where}: shape")
        _check_size(TensorEntry(name, dtype, sizes, 0, tensor_nbytes(dtype, sizes)), where)


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _checked_pairs(metadata: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict of strings, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"metadata must map strings to strings, but has {key!r}: {value!r}; store other "
                "values as text, for example with json.dumps"
            )
        check_text(key)
        check_text(value)
    return dict(metadata)
