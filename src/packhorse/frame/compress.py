"""Making a frame from a tensor's bytes.

The tensor is planned from samples (frame/plan.py, frame/base.py), encoded chunk by chunk
(frame/encode.py), and gets a header (frame/header.py). The input is never written to, and the
output does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from packhorse import _core
from packhorse._core import Base, Views
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray, as_bytes, as_writable_bytes
from packhorse.codecs.content import content_hash
from packhorse.codecs.plan import Plan, choose_plan
from packhorse.codecs.source import Source
from packhorse.errors import ChangedError
from packhorse.frame.base import BaseName, checked_base, plan_delta
from packhorse.frame.encode import Payload, PayloadEncoder, encode_payload
from packhorse.frame.frame import Frame, new_frame
from packhorse.frame.header import FrameHeader, frame_header_nbytes, label, write_header
from packhorse.frame.plan import checked_source, form_of, plan_of
from packhorse.layout import DType, Level

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FrameInParts", "compress_buffer", "compress_planned", "pack_plain", "room_for"]


def compress_buffer(
    src: Buffer,
    dtype: str,
    shape: Sequence[int],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    out: Buffer | None = None,
    name: str | None = None,
    base: Buffer | None = None,
    base_dtype: str | None = None,
    base_hash: bytes | None = None,
    base_is_fixed: bool = False,
    like: Plan | None = None,
) -> Frame:
    """Packs the bytes of one tensor.

    Args:
        src: the tensor's bytes in C order; only read. If they change meanwhile, the frame holds the
            bytes that were read, old or new.
        dtype: safetensors' name, such as "BF16".
        shape: the tensor's shape.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        out: writable memory of at least `max_frame_nbytes` bytes to build the frame in; the frame
            is a view of it.
        name: the tensor's name, for messages.
        base: the bytes of another tensor of as many elements. If that makes the frame shorter, it
            holds differences from the base and cannot be unpacked without it; `Frame.base_hash`
            says so.
        base_dtype: the base's dtype, if it differs: "F32" for a tensor of "BF16" or "F16", which
            may hold the base's values, rounded.
        base_hash: the content hash of `base`, if the caller knows it; otherwise it is computed.
        base_is_fixed: whether nothing can have changed the base since `base_hash` was computed.
            The frame then names the base by that hash without reading all of it once more.
        like: the plan of another frame, whose tensor had the same dtype, size and level and like
            values. It is used again, which saves the time for a plan, if it can be: it must have no
            side data, and a base if one is given. A plan that does not suit the values makes
            a longer frame.

    Returns:
        The frame.

    Raises:
        ChangedError: the base changed while it was used, or is not the one that `base_hash` names,
            so the frame could not be unpacked.
        TypeError: a buffer is not C-contiguous, or `out` is read-only.
        ValueError: sizes, dtypes, level or threads do not fit, or `out` shares memory with `src`
            or the base.

    Example:
        >>> from packhorse.frame import compress_buffer
        >>> frame = compress_buffer(bytes(4096), "F32", (1024,), level="fast")
        >>> frame.dtype, frame.shape
        ('F32', (1024,))
    """
    if base is None and like is None:
        source = checked_source(src, dtype, shape)
        (frame,) = pack_plain(
            _core.views_of_buffers([source.data], [source.dtype.code], [source.shape]),
            None if out is None else [room_for(dtype, shape, out)],
            [name],
            resolve_level(level),
            resolve_threads(threads),
        )
        if frame is not None:
            return frame
    return compress_planned(
        src, dtype, shape, level=level, threads=threads, out=out, name=name, base=base,
        base_dtype=base_dtype, base_hash=base_hash, base_is_fixed=base_is_fixed, like=like,
    )  # fmt: skip


def compress_planned(
    src: Buffer,
    dtype: str,
    shape: Sequence[int],
    *,
    level: Level | str,
    threads: int | None,
    out: Buffer | None,
    name: str | None,
    base: Buffer | None = None,
    base_dtype: str | None = None,
    base_hash: bytes | None = None,
    base_is_fixed: bool = False,
    like: Plan | None = None,
) -> Frame:
    """`compress_buffer`, with a plan even if the tensor may need none."""
    source = checked_source(src, dtype, shape)
    memory = room_for(dtype, shape, out)
    data, row, shape, _ = source
    base_units: Base | None = None
    base_row: DType | None = None
    if base is None:
        plan = _again(like, source, level) or choose_plan(source, resolve_level(level))
    else:
        base_units, base_row = checked_base(base, base_dtype, source)
        plan = _again(like, source, level, has_base=True) or plan_delta(
            source, resolve_level(level), base_units
        )
        if not plan.plain_nbytes:
            base_units = base_row = None
    for kind, read in (("src", data), ("base", None if base_units is None else base_units.data)):
        if read is not None and np.may_share_memory(memory, read):
            raise ValueError(
                f"out and {kind} share memory; it would be overwritten while it is read"
            )
    n_threads = resolve_threads(threads)
    header_nbytes = _header_nbytes(plan, shape, has_base=base_row is not None)
    is_fixed = base_is_fixed and base_hash is not None
    payload = encode_payload(
        source, plan, base_units, memory[header_nbytes:], n_threads, base_is_fixed=is_fixed
    )
    base_name = None
    if base_units is not None and base_row is not None:
        if not payload.has_delta:
            # The samples misled, and nobody should have to keep a base for nothing.
            return compress_buffer(
                data, dtype, shape, level=level, threads=threads, out=out, name=name
            )
        found = payload.base_hash or base_hash or b""
        if found != (base_hash or content_hash(base_units.data, threads=n_threads)):
            raise ChangedError(
                f"{label(name)}its base changed while the tensor was packed against it; pack when "
                "nothing writes to it"
            )
        base_name = BaseName(found, base_row)
    header = _header_of(plan, row, shape, payload, header_nbytes, base_name)
    write_header(header, memory[:header_nbytes])
    return new_frame(memory[: header.frame_nbytes], name, plan)


class FrameInParts:
    """Packs a tensor part by part, so that nobody needs memory for its whole frame. The header and
    the parts together are the frame that `compress_buffer` makes without a base.

    The header holds the sizes and checksums of all chunks, so it is known last; its length is known
    at once.

    Attributes:
        header_nbytes: the length of the header.
        nbytes: the length of the header and of the parts so far.
    """

    def __init__(self, src: Buffer, dtype: str, shape: Sequence[int], *, level: Level) -> None:
        """Choose how the tensor is packed.

        Args:
            src: all bytes of the tensor. Samples are read, and nothing refers to it afterwards.
            dtype: as for `compress_buffer`.
            shape: as there.
            level: as there.

        Raises:
            TypeError, ValueError: as for `compress_buffer`.
        """
        source = checked_source(src, dtype, shape)
        self._dtype, self._shape = source.dtype, source.shape
        self._plan = choose_plan(source, level)
        self._encoder = PayloadEncoder(self._plan)
        self.header_nbytes = self.nbytes = _header_nbytes(self._plan, shape, has_base=False)

    def add(self, data: Buffer, out: ByteArray, threads: int) -> ByteArray:
        """Pack the next bytes of the tensor.

        Args:
            data: the bytes: a multiple of 2 MiB, the longest chunk, unless they are the last ones.
                If they change meanwhile, the frame holds the bytes that were read.
            out: memory for as many bytes, rounded up to 64.
            threads: how many to use.

        Returns:
            The part: the beginning of `out`.
        """
        nbytes = self._encoder.add(as_bytes(data, "data"), out, threads)
        self.nbytes += nbytes
        return out[:nbytes]

    def header(self) -> ByteArray:
        """The header, when all parts are there.

        Raises:
            ValueError: parts are missing.
        """
        payload = self._encoder.finish()
        header = _header_of(self._plan, self._dtype, self._shape, payload, self.header_nbytes)
        memory = np.empty(self.header_nbytes, np.uint8)
        write_header(header, memory)
        return memory


def _header_nbytes(plan: Plan, shape: Sequence[int], *, has_base: bool) -> int:
    geometry = plan.geometry
    return frame_header_nbytes(
        len(shape), geometry.n_chunks, geometry.n_planes, len(plan.side.stream), has_base=has_base
    )


def _header_of(
    plan: Plan,
    dtype: DType,
    shape: tuple[int, ...],
    payload: Payload,
    header_nbytes: int,
    base_name: BaseName | None = None,
) -> FrameHeader:
    side = plan.side
    return FrameHeader(
        dtype, shape, plan.geometry, int(plan.level), payload.content_hash, header_nbytes,
        header_nbytes + payload.nbytes, payload.table, side.n_row_dims,
        side.descriptor, side.stream, base_name,
    )  # fmt: skip


def room_for(dtype: str, shape: Sequence[int], out: Buffer | None) -> ByteArray:
    """The memory that the frame of a tensor is built in.

    Raises:
        TypeError: `out` is not a writable C-contiguous buffer.
        ValueError: `out` is too small.
    """
    capacity = form_of(dtype, tuple(shape)).capacity
    memory = np.empty(capacity, np.uint8) if out is None else as_writable_bytes(out, "out")
    if memory.size < capacity:
        raise ValueError(f"out has {memory.size} bytes; a frame of this tensor may take {capacity}")
    return memory


def pack_plain(
    views: Views,
    outs: Sequence[ByteArray] | None,
    names: Sequence[str | None] | None,
    level: Level,
    threads: int,
) -> list[Frame | None]:
    """Packs tensors that need no plan, in one call of the core.

    Args:
        views: where the tensors lie.
        outs: `room_for` each of them, which share nothing; None for new memory.
        names: what messages call the tensors; None for no names.
        level: how hard to try.
        threads: how many to use.

    Returns:
        A frame for each tensor; None if it needs a plan, or if the core does not know where it is.

    Raises:
        ValueError: the memory of a frame is that of the tensor.
    """
    if level == Level.MAX:
        return [None] * len(views)
    rooms = None if outs is None else _core.views_of_buffers(list(outs), [], [])
    found = _core.pack_views(views, rooms, _room, level, threads)
    frames: list[Frame | None] = []
    for i, opened in enumerate(found):
        if opened is None:
            frames.append(None)
            continue
        memory = opened.memory if outs is None else outs[i]
        if type(memory) is not bytes:
            memory = memory[: opened.frame_nbytes]
        frames.append(Frame(memory, opened, None if names is None else names[i], 0, plan_of))
    return frames


def _room(nbytes: int) -> ByteArray:
    return np.empty(nbytes, np.uint8)


def _again(
    plan: Plan | None, source: Source, level: Level | str, *, has_base: bool = False
) -> Plan | None:
    """The plan of another tensor, if a tensor can be packed by it."""
    suits = (
        plan is not None
        and plan.nbytes == source.data.size > 0
        and plan.level == resolve_level(level)
        and plan.geometry.unit_nbytes == source.geometry.unit_nbytes
        and plan.split in source.dtype.splits
        and bool(plan.plain_nbytes) == has_base
        and not plan.side.saving
    )
    return plan if suits else None
