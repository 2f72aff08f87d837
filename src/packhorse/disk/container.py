"""Packing and unpacking whole safetensors files, tensor by tensor (docs/format.md, section 8).

Tensors are handled in batches of at most 32 MiB, or one larger tensor, and threads share the
tensors of a batch (`threads.py`). So the memory needed depends on the largest batch or tensor, not
on the file. The source is mapped in parts (`source_file.py`), and the frames of every batch are
built in the same buffer. Packing writes the file from front to back and leaves room for the header,
which it fills in at the end. Unpacking decodes to a buffer of 32 MiB, and a large tensor window by
window.

With a base (`base_files.py`), a tensor is packed as differences from the base's tensor of the same
name if these are shorter. Every base is looked up before any output is written. Its
content hash is checked when it is used.

Output is complete or absent (`storage/atomic.py`), and the source is only read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import (
    BaseLike,
    Bases,
    BaseTensor,
    Lender,
    based_frames,
    open_bases,
)
from packhorse.disk.folder_index import plain_name
from packhorse.disk.packed_frames import open_frame
from packhorse.disk.packed_header import (
    PackedHeader,
    PrefixWriter,
    is_packed,
    parse_packed_header,
)
from packhorse.disk.results import FileResult, Progress, TensorPlan, TensorResult
from packhorse.disk.safetensors_header import FileHeader, TensorEntry, build_header, read_header
from packhorse.disk.source_file import SourceFile, open_source
from packhorse.errors import blaming
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.framework import Framework
from packhorse.layout import Level
from packhorse.storage.atomic import atomic_file
from packhorse.storage.frames.scratch import Window
from packhorse.storage.strict_json import shortened, shown
from packhorse.threads import batches, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "PICKLE_SUFFIXES",
    "check_bases",
    "check_tensors",
    "lay_out",
    "logical_nbytes",
    "pack_file",
    "pack_tensors",
    "pickle_advice",
    "plan_file",
    "unpack_file",
    "write_packed",
]

# Suffixes of pickle files; Packhorse never opens such files.
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


class _Sink(Protocol):
    """What a packed file is written to: a file or memory."""

    def write(self, data: Buffer) -> object: ...

    def patch(self, offset: int, data: Buffer) -> None: ...


class _Memory(io.BytesIO):
    """A sink in memory; `getvalue` returns its bytes without a copy."""

    def patch(self, offset: int, data: Buffer) -> None:
        self.seek(offset)
        self.write(data)
        self.seek(0, os.SEEK_END)


def logical_nbytes(src: str | os.PathLike[str]) -> int:
    """The size of all tensors of a file once unpacked: the total that `progress` counts up to.

    Args:
        src: a packed or plain safetensors file; only its header is read.

    Returns:
        The sum of the tensors' sizes.

    Raises:
        PackhorseError, OSError: the header cannot be read.

    Example:
        >>> from packhorse.disk import logical_nbytes
        >>> logical_nbytes("model.safetensors"), logical_nbytes("model.ph.safetensors")
        (67584, 67584)
    """
    path = Path(src)
    header = read_header(path)
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
    base: BaseLike | None = None,
) -> FileResult:
    """Pack a safetensors file.

    Args:
        src: a plain safetensors file.
        dst: the packed file to write, usually with the suffix `.ph.safetensors`.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        force: whether an existing file at `dst` may be replaced.
        progress: called with the number of tensor bytes packed since the last call.
        base: the model that this one was tuned from: a safetensors file, packed or not, a folder of
            such files, or tensors by name. A tensor is packed as differences from the base's tensor
            of the same name if these are shorter; unpacking then needs the base.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError: `src` is already packed or is a pickle, `dst` is `src` or the base, or an option
            is wrong.
        CorruptionError, CompatibilityError: `src` or the base is not a safetensors file, is
            damaged, or is too new.
        BaseMismatchError: the base was itself packed against a base.
        OSError: a file cannot be read or written; FileExistsError if `dst` exists and `force` is
            False.

    Example:
        >>> from packhorse.disk import pack_file
        >>> packed = pack_file("model.safetensors", "packed.ph.safetensors")
        >>> tuned = pack_file("tuned.safetensors", "tuned.ph.safetensors", base="model.safetensors")
        >>> tuned.packed_nbytes < packed.packed_nbytes < packed.original_nbytes
        True
    """
    path = Path(src)
    _refuse_pickle(path)
    with open_source(path) as source:
        header = _plain_header(source)
        buffers = _map_tensors(source, header)
        return write_packed(
            dst, header, buffers, level=level, threads=threads, progress=progress, force=force,
            source=source, base=base,
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
    source: SourceFile | None = None,
    base: BaseLike | None = None,
) -> FileResult:
    """Write a packed file from an iterable of tensors.

    Args:
        dst: the file to write.
        header: the header of the original file, which unpacking will restore.
        buffers: the bytes of each tensor, in the order of `header.entries`. They are taken in
            batches, and each batch is released before the next is taken.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the number of tensor bytes packed since the last call.
        force: whether an existing file at `dst` may be replaced.
        source: the file that the tensors come from, if any. The output gets its permissions. The
            source must not change before the end.
        base: as for `pack_file`.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_file`.
    """
    path, origin = Path(dst), None if source is None else source.path
    like = None if origin is None else os.stat(origin)
    coder = _Coder(resolve_level(level), resolve_threads(threads), progress or _ignore)
    with open_bases(base) as bases:
        if bases is not None:
            bases.refuse_output(path)
            coder = coder.against(bases, header, origin, path)
        with atomic_file(path, source=origin, force=force, like=like) as output:
            tensors = _write_stream(output, header, buffers, coder)
            packed_nbytes = output.nbytes
            _check_unchanged(source, bases)
    return FileResult(origin or path, path, header.file_nbytes, packed_nbytes, tensors)


def check_tensors(tensors: Mapping[str, Any], framework: Framework) -> None:
    """Refuse what is not a mapping of strings to tensors that can be stored.

    Raises:
        TypeError: it is not a mapping, a name is not a string, an object is not a tensor of the
            framework, or safetensors does not have its dtype. The message names the tensor.
        ValueError: its elements do not take a whole number of bytes.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"a dict of tensors by name is needed, not {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a string, not {name!r}")
        with blaming(f"tensor {shown(name)}", (TypeError, ValueError)):
            framework.describe(tensor)


def lay_out(
    tensors: Mapping[str, Any], framework: Framework, metadata: Mapping[str, str] | None
) -> tuple[FileHeader, Iterator[ByteArray]]:
    """The header of a file with these tensors, and their bytes in the header's order: the arguments
    of `write_packed` and `pack_tensors`.

    Raises:
        TypeError: as for `check_tensors`, or `metadata` is not a mapping of strings to strings.
    """
    check_tensors(tensors, framework)
    parts = {name: framework.readable(tensor) for name, tensor in tensors.items()}
    header = build_header({name: part[1:] for name, part in parts.items()}, metadata)
    return header, (parts[entry.name][0] for entry in header.entries)


def pack_tensors(
    header: FileHeader,
    buffers: Iterable[Buffer],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
) -> bytes:
    """`write_packed` to memory.

    Args:
        header: the header of the original file, which unpacking will restore.
        buffers: the bytes of each tensor, in the order of `header.entries`.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: as for `pack_file`.

    Returns:
        The bytes of the packed file.
    """
    memory = _Memory()
    coder = _Coder(resolve_level(level), resolve_threads(threads), _ignore)
    with open_bases(base) as bases:
        coder = coder if bases is None else coder.against(bases, header, None)
        _write_stream(memory, header, buffers, coder)
    return memory.getvalue()


@dataclass(frozen=True, slots=True)
class _Coder:
    level: Level
    threads: int
    progress: Progress
    bases: Mapping[str, BaseTensor] = field(default_factory=dict)
    base_name: str | None = None

    def against(
        self, bases: Bases, header: FileHeader, source: Path | None, output: Path = Path()
    ) -> _Coder:
        """This coder, with the bases of a file's tensors."""
        name = plain_name((source or output).name)
        chosen = bases.for_packing(header.entries, source, name)
        return replace(self, bases=chosen, base_name=bases.name)

    def base_of(self, entry: TensorEntry, threads: int) -> tuple[Buffer | None, str | None]:
        """The bytes and the dtype of a tensor's base; None for both if it has no base."""
        base = self.bases.get(entry.name)
        return (None, None) if base is None else (base.read(threads), base.dtype)


def _write_stream(
    sink: _Sink, header: FileHeader, buffers: Iterable[Buffer], coder: _Coder
) -> tuple[TensorResult, ...]:
    prefix = PrefixWriter(header, coder.base_name)
    sink.write(bytes(prefix.nbytes))
    rooms = [max_frame_nbytes(entry.dtype, entry.shape) for entry in header.entries]
    runs = list(batches([entry.nbytes for entry in header.entries]))
    # Room for the worst case; it costs nothing, because only pages that frames reach are touched.
    out = np.empty(max((sum(rooms[run.start : run.stop]) for run in runs), default=0), np.uint8)
    source = iter(buffers)
    tensors = []
    for run in runs:
        entries = header.entries[run.start : run.stop]
        frames = _pack_batch(entries, rooms[run.start : run.stop], source, out, coder)
        for entry, frame in zip(entries, frames, strict=True):
            sink.write(frame.buffer())
            tensors.append(_result(entry, frame.nbytes, frame.base_hash))
            coder.progress(entry.nbytes)
    is_based = any(tensor.base_hash for tensor in tensors)
    sizes = [tensor.packed_nbytes for tensor in tensors]
    sink.patch(0, prefix.render(sizes, coder.base_name if is_based else None))
    return tuple(tensors)


def _pack_batch(
    entries: Sequence[TensorEntry],
    rooms: Sequence[int],
    source: Iterator[Buffer],
    out: ByteArray,
    coder: _Coder,
) -> list[Frame]:
    """Frames of the next tensors of `source`, each in its own room in `out`."""
    buffers = list(islice(source, len(entries)))
    ends = list(accumulate(rooms))

    def pack(i: int, threads: int) -> Frame:
        entry = entries[i]
        base, base_dtype = coder.base_of(entry, threads)
        return compress_buffer(
            buffers[i], entry.dtype, entry.shape, level=coder.level, threads=threads,
            out=out[ends[i] - rooms[i] : ends[i]], name=shortened(entry.name),
            base=base, base_dtype=base_dtype,
        )  # fmt: skip

    return map_tensors(pack, [entry.nbytes for entry in entries], coder.threads)


def plan_file(
    src: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    base: BaseLike | None = None,
) -> list[TensorPlan]:
    """Estimate what `pack_file` would do, from a sample of each tensor; nothing is written.

    Args:
        src: a plain safetensors file.
        level: "fast", "default" or "max".
        base: as for `pack_file`.

    Returns:
        One plan for each tensor, in the order of the data.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_file`.

    Example:
        >>> from packhorse.disk import plan_file
        >>> [(tensor.name, tensor.dtype) for tensor in plan_file("model.safetensors", level="max")]
        [('bias', 'F32'), ('weight', 'BF16')]
    """
    path = Path(src)
    _refuse_pickle(path)
    coder = _Coder(resolve_level(level), resolve_threads(None), _ignore)
    with open_source(path) as source, open_bases(base) as bases:
        header = _plain_header(source)
        coder = coder if bases is None else coder.against(bases, header, path)
        pairs = zip(header.entries, _map_tensors(source, header), strict=True)
        plans = [_plan(entry, buffer, coder) for entry, buffer in pairs]
        _check_unchanged(source, bases)
        return plans


def unpack_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> FileResult:
    """Restore the file that was packed, byte for byte.

    Args:
        src: a packed file.
        dst: the file to write.
        threads: the number of threads; None for one per core, at most 8.
        force: whether an existing file at `dst` may be replaced.
        progress: called with the number of tensor bytes unpacked since the last call.
        max_nbytes: refuse a file whose tensors take more bytes in total; None for no limit.
        base: what the file was packed against, if it has a base: a file, a folder, or tensors by
            name.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        ValueError: `src` is not packed, `dst` is `src` or the base, or an option is wrong.
        CorruptionError, CompatibilityError: `src` or the base is damaged or too new, or `src`
            exceeds the limit.
        BaseMismatchError: a tensor needs a base, and no base or another one was given.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read or written; FileExistsError if `dst` exists and `force` is
            False.

    Example:
        >>> from pathlib import Path
        >>> from packhorse.disk import unpack_file
        >>> result = unpack_file("model.ph.safetensors", "same.safetensors")
        >>> Path("same.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
        True
    """
    path, target = Path(src), Path(dst)
    coder = _Coder(Level.DEFAULT, resolve_threads(threads), progress or _ignore)
    with open_source(path) as source, open_bases(base) as bases:
        packed = parse_packed_header(source.header(), label=str(path))
        packed.original.check_limit(max_nbytes, str(path))
        if bases is not None:
            bases.refuse_output(target)
        lender = Lender(bases, packed.base_name)
        based = _find_bases(source, packed, lender)
        like = os.stat(path)
        with atomic_file(target, source=path, force=force, like=like) as output:
            output.write(packed.original.prefix())
            unpacker = _Unpacker(source, packed, coder.threads, lender)
            entries = packed.original.entries
            for run in batches([entry.nbytes for entry in entries]):
                for piece in unpacker.pieces(entries[run.start : run.stop]):
                    output.write(piece)
                    coder.progress(piece.nbytes)
            source.check()
    tensors = tuple(
        _result(entry, packed.frames[entry.name].nbytes, based.get(entry.name)) for entry in entries
    )
    original = packed.original.file_nbytes
    return FileResult(path, target, original, packed.packed.file_nbytes, tensors)


def check_bases(src: str | os.PathLike[str], base: BaseLike | None) -> None:
    """Check that the bases of a packed file's tensors are there, without reading their data.

    Args:
        src: a packed file; only headers are read.
        base: as for `unpack_file`.

    Raises:
        BaseMismatchError, ValueError, CorruptionError, CompatibilityError, OSError: as for
            `unpack_file`.
    """
    path = Path(src)
    with open_source(path) as source, open_bases(base) as bases:
        packed = parse_packed_header(source.header(), label=str(path))
        _find_bases(source, packed, Lender(bases, packed.base_name))


def _check_unchanged(source: SourceFile | None, bases: Bases | None) -> None:
    if source is not None:
        source.check()
    if bases is not None:
        bases.check_unchanged()


def _find_bases(
    source: SourceFile, packed: PackedHeader, lender: Lender
) -> dict[str, bytes | None]:
    """Find the bases of a packed file's tensors, and return the content hash of each base by the
    name of its tensor."""
    found: dict[str, bytes | None] = {}
    first: tuple[str, Frame] | None = None
    for name, frame in based_frames(source, packed):
        first = first or (name, frame)
        if lender.bases is not None:
            with blaming(str(source.path)):
                lender.find(name, frame)
        found[name] = frame.base_hash
    if first is not None and lender.bases is None:
        with blaming(str(source.path)):
            raise lender.missing(*first, n_more=len(found) - 1)
    return found


@dataclass(frozen=True, slots=True)
class _Unpacker:
    """Decodes tensors batch by batch, and checks their content hashes."""

    source: SourceFile
    packed: PackedHeader
    threads: int
    lender: Lender
    window: Window = field(default_factory=Window)

    def pieces(self, entries: Sequence[TensorEntry]) -> Iterator[ByteArray]:
        """The bytes of a batch of tensors, in pieces; a piece is valid until the next is taken."""
        if len(entries) == 1:
            with blaming(str(self.source.path)):
                frame = self._open(entries[0])
                window = self.window.take(frame.window_nbytes)
                with self.lender.lend(entries[0].name, frame, self.threads) as loan:
                    yield from frame.pieces(threads=self.threads, window=window, base=loan.data)
            return
        sizes = [entry.nbytes for entry in entries]
        places = self.window.cut(sizes)

        def unpack(i: int, threads: int) -> None:
            with blaming(str(self.source.path)):
                frame = self._open(entries[i])
                with self.lender.lend(entries[i].name, frame, threads) as loan:
                    frame.verify(threads=threads, window=places[i], base=loan.data)

        map_tensors(unpack, sizes, self.threads)
        yield from places

    def _open(self, entry: TensorEntry) -> Frame:
        nbytes, offset = self.packed.frames[entry.name].nbytes, self.packed.frame_offset(entry.name)
        return open_frame(self.source.map(offset, nbytes), self.packed, entry)


def _plan(entry: TensorEntry, buffer: memoryview, coder: _Coder) -> TensorPlan:
    base, base_dtype = coder.base_of(entry, coder.threads)
    plan = plan_buffer(
        buffer, entry.dtype, entry.shape, level=coder.level, base=base, base_dtype=base_dtype
    )
    return TensorPlan(entry.name, entry.dtype, entry.shape, entry.nbytes, plan)


def _map_tensors(source: SourceFile, header: FileHeader) -> Iterator[memoryview]:
    for entry in header.entries:
        yield source.map(header.data_offset + entry.start, entry.nbytes)


def _plain_header(source: SourceFile) -> FileHeader:
    header = source.header()
    if is_packed(header):
        raise ValueError(f"{source.path}: already packed; unpack it first, or use it as it is")
    return header


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ValueError(pickle_advice(path))


def pickle_advice(path: Path) -> str:
    """The message for somebody who wants to pack a pickle checkpoint."""
    target = path.with_suffix(".safetensors").name
    return (
        f"{path}: Packhorse does not read pickle checkpoints, because reading one can run any "
        "code; convert it to safetensors first, in Python: "
        "`import torch, safetensors.torch; "
        f"tensors = torch.load({path.name!r}, map_location='cpu', weights_only=True); "
        "safetensors.torch.save_file("
        f"{{k: v.clone().contiguous() for k, v in tensors.items()}}, {target!r})`"
    )


def _result(entry: TensorEntry, packed_nbytes: int, base_hash: bytes | None) -> TensorResult:
    return TensorResult(
        entry.name, entry.dtype, entry.shape, entry.nbytes, packed_nbytes, base_hash
    )


def _ignore(nbytes: int) -> None:
    """The progress function if the caller gave none."""
