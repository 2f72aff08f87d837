"""Packing and unpacking whole safetensors files, tensor by tensor (docs/format.md, section 8).

Tensors are taken in batches of 32 MiB, or one that is larger, and threads share a batch out among
them (`threads.py`). So memory is bounded by a batch or the largest tensor, never by the file. Each
tensor of the source is mapped on its own and dropped again, and all frames are built in one buffer,
which is used again. Packing writes the file from front to back, with room for the header, which is
filled in at the end. Unpacking and verifying decode to a buffer of 32 MiB, a large tensor window by
window.

Output is whole or absent (`atomic.py`), and the source is only ever read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from packhorse.arguments import Framework, resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.atomic import atomic_file
from packhorse.disk.frames import Window, check_frame, map_region, open_frame
from packhorse.disk.header import FileHeader, TensorEntry, build_header, read_file_header
from packhorse.disk.packed_header import (
    PackedHeader,
    PrefixWriter,
    is_packed,
    parse_packed_header,
)
from packhorse.disk.results import FileResult, Problem, Progress, TensorPlan, TensorResult
from packhorse.disk.strict_json import has_capital_escape, shortened
from packhorse.errors import PackhorseError, blaming
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.layout import Level
from packhorse.threads import batches, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "PICKLE_SUFFIXES",
    "lay_out",
    "logical_nbytes",
    "pack_file",
    "pack_tensors",
    "pickle_advice",
    "plan_file",
    "unpack_file",
    "verify_file",
    "write_packed",
]

# Files that are pickles by their names; what is in them is never looked at.
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

_CAPITAL_ESCAPE = (
    "a JSON escape in the header has capital digits, which Packhorse does not write; probably a "
    "bit has flipped, and all else is as it was: unpack the file, and pack it again"
)


class _Sink(Protocol):
    """Where a packed file goes: a file or memory."""

    def write(self, data: Buffer) -> object: ...

    def patch(self, offset: int, data: Buffer) -> None: ...


class _Memory(io.BytesIO):
    """A sink in memory; its bytes are handed out without a copy."""

    def patch(self, offset: int, data: Buffer) -> None:
        self.seek(offset)
        self.write(data)
        self.seek(0, os.SEEK_END)


def logical_nbytes(src: str | os.PathLike[str]) -> int:
    """Bytes of all tensors of a file once unpacked: the total that `progress` counts up to.

    Args:
        src: a packed file or an ordinary safetensors file; only its header is read.

    Returns:
        The sum of the tensors' sizes.

    Raises:
        PackhorseError, OSError: the header cannot be read.
    """
    path = Path(src)
    with path.open("rb") as file:
        header = read_file_header(file, str(path))
    if not is_packed(header):
        return header.data_nbytes
    return parse_packed_header(header, label=str(path)).original.data_nbytes


def pack_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> FileResult:
    """Pack a safetensors file.

    Args:
        src: an ordinary safetensors file.
        dst: where the packed file goes, usually with the suffix `.ph.safetensors`.
        level: "fast", "default" or "max".
        threads: how many to use; None for the cores available, at most 8.
        force: an existing file at `dst` may be replaced.
        progress: called with the logical bytes done since the last call.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError: `src` is packed already or a pickle, `dst` is `src`, or an option is wrong.
        CorruptionError, CompatibilityError: `src` is not a safetensors file that can be read.
        OSError: the system refuses; FileExistsError if `dst` exists and `force` is False.
    """
    path = Path(src)
    _refuse_pickle(path)
    with path.open("rb") as file:
        header = _plain_header(file, path)
        buffers = _map_tensors(file, header)
        return write_packed(
            dst, header, buffers, level=level, threads=threads, progress=progress, force=force,
            source=path,
        )  # fmt: skip


def write_packed(
    dst: str | os.PathLike[str],
    header: FileHeader,
    buffers: Iterable[Buffer],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    progress: Progress | None = None,
    force: bool = False,
    source: Path | None = None,
) -> FileResult:
    """Write a packed file from tensors that come one after the other.

    Args:
        dst: where the file goes.
        header: of the file that unpacking shall give.
        buffers: the bytes of each tensor in the order of `header.entries`; they are asked for in
            batches, and those of one are dropped before the next.
        level: "fast", "default" or "max".
        threads: how many to use; None for the cores available, at most 8.
        progress: called with the logical bytes done since the last call.
        force: an existing file at `dst` may be replaced.
        source: the file that the tensors come from, if any; it gives the permissions.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError, OSError: as `pack_file`.
    """
    path = Path(dst)
    like = None if source is None else os.stat(source)
    coder = _Coder(resolve_level(level), resolve_threads(threads), progress or _ignore)
    with atomic_file(path, source=source, force=force, like=like) as output:
        tensors = _write_stream(output, header, buffers, coder)
        packed_nbytes = output.nbytes
    return FileResult(source or path, path, header.file_nbytes, packed_nbytes, tensors)


def lay_out(
    tensors: Mapping[str, Any], framework: Framework, metadata: Mapping[str, str] | None
) -> tuple[FileHeader, Iterator[ByteArray]]:
    """The header of a file of these tensors, and their bytes in its order, for the two below.

    Raises:
        TypeError: not a tensor of the framework, or of a dtype that safetensors does not have.
    """
    parts = {name: framework.readable(tensor) for name, tensor in tensors.items()}
    header = build_header({name: part[1:] for name, part in parts.items()}, metadata)
    return header, (parts[entry.name][0] for entry in header.entries)


def pack_tensors(
    header: FileHeader,
    buffers: Iterable[Buffer],
    *,
    level: Level | str = "default",
    threads: int | None = None,
) -> bytes:
    """`write_packed` into memory.

    Args:
        header: of the file that unpacking shall give.
        buffers: the bytes of each tensor in the order of `header.entries`.
        level: "fast", "default" or "max".
        threads: how many to use; None for the cores available, at most 8.

    Returns:
        The packed file.
    """
    memory = _Memory()
    coder = _Coder(resolve_level(level), resolve_threads(threads), _ignore)
    _write_stream(memory, header, buffers, coder)
    return memory.getvalue()


@dataclass(frozen=True, slots=True)
class _Coder:
    level: Level
    threads: int
    progress: Progress


def _write_stream(
    sink: _Sink, header: FileHeader, buffers: Iterable[Buffer], coder: _Coder
) -> tuple[TensorResult, ...]:
    prefix = PrefixWriter(header)
    sink.write(bytes(prefix.nbytes))
    rooms = [max_frame_nbytes(entry.dtype, entry.shape) for entry in header.entries]
    runs = list(batches([entry.nbytes for entry in header.entries]))
    # Pages of this are touched only as far as frames reach, so the worst case costs nothing.
    out = np.empty(max((sum(rooms[run.start : run.stop]) for run in runs), default=0), np.uint8)
    source = iter(buffers)
    tensors = []
    for run in runs:
        entries = header.entries[run.start : run.stop]
        for entry, frame in zip(entries, _pack_batch(entries, source, out, coder), strict=True):
            sink.write(frame.buffer())
            tensors.append(_result(entry, frame.nbytes))
            coder.progress(entry.nbytes)
    sink.patch(0, prefix.render([tensor.packed_nbytes for tensor in tensors]))
    return tuple(tensors)


def _pack_batch(
    entries: Sequence[TensorEntry], source: Iterator[Buffer], out: ByteArray, coder: _Coder
) -> list[Frame]:
    """Frames of the next tensors of `source`, one behind the other's room in `out`."""
    buffers = list(islice(source, len(entries)))
    rooms = [max_frame_nbytes(entry.dtype, entry.shape) for entry in entries]
    ends = list(accumulate(rooms))

    def pack(i: int, threads: int) -> Frame:
        entry = entries[i]
        return compress_buffer(
            buffers[i], entry.dtype, entry.shape, level=coder.level, threads=threads,
            out=out[ends[i] - rooms[i] : ends[i]], name=shortened(entry.name),
        )  # fmt: skip

    return map_tensors(pack, [entry.nbytes for entry in entries], coder.threads)


def plan_file(src: str | os.PathLike[str], *, level: Level | str = "default") -> list[TensorPlan]:
    """Say what `pack_file` would do, from a sample of each tensor; nothing is written.

    Args:
        src: an ordinary safetensors file.
        level: "fast", "default" or "max".

    Returns:
        One plan for each tensor, in the order of the data.

    Raises:
        ValueError, CorruptionError, CompatibilityError, OSError: as `pack_file`.
    """
    path = Path(src)
    _refuse_pickle(path)
    with path.open("rb") as file:
        header = _plain_header(file, path)
        pairs = zip(header.entries, _map_tensors(file, header), strict=True)
        return [_plan(entry, buffer, level) for entry, buffer in pairs]


def unpack_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
) -> FileResult:
    """Restore the file that was packed, byte for byte.

    Args:
        src: a packed file.
        dst: where the original goes.
        threads: how many to use; None for the cores available, at most 8.
        force: an existing file at `dst` may be replaced.
        progress: called with the logical bytes done since the last call.
        max_nbytes: refuse a file whose tensors take more bytes together; None for no limit.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError: `src` is not packed, `dst` is `src`, or an option is wrong.
        CorruptionError, CompatibilityError: `src` is damaged or of a newer version, or exceeds the
            limit.
        OSError: the system refuses; FileExistsError if `dst` exists and `force` is False.
    """
    path, target = Path(src), Path(dst)
    coder = _Coder(Level.DEFAULT, resolve_threads(threads), progress or _ignore)
    with path.open("rb") as file:
        packed = parse_packed_header(read_file_header(file, str(path)), label=str(path))
        packed.check_limit(max_nbytes, str(path))
        like = os.fstat(file.fileno())
        with atomic_file(target, source=path, force=force, like=like) as output:
            output.write(packed.original.prefix())
            unpacker = _Unpacker(file, packed, coder.threads)
            entries = packed.original.entries
            for run in batches([entry.nbytes for entry in entries]):
                for piece in unpacker.pieces(entries[run.start : run.stop]):
                    output.write(piece)
                    coder.progress(piece.nbytes)
    tensors = tuple(_result(entry, packed.frames[entry.name].nbytes) for entry in entries)
    original = packed.original.file_nbytes
    return FileResult(path, target, original, packed.packed.file_nbytes, tensors)


@dataclass(frozen=True, slots=True)
class _Unpacker:
    """Decodes batch after batch, and checks the content hashes."""

    file: BinaryIO
    packed: PackedHeader
    threads: int
    window: Window = field(default_factory=Window)

    def pieces(self, entries: Sequence[TensorEntry]) -> Iterator[ByteArray]:
        """The bytes of a batch of tensors, each piece valid until the next is asked for."""
        if len(entries) == 1:
            with blaming(self.file.name):
                frame = self._open(entries[0])
                window = self.window.take(frame.window_nbytes)
                yield from frame.pieces(threads=self.threads, window=window)
            return
        sizes = [entry.nbytes for entry in entries]
        places = self.window.cut(sizes)

        def unpack(i: int, threads: int) -> None:
            with blaming(self.file.name):
                self._open(entries[i]).verify(threads=threads, window=places[i])

        map_tensors(unpack, sizes, self.threads)
        yield from places

    def _open(self, entry: TensorEntry) -> Frame:
        nbytes, offset = self.packed.frames[entry.name].nbytes, self.packed.frame_offset(entry.name)
        return open_frame(map_region(self.file, offset, nbytes), self.packed, entry)


def verify_file(
    src: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
) -> list[Problem]:
    """Check every checksum and every content hash of a packed file, and go on after a bad tensor.

    Args:
        src: a packed file.
        threads: how many to use; None for the cores available, at most 8.
        progress: called with the logical bytes done since the last call.
        max_nbytes: a file whose tensors take more bytes together is bad, and none is decoded; None
            for no limit. Memory is bounded without it: a limit saves time.

    Returns:
        All that is wrong; nothing if the file is good.

    Raises:
        ValueError: `src` is an ordinary safetensors file, or `threads` is wrong.
        OSError: it cannot be read.
    """
    path = Path(src)
    coder = _Coder(Level.DEFAULT, resolve_threads(threads), progress or _ignore)
    with path.open("rb") as file:
        try:
            header = read_file_header(file, str(path))
        except PackhorseError as error:
            return [Problem(path, None, None, str(error))]
        originals: dict[str, TensorEntry] = {}
        problems = []
        if has_capital_escape(header.text):
            problems.append(Problem(path, None, None, f"{path}: {_CAPITAL_ESCAPE}"))
        try:
            packed = parse_packed_header(header, label=str(path))
        except PackhorseError as error:
            # Frames describe themselves, so they can be checked without the recorded header.
            problems.append(Problem(path, None, None, str(error)))
        else:
            try:
                packed.check_limit(max_nbytes, str(path))
            except PackhorseError as error:
                return [Problem(path, None, None, str(error))]
            originals = {entry.name: entry for entry in packed.original.entries}
        verifier = _Verifier(file, header, originals, max_nbytes)
        sizes = [verifier.nbytes_of(entry) for entry in header.entries]
        for run in batches(sizes):
            found = verifier.batch(header.entries[run.start : run.stop], coder.threads)
            problems.extend(problem for problem in found if problem is not None)
            coder.progress(sum(sizes[run.start : run.stop]) if originals else 0)
    return problems


@dataclass(frozen=True, slots=True)
class _Verifier:
    """Checks batch after batch, against the recorded header where there is a good one."""

    file: BinaryIO
    header: FileHeader
    originals: Mapping[str, TensorEntry]
    max_nbytes: int | None
    window: Window = field(default_factory=Window)

    def nbytes_of(self, entry: TensorEntry) -> int:
        """Bytes of a tensor as recorded; of its frame where nothing is."""
        return self.originals.get(entry.name, entry).nbytes

    def batch(self, entries: Sequence[TensorEntry], threads: int) -> list[Problem | None]:
        """What is wrong with each."""
        sizes = [self.nbytes_of(entry) for entry in entries]
        # What a frame that nothing is recorded of takes, only it knows itself.
        places = self.window.cut(sizes) if self.originals and len(entries) > 1 else None

        def check(i: int, threads: int) -> Problem | None:
            offset = self.header.data_offset + entries[i].start
            try:
                with blaming(self.file.name):
                    frame = self._open(entries[i], offset)
                    place = self.window.take(frame.window_nbytes) if len(entries) == 1 else None
                    frame.verify(threads=threads, window=places[i] if places else place)
            except PackhorseError as error:
                return Problem(Path(self.file.name), entries[i].name, offset, str(error))
            return None

        return map_tensors(check, sizes, threads)

    def _open(self, entry: TensorEntry, offset: int) -> Frame:
        data = map_region(self.file, offset, entry.nbytes)
        name = shortened(entry.name)
        frame = Frame.from_buffer(data, name=name, offset=offset, max_nbytes=self.max_nbytes)
        if self.originals:
            check_frame(frame, self.originals[entry.name], offset)
        return frame


def _plan(entry: TensorEntry, buffer: memoryview, level: Level | str) -> TensorPlan:
    plan = plan_buffer(buffer, entry.dtype, entry.shape, level=level)
    return TensorPlan(entry.name, entry.dtype, entry.shape, entry.nbytes, plan)


def _map_tensors(file: BinaryIO, header: FileHeader) -> Iterator[memoryview]:
    for entry in header.entries:
        yield map_region(file, header.data_offset + entry.start, entry.nbytes)


def _plain_header(file: BinaryIO, path: Path) -> FileHeader:
    header = read_file_header(file, str(path))
    if is_packed(header):
        raise ValueError(f"{path}: packed already; unpack it first, or use it as it is")
    return header


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ValueError(pickle_advice(path))


def pickle_advice(path: Path) -> str:
    """What to tell somebody who wants to pack a pickle checkpoint."""
    target = path.with_suffix(".safetensors").name
    return (
        f"{path}: a pickle checkpoint can run any code when it is read, so Packhorse does not; "
        "convert it to safetensors first, in Python: "
        "`import torch, safetensors.torch; "
        f"tensors = torch.load({path.name!r}, map_location='cpu', weights_only=True); "
        "safetensors.torch.save_file("
        f"{{k: v.clone().contiguous() for k, v in tensors.items()}}, {target!r})`"
    )


def _result(entry: TensorEntry, packed_nbytes: int) -> TensorResult:
    return TensorResult(entry.name, entry.dtype, entry.shape, entry.nbytes, packed_nbytes)


def _ignore(nbytes: int) -> None:
    """Progress that nobody watches."""
