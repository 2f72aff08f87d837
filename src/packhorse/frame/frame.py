"""A frame: the self-described encoding of one tensor (docs/format.md, sections 2 to 7).

`Frame.from_buffer` reads and checks a header without touching the payload. `Frame.decompress_into`
decodes the whole payload, or the chunks that a byte range touches, into the caller's memory.
`Frame.patch_into` turns a base into the tensor in place. Everything is sans-IO: buffers in, buffers
out. The frame is never written to, the output does not depend on the number of threads, and no
unchecked byte decides how much memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse._core import Base, EncodedTensor, Side
from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray, as_bytes, as_writable_bytes
from packhorse.codecs.content import (
    ContentHasher,
    base_check,
    changed_sum,
    hash_leaves,
    hash_root,
)
from packhorse.codecs.plan import Plan
from packhorse.codecs.side import decode_side
from packhorse.errors import BaseMismatchError, CorruptionError
from packhorse.frame.base import matching_base, unnamed_base
from packhorse.frame.facts import FrameFacts
from packhorse.frame.header import (
    FrameHeader,
    label,
    open_frame,
)
from packhorse.frame.patch import Patch, check_target
from packhorse.frame.zstd import ZstdJob

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Frame", "new_frame"]

_Units: TypeAlias = NDArray[np.unsignedinteger]

# How much is decoded at once if the whole tensor need not be in memory. It has many chunks for
# every thread, and only whole chunks and whole leaves of the hash.
_WINDOW_NBYTES = 1 << 25


class Frame(FrameFacts):
    """One packed tensor: a checked header and a view of the bytes.

    Make one with `compress_buffer` (or `compress` of `packhorse.numpy` and `packhorse.torch`), or
    read one with `from_buffer`. A frame keeps the buffer that it views alive. Frames are immutable
    and safe to use from several threads.

    Example:
        >>> from packhorse.frame import Frame, compress_buffer
        >>> data = compress_buffer(bytes(range(256)) * 64, "U8", (128, 128)).to_bytes()
        >>> frame = Frame.from_buffer(data)
        >>> frame.verify()
        >>> part = bytearray(256)
        >>> frame.decompress_into(part, start=256, stop=512)
        >>> part == bytes(range(256))
        True
    """

    __slots__ = ()

    @classmethod
    def from_buffer(
        cls,
        buffer: Buffer,
        *,
        name: str | None = None,
        max_nbytes: int | None = None,
        offset: int = 0,
    ) -> Frame:
        """Reads and checks the header of a frame; the payload is not touched.

        Args:
            buffer: exactly the frame's bytes; kept, not copied.
            name: the tensor's name, for messages.
            max_nbytes: the most decoded bytes that are allowed; None for no limit.
            offset: where the buffer lies in its file, for messages.

        Returns:
            The frame, around the buffer.

        Raises:
            TruncationError: the buffer is shorter than the frame says.
            CorruptionError: a rule of docs/format.md is broken.
            CompatibilityError: this release does not know a version, dtype, flag or mode.
            TypeError: not a C-contiguous buffer.
        """
        data = as_bytes(buffer, "buffer")
        return cls(data, open_frame(data, name, offset, max_nbytes), name, offset)

    def __reduce__(self) -> tuple[Callable[..., Frame], tuple[object, ...]]:
        return new_frame, (self.data, self._name, self.plan)

    def decompress_into(
        self,
        dst: Buffer,
        *,
        start: int = 0,
        stop: int | None = None,
        threads: int | None = None,
        check: bool = True,
        base: Buffer | None = None,
        base_hash: bytes | None = None,
    ) -> None:
        """Decodes bytes `start` to `stop` of the tensor (C order) into the caller's memory. Only
        the chunks that the range touches are read.

        Args:
            dst: writable buffer of exactly `stop - start` bytes. After an error, its content is
                undefined.
            start: first byte.
            stop: one past the last byte; None for the end.
            threads: the number of threads; None for one per core, at most 8.
            check: compare each chunk's CRC32C first. Without it, a damaged payload may decode to
                wrong data, but does no other harm.
            base: the bytes of the base, for a frame that has one (`base_hash`).
            base_hash: the content hash of `base`, if the caller knows it. It is compared with the
                hash in the frame, and not computed from all bytes again. If it is the hash of other
                bytes, the output is wrong, or the frame seems to be damaged.

        Raises:
            BaseMismatchError: the frame has a base, and none was given, or another one.
            CorruptionError: a checksum does not match, or a stream breaks a rule. The message names
                tensor, chunk and byte offset.
            TypeError: `dst` is not a writable C-contiguous buffer.
            ValueError: the range is not inside the tensor, or `dst` does not fit it or shares
                memory with the frame.
        """
        nbytes = self._opened.nbytes
        stop = nbytes if stop is None else stop
        target = as_writable_bytes(dst, "dst")
        if not 0 <= start <= stop <= nbytes:
            raise ValueError(f"bytes {start}:{stop} are not inside 0:{nbytes}")
        if target.size != stop - start:
            raise ValueError(
                f"dst has {target.size} bytes; bytes {start}:{stop} need {stop - start}"
            )
        n_threads = resolve_threads(threads)
        if self._opened.stands_alone and target.size == nbytes:
            status, _, chunk = _core.unpack_frames([self._opened], [target], check, n_threads)
            if status:
                raise self.chunk_error(chunk, status)
            return
        if np.may_share_memory(target, self.data):
            raise ValueError("dst and the frame share memory; decode elsewhere")
        units = self._matching_base(base, n_threads, base_hash)
        if units is not None and np.may_share_memory(target, units.data):
            raise ValueError("dst and the base share memory; decode elsewhere, or a copy of it")
        self._decode(self.encoded(units), target, start, n_threads, check=check)

    def patch_into(
        self, target: Buffer, *, base_hash: bytes | None = None, threads: int | None = None
    ) -> None:
        """Turns the base into the tensor, in place, without memory for a second copy.

        These are checked before the first byte is written: the target's content hash, the CRC32C
        of every chunk, and every stream; for a frame without a base also the content hash of the
        tensor. If a check fails, the target is as it was. (It may be changed in part if another
        thread or process writes to the frame or to the target meanwhile.) Of chunks with few
        differences, only the units that change are written. Other chunks are decoded twice.

        Args:
            target: writable buffer that holds the base, and then the tensor. If the frame has no
                base, anything of the tensor's length.
            base_hash: the content hash of `target`, if the caller knows it; it is compared with the
                one in the frame, and not computed again. If it is the hash of other bytes, the
                target becomes a wrong tensor, or the frame seems to be damaged.
            threads: the number of threads; None for one per core, at most 8.

        Raises:
            BaseMismatchError: the target is not the frame's base.
            CorruptionError: a checksum does not match, or a stream breaks a rule. The message names
                tensor, chunk and byte offset.
            TypeError: `target` is not a writable C-contiguous buffer.
            ValueError: the frame's base has another dtype, so its memory cannot hold the tensor; or
                `target` has another length than the tensor, or shares memory with the frame.

        Example:
            >>> from packhorse.frame import compress_buffer
            >>> old, new = bytes(4096), bytes(4095) + b"\\1"
            >>> frame = compress_buffer(new, "F32", (1024,), base=old)
            >>> target = bytearray(old)
            >>> frame.patch_into(target)
            >>> target == new
            True
        """
        memory = as_writable_bytes(target, "target")
        check_target(self.header, self.data, memory, self._name)
        n_threads = resolve_threads(threads)
        base = self._matching_base(memory, n_threads, base_hash)
        if base is None:
            self.verify(threads=n_threads)
            self._decode(self.encoded(None), memory, 0, n_threads)
            return
        tensor = self._encoded_beside(base, n_threads)
        status, chunk = _core.patch_base(tensor, memory, n_threads)
        if status:
            raise self.chunk_error(chunk, status)

    def prepare_patch(
        self, base: Buffer, *, base_hash: bytes | None = None, threads: int | None = None
    ) -> Patch | None:
        """Checks and decodes what must be written to the base to make it the tensor. The base is
        only read. Of chunks with few differences, only the units that change take memory.

        Args:
            base: as for `decompress_into`.
            base_hash: as for `decompress_into`.
            threads: the number of threads; None for one per core, at most 8.

        Returns:
            The patch, which has the content sum of the tensor that it leads to; None if the frame
            has no base or one of another dtype, or if its content hashes are no sums. (A
            `Follower` makes frames that have sums.)

        Raises:
            BaseMismatchError: as `decompress_into`, and if units that are replaced are not those
                of the frame's base, even if its hash was said to be known.
            CorruptionError: as `decompress_into`.
            TypeError: not a C-contiguous buffer.
        """
        header, n_threads = self.header, resolve_threads(threads)
        if header.base is None or header.base.dtype != header.dtype or not header.has_sum:
            return None
        units = self._matching_base(base, n_threads, base_hash)
        assert units is not None
        tensor = self._encoded_beside(units, n_threads)
        status, chunk, found, (low, high, replaced) = _core.prepare_patch(tensor, n_threads)
        if status:
            raise self.chunk_error(chunk, status)
        if base_check(replaced) != header.base.check:
            raise BaseMismatchError(
                f"{label(self._name)}units that the frame replaces are not those of its base: "
                "something else wrote to the base"
            )
        return Patch(found, changed_sum(header.base.content_hash, low, high))

    def changes(
        self, base: Buffer, *, base_hash: bytes | None = None, threads: int | None = None
    ) -> tuple[_Units, _Units]:
        """Lists the units that differ from the base. A unit is an element; but an element of C64
        has two units, and F4 and F6 are bytes (docs/format.md, section 3).

        Args:
            base: the bytes of the base; for a frame without one, of any tensor of the same length.
                An F32 base of BF16 or F16 is rounded first, so changes are from the rounded values.
            base_hash: as for `decompress_into`.
            threads: the number of threads; None for one per core, at most 8.

        Returns:
            The indices of these units in C order, ascending, of uint32, or of uint64 if the tensor
            has 2^32 units or more; and their new values, as unsigned integers of the units' length.

        Raises:
            BaseMismatchError, CorruptionError: as `decompress_into`.
            TypeError: not a C-contiguous buffer.
            ValueError: the frame has no base, and `base` has another length than the tensor.

        Example:
            >>> from packhorse.frame import compress_buffer
            >>> frame = compress_buffer(bytes(4095) + b"\\1", "F32", (1024,), base=bytes(4096))
            >>> indices, values = frame.changes(bytes(4096))
            >>> indices.tolist(), values.tolist()
            ([1023], [16777216])
        """
        header, n_threads = self.header, resolve_threads(threads)
        units = self._matching_base(base, n_threads, base_hash)
        if units is None:
            units = unnamed_base(base, header.dtype, header.geometry)
        tensor = self._encoded_beside(units, n_threads)
        status, chunk, indices, values = _core.find_changes(tensor, n_threads)
        if status:
            raise self.chunk_error(chunk, status)
        wide = header.geometry.n_units >> 32 > 0
        unit = np.dtype(f"u{header.geometry.unit_nbytes}")
        return indices.view(np.uint64 if wide else np.uint32), values.view(unit)

    def _matching_base(
        self, base: Buffer | None, threads: int, base_hash: bytes | None = None
    ) -> Base | None:
        header = self.header
        if header.base is None:
            return None
        try:
            return matching_base(
                base, header.base, header.dtype, header.geometry, threads, base_hash,
                has_sum=header.has_sum,
            )  # fmt: skip
        except BaseMismatchError as error:
            raise BaseMismatchError(f"{label(self._name)}{error}") from None

    def encoded(self, base: Base | None) -> EncodedTensor | ZstdJob:
        """The frame in the form that its decoder takes.

        Args:
            base: the base, if the frame has one and it is there.

        Returns:
            The core's form, or `ZstdJob` for Zstandard.
        """
        header = self.header
        if self._opened.has_zstd:
            return ZstdJob(header, self.data, base, self._chunk_error)
        payload = self.data[header.header_nbytes :]
        return EncodedTensor(payload, header.table, header.geometry, self._side_data(), base)

    def _encoded_beside(self, base: Base, threads: int) -> EncodedTensor:
        """As `encoded`, in the core's form always."""
        tensor = self.encoded(base)
        return tensor.stored(threads, base) if isinstance(tensor, ZstdJob) else tensor

    def _decode(
        self,
        tensor: EncodedTensor | ZstdJob,
        dst: ByteArray,
        start: int,
        threads: int,
        *,
        check: bool = True,
    ) -> None:
        if isinstance(tensor, ZstdJob):
            tensor.decode(dst, start, threads, check=check)
            return
        status, chunk = _core.decode_range(tensor, start, dst, check, threads)
        if status:
            raise self.chunk_error(chunk, status)

    def pieces(
        self,
        *,
        threads: int | None = None,
        windows: Iterator[ByteArray] | None = None,
        base: Buffer | None = None,
    ) -> Iterator[ByteArray]:
        """Decodes the tensor window by window, in the same memory whatever its size, and compares
        the content hash at the end (docs/format.md, section 7).

        Args:
            threads: the number of threads; None for one per core, at most 8.
            windows: gives memory of `window_nbytes` to decode each piece to; None to take new
                memory for the first piece, and use it for all.
            base: as for `decompress_into`.

        Yields:
            The next bytes of the tensor, each valid until its memory is used again.

        Raises:
            BaseMismatchError: as `decompress_into`.
            CorruptionError: the frame is damaged; raised after the last piece if only the hash
                shows it.
        """
        n_threads = resolve_threads(threads)
        tensor = self.encoded(self._matching_base(base, n_threads))
        windows = windows or repeat(np.empty(self.window_nbytes, np.uint8))
        hasher = ContentHasher(has_sum=self.has_sum)
        for start in range(0, self.logical_nbytes, _WINDOW_NBYTES):
            stop = min(start + _WINDOW_NBYTES, self.logical_nbytes)
            piece = next(windows)[: stop - start]
            self._decode(tensor, piece, start, n_threads)
            hasher.add(piece, n_threads)
            yield piece
        self._check_content(hasher.digest())

    def _check_content(self, digest: bytes) -> None:
        if digest != self.content_hash:
            raise self._error(
                f"the content hash of the decoded bytes is {digest.hex()}, and the frame says "
                f"{self.content_hash.hex()}",
                24,
            )

    @property
    def has_parts(self) -> bool:
        """Whether `verify_part` can check parts of the tensor by themselves."""
        return self.header.base is None and not self.has_sum

    def verify_part(self, start: int, stop: int, window: ByteArray) -> ByteArray:
        """Checks a part of the tensor, except for its content hash. Several threads may check parts
        of one frame at once.

        Args:
            start: first byte, a multiple of the lengths of chunks and of leaves of the hash.
            stop: one past the last byte; such a multiple, or the end of the tensor.
            window: memory to decode to.

        Returns:
            The hashes of the part's leaves, for `verify_parts`.

        Raises:
            CorruptionError: what is wrong, with tensor, chunk and byte offset.
        """
        piece = window[: stop - start]
        self._decode(self.encoded(None), piece, start, 1)
        return hash_leaves(piece)

    def verify_parts(self, leaves: Sequence[ByteArray]) -> None:
        """Checks the content hash.

        Args:
            leaves: what `verify_part` returned for all parts, in their order.

        Raises:
            CorruptionError: the hash is wrong.
        """
        self._check_content(hash_root(np.concatenate(leaves)))

    @property
    def window_nbytes(self) -> int:
        """Bytes of memory that `pieces` needs: 32 MiB, or less if the tensor is smaller."""
        return min(self.logical_nbytes, _WINDOW_NBYTES)

    def verify(
        self,
        *,
        threads: int | None = None,
        window: ByteArray | None = None,
        base: Buffer | None = None,
    ) -> None:
        """Checks everything: the CRC32C of every chunk, every stream, and the content hash of the
        decoded tensor. It takes 32 MiB of memory at most.

        Args:
            threads: the number of threads; None for one per core, at most 8.
            window: memory to decode to, of `window_nbytes`; None to take new memory.
            base: as for `decompress_into`.

        Raises:
            BaseMismatchError: as `decompress_into`.
            CorruptionError: what is wrong, with tensor, chunk and byte offset.
        """
        windows = None if window is None else repeat(window)
        for _ in self.pieces(threads=threads, windows=windows, base=base):
            pass

    def _side_data(self) -> Side | None:
        """The side data, decoded at the first call; if two threads make that call, both decode."""
        header = self.header
        if not header.n_row_dims:
            return None
        n_rows, n_columns = header.matrix
        if self._side is None:
            stream = np.frombuffer(header.side_stream, np.uint8)
            try:
                self._side = decode_side(header.side_descriptor, stream, n_rows + n_columns)
            except CorruptionError as error:
                raise self._error(f"side data: {error}", 52) from error
        return Side(self._side, n_rows)


def new_frame(
    data: ByteArray, name: str | None, plan: Plan | Callable[[FrameHeader], Plan] | None = None
) -> Frame:
    """The frame that was written to `data`. Its plan may be made from its header, at first use."""
    return Frame(data, open_frame(data, name, 0, None), name, 0, plan)
