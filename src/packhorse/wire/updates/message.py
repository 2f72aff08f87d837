"""An update as bytes: its header, written and read with distrust (docs/updates.md, "Format of an
update").

An update is a header of 128 bytes, a directory of its frames, the compressed contents, and the
frames. One checksum covers everything before the frames, and each frame has checksums of its own,
so a damaged update is found before anything is decoded to the weights. `read_message` checks every
field before it is used; it reads the frames' headers, and none of their payloads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
import zstandard

from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.content import crc32c
from packhorse.errors import CompatibilityError, CorruptionError, TruncationError, blaming
from packhorse.frame import Frame
from packhorse.layout import FRAME_ALIGNMENT
from packhorse.wire.updates.contents import Contents, parse_contents

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HEADER_NBYTES", "MAX_SHARDS", "Header", "Message", "read_header", "read_message",
           "write_message"]  # fmt: skip

_MAGIC = b"\x89PHU"  # not ASCII, so that readers notice a transfer that strips bit 7
_VERSION = 2  # 1 had frames with another content hash, and was never released
_FLAG_ANCHOR = 1
# magic, version, flags, shard, shards, reserved, frames, bytes, stream, number, base's number,
# base's hash, hash of the state, hash of the contents, bytes of the contents, of their text, CRC
_FIELDS = struct.Struct("<4sBBHHHIQ16sQQ16s16s16sIII12s")
HEADER_NBYTES = _FIELDS.size
_CRC_OFFSET = 112
_CRC = struct.Struct("<I")
_ENTRY_NBYTES = 8  # unit, and the frame's length in multiples of FRAME_ALIGNMENT
MAX_SHARDS = (1 << 16) - 1
_ZSTD_LEVEL = 3
# The text of the contents may be this much longer than its compressed form: names of layers repeat,
# and what a receiver parses stays in proportion to what was sent.
_TEXT_GROWTH = 256
_TEXT_FREE_NBYTES = 1 << 16


class Header(NamedTuple):
    """The fields of an update.

    Attributes:
        is_anchor: whether it has all units in full and needs no base.
        shard: which of the senders made it.
        n_shards: how many senders there are.
        stream: 16 random bytes that a sender draws once.
        number: the version that the update leads to.
        base_number: the version that it starts from; 0 for an anchor.
        base_hash: hash of the state that it starts from; zeros for an anchor.
        state_hash: hash of the state that it leads to.
    """

    is_anchor: bool
    shard: int
    n_shards: int
    stream: bytes
    number: int
    base_number: int
    base_hash: bytes
    state_hash: bytes


class Message(NamedTuple):
    """An update that was read.

    Attributes:
        header: its fields.
        contents: its tensors.
        frames: the frames of changed units, by the unit's index.
        nbytes: length of the update in bytes.
    """

    header: Header
    contents: Contents
    frames: dict[int, Frame]
    nbytes: int


class _Sizes(NamedTuple):
    """The lengths in the header of an update, checked against each other."""

    n_frames: int
    nbytes: int
    contents_nbytes: int
    text_nbytes: int
    contents_hash: bytes
    crc: int

    @property
    def head_nbytes(self) -> int:
        """Bytes before the frames, without padding."""
        return HEADER_NBYTES + _ENTRY_NBYTES * self.n_frames + self.contents_nbytes

    @property
    def frames_at(self) -> int:
        """Where the frames begin."""
        return -(-self.head_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def write_message(header: Header, contents: Contents, frames: Mapping[int, bytes]) -> bytearray:
    """Writes an update.

    Args:
        header: its fields.
        contents: its tensors.
        frames: the frames of changed units, by the unit's index.

    Returns:
        The update's bytes.
    """
    packed = _zipped(contents.text)
    order = sorted(frames)
    entries = np.array(
        [(unit, len(frames[unit]) // FRAME_ALIGNMENT) for unit in order], "<u4"
    ).tobytes()
    nbytes = sum(len(frame) for frame in frames.values())
    sizes = _Sizes(len(order), 0, len(packed), len(contents.text), contents.digest, 0)
    sizes = sizes._replace(nbytes=sizes.frames_at + nbytes)
    head = bytearray(_pack(header, sizes) + entries + packed).ljust(sizes.frames_at, b"\0")
    _CRC.pack_into(head, _CRC_OFFSET, crc32c(head))
    return bytearray().join((head, *(frames[unit] for unit in order)))


@lru_cache(maxsize=4)  # a sender's contents stay the same
def _zipped(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)


def _pack(header: Header, sizes: _Sizes) -> bytes:
    return _FIELDS.pack(
        _MAGIC, _VERSION, _FLAG_ANCHOR * header.is_anchor, header.shard, header.n_shards, 0,
        sizes.n_frames, sizes.nbytes, header.stream, header.number, header.base_number,
        header.base_hash, header.state_hash, sizes.contents_hash, sizes.contents_nbytes,
        sizes.text_nbytes, sizes.crc, bytes(12),
    )  # fmt: skip


def read_header(payload: Buffer) -> Header:
    """Reads the header of an update, and checks everything before its frames.

    Raises:
        CorruptionError, CompatibilityError: as `read_message`.
    """
    return _read_head(as_bytes(payload, "payload"))[0]


def read_message(payload: Buffer, known: Contents | None = None) -> Message:
    """Reads an update: everything but the payloads of its frames is checked.

    Args:
        payload: exactly the update's bytes; kept, not copied.
        known: contents that were read before, to be used again if they are the same.

    Raises:
        TruncationError: there are fewer bytes than the update says.
        CorruptionError: a rule of the format is broken.
        CompatibilityError: it is of a version or kind that this release does not know.
        TypeError: not a C-contiguous buffer.
    """
    data = as_bytes(payload, "payload")
    header, sizes, head = _read_head(data)
    contents = known
    if known is None or known.digest != sizes.contents_hash:
        contents = parse_contents(_unzipped(head, sizes))
    assert contents is not None
    frames = {}
    for unit, at, nbytes in _entries(head, sizes, len(contents.units)):
        frames[unit] = _frame(data[at : at + nbytes], contents, unit, at)
    _check_frames(header, contents, frames)
    return Message(header, contents, frames, data.size)


def _read_head(data: ByteArray) -> tuple[Header, _Sizes, bytes]:
    """The header, the lengths, and all bytes before the frames, with their checksum checked."""
    _need(data, HEADER_NBYTES, "the header of an update")
    fields = _FIELDS.unpack_from(data)
    magic, version, flags, shard, n_shards, reserved, n_frames, nbytes, stream = fields[:9]
    number, base_number, base_hash, state, digest, contents_nbytes, text_nbytes = fields[9:16]
    if magic != _MAGIC:
        raise _fault(0, f"magic is {magic.hex()}, an update begins with {_MAGIC.hex()}")
    if version != _VERSION:
        words = f"the update's version is {version}, this release reads {_VERSION}"
        if version == 0:
            raise _fault(4, words)
        raise CompatibilityError(f"byte 4: {words}; upgrade packhorse")
    if flags & ~_FLAG_ANCHOR:
        words = f"byte 5: flags are {flags:#04x}, this release knows {_FLAG_ANCHOR:#04x}"
        raise CompatibilityError(f"{words}; upgrade packhorse")
    sizes = _Sizes(n_frames, nbytes, contents_nbytes, text_nbytes, digest, fields[16])
    if nbytes < sizes.frames_at:
        raise _fault(16, f"the update has {nbytes} bytes, but its frames begin at "
                         f"{sizes.frames_at}")  # fmt: skip
    _need(data, sizes.frames_at, "what precedes the frames")
    head = data[: sizes.frames_at].tobytes()  # a copy: checked bytes must not change later
    if crc32c(head[:_CRC_OFFSET] + bytes(4) + head[_CRC_OFFSET + 4 :]) != sizes.crc:
        raise _fault(_CRC_OFFSET, "the checksum does not match: the update is damaged")
    _need(data, nbytes, "the update")
    if data.size > nbytes:
        raise _fault(nbytes, f"{data.size - nbytes} bytes follow the end of the update")
    if reserved or fields[17].strip(b"\0") or head[sizes.head_nbytes :].strip(b"\0"):
        raise _fault(10, "reserved bytes or padding are not zero")
    header = Header(
        bool(flags), shard, n_shards, stream, number, base_number, base_hash, state
    )  # fmt: skip
    _check_numbers(header)
    return header, sizes, head


def _check_numbers(header: Header) -> None:
    if header.shard >= header.n_shards:
        raise _fault(6, f"shard {header.shard} of {header.n_shards}")
    if header.number == 0:
        raise _fault(40, "the version is 0; updates lead to version 1 and later ones")
    if header.is_anchor and (header.base_number or header.base_hash.strip(b"\0")):
        raise _fault(48, "an anchor names a base")
    if not header.is_anchor and header.base_number >= header.number:
        raise _fault(48, f"base version {header.base_number} is not below {header.number}")


def _unzipped(head: bytes, sizes: _Sizes) -> bytes:
    """The JSON of the contents."""
    at = HEADER_NBYTES + _ENTRY_NBYTES * sizes.n_frames
    packed = head[at : at + sizes.contents_nbytes]
    if sizes.text_nbytes > _TEXT_FREE_NBYTES + _TEXT_GROWTH * len(packed):
        words = f"contents of {len(packed)} bytes claim to hold {sizes.text_nbytes}"
        raise _fault(108, words)
    try:
        found = zstandard.get_frame_parameters(packed).content_size
        text: bytes = b""
        if found == sizes.text_nbytes:
            text = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _fault(at, f"the contents cannot be decompressed: {error}") from error
    if len(text) != sizes.text_nbytes or xxhash.xxh3_128_digest(text) != sizes.contents_hash:
        raise _fault(88, "the contents are not those that the header names")
    return text


def _entries(head: bytes, sizes: _Sizes, n_units: int) -> Iterable[tuple[int, int, int]]:
    """For each frame: its unit, where it begins, and its length."""
    table = np.frombuffer(head, "<u4", 2 * sizes.n_frames, HEADER_NBYTES).reshape(-1, 2)
    rows: list[list[int]] = table.tolist()
    at, last = sizes.frames_at, -1
    for unit, n_lines in rows:
        if not last < unit < n_units:
            raise _fault(HEADER_NBYTES, f"unit {unit} after {last}, of {n_units} units")
        last = unit
        nbytes = n_lines * FRAME_ALIGNMENT
        if at + nbytes > sizes.nbytes:
            raise _fault(HEADER_NBYTES, f"the frame of unit {unit} ends after the update")
        yield unit, at, nbytes
        at += nbytes
    if at != sizes.nbytes:
        raise _fault(16, f"the frames end at {at}, the update at {sizes.nbytes}")


def _frame(data: ByteArray, contents: Contents, unit: int, at: int) -> Frame:
    row = contents.units[unit]
    frame = Frame.from_buffer(data, name=row.label, max_nbytes=row.nbytes, offset=at)
    if (frame.dtype, frame.shape) != (row.dtype, row.shape):
        raise _fault(
            at, f"the frame of {row.label} is {frame.dtype} {frame.shape}, its unit {row.dtype} "
            f"{row.shape}",
        )  # fmt: skip
    if not frame.has_sum:
        raise _fault(at, f"the frame of {row.label} has a content hash that is no sum")
    if frame.base_dtype not in (None, frame.dtype):
        raise _fault(at, f"the base of {row.label} has another dtype, {frame.base_dtype}")
    return frame


def _check_frames(header: Header, contents: Contents, frames: Mapping[int, Frame]) -> None:
    """Checks what an anchor promises: that every unit is there, without a base."""
    if not header.is_anchor:
        return
    for i, unit in enumerate(contents.units):
        if (i in frames) != bool(unit.nbytes):
            raise _fault(12, f"the anchor has a wrong number of frames for {unit.label}")
        with blaming(unit.label):
            if i in frames and frames[i].base_hash is not None:
                raise CorruptionError("a frame of an anchor has a base")


def _need(data: ByteArray, nbytes: int, what: str) -> None:
    if data.size < nbytes:
        raise TruncationError(
            f"byte {data.size}: {what} needs {nbytes} bytes, {data.size} are there; the update is "
            "cut off"
        )


def _fault(at: int, words: str) -> CorruptionError:
    return CorruptionError(f"byte {at}: {words}")
