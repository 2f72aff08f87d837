"""Reads and writes the pages of the catalogue (docs/snapshots.md, "The catalogue").

A record has what `list` shows of a manifest and what a writer looks for, so that the manifest need
not be parsed: sizes, packs, and a fingerprint of each content. A page holds some dozens of records
as compressed columns. It is read as if an attacker had written it. A page that breaks any rule is
made again from the manifests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zstandard

from packhorse.codecs.content import crc32c
from packhorse.disk.snapshots.manifest import (
    MAX_CHAIN,
    MAX_MANIFEST_NBYTES,
    Manifest,
)
from packhorse.errors import CorruptionError
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Stamp

__all__ = [
    "MAX_PAGE_NBYTES",
    "MAX_RECORDS",
    "MAX_ROWS",
    "Column",
    "Contents",
    "Page",
    "Record",
    "Sizes",
    "decode_page",
    "encode_page",
    "fingerprint",
    "fits",
    "make_record",
]

MAX_RECORDS = 64  # of a page: one take rewrites a page, and one request fetches it
MAX_ROWS = 1 << 17  # a page with this many contents gets no more records
MAX_PAGE_NBYTES = 1 << 25  # of a file, and of the columns of a part; longer pages are not written

_HEAD = struct.Struct("<4s11I")
_MAGIC = b"\x89PHC"
_VERSION = 1
_CRC_END = 12  # the checksum covers all bytes from here on
_LEVEL = 3
_PACK_NBYTES = 16
# The fewest bytes that a tensor, a frame or a pack takes in a manifest. This limit keeps a false
# catalogue from taking more memory than the manifests that it describes.
_MIN_ROW_NBYTES = 16
_MAX_SIZE = 1 << 53  # of a tensor or a pack; sums of such sizes cannot overflow
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_MIX = 0x9E3779B97F4A7C15  # odd, and its set bits are spread over all 64

Column: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]


class Contents(NamedTuple):
    """The contents of frames: first a row for each tensor, then one for each frame that is only a
    base.

    Attributes:
        prints: the fingerprints, of 64 bits.
        n_deltas: how many deltas are in the chain of each frame.
        n_tensors: how many of the rows are tensors.
    """

    prints: Column
    n_deltas: Column
    n_tensors: int


class Sizes(NamedTuple):
    """The base and the sizes of each tensor.

    Attributes:
        bases: the fingerprint of its frame's base; 0 for none.
        nbytes: bytes of the tensor.
        packed_nbytes: bytes of its frame.
    """

    bases: Column
    nbytes: Column
    packed_nbytes: Column


@dataclass(frozen=True, slots=True)
class Record:
    """The catalogue's entry for a manifest.

    Attributes:
        path: the path of the manifest in the store.
        stamp: the stamp of its file.
        crc: the checksum that it begins with.
        time: when the snapshot was taken.
        stored_nbytes: bytes of the pack that was written when it was taken.
        packs: the 16 bytes of each pack's name, in the manifest's order.
        contents: the contents of its frames.
        sizes: the bases and sizes of its tensors.
    """

    path: str
    stamp: Stamp
    crc: int
    time: datetime
    stored_nbytes: int
    packs: bytes
    contents: Contents
    sizes: Sizes

    @property
    def n_rows(self) -> int:
        """How many contents the record has."""
        return len(self.contents.prints)


def fingerprint(content: Content) -> int:
    """64 bits that stand for a content; never 0."""
    kind = content.numel << 8 | DTYPE_BY_NAME[content.dtype].code
    return (int.from_bytes(content.digest[:8], "little") ^ kind * _MIX) % (1 << 64) or 1


def make_record(manifest: Manifest, crc: int, stamp: Stamp) -> Record:
    """The record of a manifest that was read or written."""
    heads = [tensor.frame for tensor in manifest.tensors]
    places = {(frame.pack, frame.offset) for frame in heads}
    frames = manifest.frames()
    rows = heads + [frame for frame in frames if (frame.pack, frame.offset) not in places]
    bases = [0 if head.base is None else fingerprint(head.base.content) for head in heads]
    packs = dict.fromkeys(frame.pack for frame in frames)  # as `render_manifest` lists them
    return Record(
        manifest.file.path, stamp, crc, manifest.time, manifest.stored_nbytes,
        bytes.fromhex("".join(packs)), _contents(rows, len(heads)),
        Sizes(
            np.array(bases, "<u8"),
            np.array([head.logical_nbytes for head in heads], "<u8"),
            np.array([head.nbytes for head in heads], "<u8"),
        ),
    )  # fmt: skip


def _contents(frames: Sequence[FrameRef], n_tensors: int) -> Contents:
    return Contents(
        np.array([fingerprint(frame.content) for frame in frames], "<u8"),
        np.array([frame.n_deltas for frame in frames], "u1"),
        n_tensors,
    )


class Page:
    """Some records in one file. Their columns stay compressed until they are needed.

    Attributes:
        paths: the paths of the manifests.
        is_full: whether the page gets no more records.
    """

    def __init__(self, about: dict[str, Column], paths: list[str], parts: list[bytes]) -> None:
        self._about = about
        self._parts = parts
        self.paths = paths
        self._starts = {key: _starts(about[key]) for key in ("n_tensors", "n_rows", "n_refs")}
        self.is_full = len(paths) >= MAX_RECORDS or self.n_rows >= MAX_ROWS

    @property
    def n_rows(self) -> int:
        """How many contents the page has."""
        return int(self._starts["n_rows"][-1])

    def stamp(self, i: int) -> Stamp:
        """The stamp of a manifest's file."""
        return Stamp(int(self._about["nbytes"][i]), int(self._about["changed"][i]))

    def crc(self, i: int) -> int:
        """The checksum that a manifest begins with."""
        return int(self._about["crc"][i])

    def time(self, i: int) -> datetime:
        """When a snapshot was taken."""
        return _EPOCH + int(self._about["time"][i]) * _MICROSECOND

    def stored_nbytes(self, i: int) -> int:
        """Bytes of the pack that was written when a snapshot was taken."""
        return int(self._about["stored"][i])

    def packs(self, i: int) -> bytes:
        """The names of a manifest's packs, 16 bytes each, in the manifest's order."""
        starts = self._starts["n_refs"]
        refs = self._about["refs"][starts[i] : starts[i + 1]]
        return self._about["packs"].reshape(-1, _PACK_NBYTES)[refs].tobytes()

    def all_packs(self) -> bytes:
        """The names of the packs of all manifests, 16 bytes each."""
        return self._about["packs"].tobytes()

    def contents(self) -> list[Contents]:
        """The contents of each manifest."""
        columns = _decompress(self._parts[1], _contents_layout(self.n_rows), "contents")
        prints, n_deltas = columns["prints"], columns["n_deltas"]
        n_tensors = map(int, self._about["n_tensors"])
        return [
            Contents(prints[part], n_deltas[part], n)
            for part, n in zip(_slices(self._starts["n_rows"]), n_tensors, strict=True)
        ]

    def sizes(self) -> list[Sizes]:
        """The sizes of each manifest's tensors."""
        starts = self._starts["n_tensors"]
        columns = _decompress(self._parts[2], _sizes_layout(int(starts[-1])), "sizes")
        return [Sizes(*(column[part] for column in columns.values())) for part in _slices(starts)]

    def records(self) -> list[Record]:
        """All records of the page."""
        return [
            Record(
                path, self.stamp(i), self.crc(i), self.time(i), self.stored_nbytes(i),
                self.packs(i), contents, sizes,
            )
            for i, (path, contents, sizes) in enumerate(
                zip(self.paths, self.contents(), self.sizes(), strict=True)
            )
        ]  # fmt: skip


def fits(record: Record) -> bool:
    """Whether a record keeps the rules of a page. The record of an unusual but good manifest may
    not; then the manifest is parsed whenever it is needed."""
    n_most = max(record.n_rows, len(record.packs) // _PACK_NBYTES)
    largest = max(int(column.max(initial=0)) for column in record.sizes[1:])
    is_small = max(largest, record.stored_nbytes) < _MAX_SIZE
    return is_small and n_most * _MIN_ROW_NBYTES <= record.stamp.nbytes


def encode_page(records: Sequence[Record]) -> bytes | None:
    """The bytes of a page, given records that fit; None if the page would be too long."""
    packs, refs = _packs_of(records)
    names = "\n".join(record.path for record in records).encode()
    about = [
        _column([record.stamp.nbytes for record in records], "<u8"),
        _column([record.stamp.changed for record in records], "<u8"),
        _column([(record.time - _EPOCH) // _MICROSECOND for record in records], "<i8"),
        _column([record.stored_nbytes for record in records], "<u8"),
        _column([record.crc for record in records], "<u4"),
        _column([len(record.sizes.bases) for record in records], "<u4"),
        _column([record.n_rows for record in records], "<u4"),
        _column([len(part) for part in refs], "<u4"),
        *refs,
        np.frombuffer(packs, "u1"),
        np.frombuffer(names, "u1"),
    ]
    contents = [r.contents.prints for r in records] + [r.contents.n_deltas for r in records]
    sizes = [record.sizes[i] for i in range(3) for record in records]
    raw = [b"".join(column.tobytes() for column in part) for part in (about, contents, sizes)]
    parts = [zstandard.ZstdCompressor(level=_LEVEL).compress(part) for part in raw]
    counts = (
        len(records), len(packs) // _PACK_NBYTES, sum(len(part) for part in refs),
        sum(len(record.sizes.bases) for record in records),
        sum(record.n_rows for record in records), len(names), *(len(part) for part in parts),
    )  # fmt: skip
    data = _HEAD.pack(_MAGIC, _VERSION, 0, *counts) + b"".join(parts)
    data = data[: _CRC_END - 4] + struct.pack("<I", crc32c(data[_CRC_END:])) + data[_CRC_END:]
    return data if max(len(data), *(len(part) for part in raw)) <= MAX_PAGE_NBYTES else None


def _column(values: Sequence[int], dtype: str) -> Column:
    return np.array(values, dtype)


def _packs_of(records: Sequence[Record]) -> tuple[bytes, list[Column]]:
    """The names of all packs, each once, and for each record the indices of its packs in them."""
    places: dict[bytes, int] = {}
    refs = []
    for record in records:
        cuts = range(0, len(record.packs), _PACK_NBYTES)
        names = (record.packs[cut : cut + _PACK_NBYTES] for cut in cuts)
        refs.append(_column([places.setdefault(name, len(places)) for name in names], "<u4"))
    return b"".join(places), refs


def decode_page(data: bytes) -> Page:
    """Parse and check a page.

    Raises:
        CorruptionError: the page breaks a rule. It can be made again.
    """
    if len(data) < _HEAD.size or len(data) > MAX_PAGE_NBYTES:
        raise CorruptionError(f"the page has {len(data)} bytes")
    magic, version, crc, *counts, first, second, third = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or crc != crc32c(data[_CRC_END:]):
        raise CorruptionError("the magic, the version or the checksum does not match")
    if _HEAD.size + first + second + third != len(data):
        raise CorruptionError(
            f"parts of {first}, {second} and {third} bytes do not make a page of {len(data)}"
        )
    cuts = (_HEAD.size, _HEAD.size + first, _HEAD.size + first + second, len(data))
    parts = [data[start:end] for start, end in pairwise(cuts)]
    n_records, n_packs, n_refs, n_tensors, n_rows, names_nbytes = counts
    if n_records > MAX_RECORDS:
        raise CorruptionError(f"{n_records} records; a page has at most {MAX_RECORDS}")
    about = _decompress(
        parts[0], _about_layout(n_records, n_packs, n_refs, names_nbytes), "records"
    )
    totals = {"n_tensors": n_tensors, "n_rows": n_rows, "n_refs": n_refs}
    paths = _check_about(about, n_packs, totals)
    contents = _decompress(parts[1], _contents_layout(n_rows), "contents")
    sizes = _decompress(parts[2], _sizes_layout(n_tensors), "sizes")
    _check_below(contents["n_deltas"], MAX_CHAIN + 1, "n_deltas")
    _check_below(sizes["nbytes"], _MAX_SIZE, "nbytes")
    _check_below(sizes["packed_nbytes"], _MAX_SIZE, "packed_nbytes")
    return Page(about, paths, parts)


def _check_about(about: dict[str, Column], n_packs: int, totals: dict[str, int]) -> list[str]:
    """Check the columns of the first part, and return the paths of the manifests."""
    try:
        paths = about.pop("names").tobytes().decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptionError("the paths are not ASCII") from error
    if len(paths) != len(about["crc"]) or len(set(paths)) != len(paths):
        raise CorruptionError(
            f"{len(paths)} paths for {len(about['crc'])} manifests, or a path occurs twice"
        )
    for key, total in totals.items():
        if int(about[key].sum(dtype="u8")) != total:
            raise CorruptionError(f"{key}: the values do not add up to {total}")
    if (about["n_tensors"] > about["n_rows"]).any():
        raise CorruptionError("a record has more tensors than contents")
    for key in ("n_rows", "n_refs"):
        if (about[key] * np.uint64(_MIN_ROW_NBYTES) > about["nbytes"]).any():
            raise CorruptionError(f"{key}: too many for a manifest of that size")
    _check_below(about["refs"], n_packs, "refs")
    _check_below(about["nbytes"], MAX_MANIFEST_NBYTES + 1, "nbytes")
    _check_below(about["stored"], _MAX_SIZE, "stored")
    if not ((about["time"] >= _FIRST) & (about["time"] <= _LAST)).all():
        raise CorruptionError("time: a value is out of range")
    return paths


def _check_below(column: Column, end: int, what: str) -> None:
    if column.size and int(column.max()) >= end:
        raise CorruptionError(f"{what}: {column.max()} is out of range")


# The columns of a part, in order: names, dtypes and lengths.
_Layout: TypeAlias = Sequence[tuple[str, str, int]]


def _about_layout(n_records: int, n_packs: int, n_refs: int, names_nbytes: int) -> _Layout:
    wide = [(key, "<u8", n_records) for key in ("nbytes", "changed", "time", "stored")]
    wide[2] = ("time", "<i8", n_records)
    narrow = [(key, "<u4", n_records) for key in ("crc", "n_tensors", "n_rows", "n_refs")]
    rest = [("refs", "<u4", n_refs), ("packs", "u1", _PACK_NBYTES * n_packs)]
    return [*wide, *narrow, *rest, ("names", "u1", names_nbytes)]


def _contents_layout(n_rows: int) -> _Layout:
    return [("prints", "<u8", n_rows), ("n_deltas", "u1", n_rows)]


def _sizes_layout(n_tensors: int) -> _Layout:
    return [(key, "<u8", n_tensors) for key in ("bases", "nbytes", "packed_nbytes")]


def _decompress(part: bytes, layout: _Layout, what: str) -> dict[str, Column]:
    """The columns of a part. Its declared size is checked before any memory is taken."""
    nbytes = sum(np.dtype(dtype).itemsize * n for _, dtype, n in layout)
    try:
        declared = zstandard.get_frame_parameters(part).content_size
        if declared != nbytes or nbytes > MAX_PAGE_NBYTES:
            raise CorruptionError(f"{what}: {declared} bytes are declared, not {nbytes}")
        raw = zstandard.ZstdDecompressor().decompress(part, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"{what}: {error}") from error
    if len(raw) != nbytes:
        raise CorruptionError(f"{what}: {len(raw)} bytes were decoded, not {nbytes}")
    columns, at = {}, 0
    for key, dtype, n in layout:
        columns[key] = np.frombuffer(raw, dtype, n, at)
        at += columns[key].nbytes
    return columns


def _starts(counts: Column) -> Column:
    """Where each of some runs begins, given their lengths, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _slices(starts: Column) -> list[slice]:
    return [slice(*pair) for pair in pairwise(starts)]
