"""Packing whole safetensors files, tensor by tensor (docs/format.md, section 8).

Tensors are handled in batches of at most 32 MiB, one larger tensor, or a part of a long one, and
threads share the tensors of a batch (`threads.py`). While a batch is packed, the one before it is
written, unless a base makes them too large together. A tensor of more than 192 MiB is in memory as
a whole only if it has a base or does not come from a file of this machine.

The source is mapped in parts (`source_file.py`), or read ahead if it is at a URL
(`remote_source.py`), and the frames of every batch are built in one of two buffers. The file is
written from front to back (`output_file.py`). Room is left for its header, which is filled in at
the end; so a file at a URL is written to a temporary file of this machine first
(`storage/upload.py`).

With a base (`base_files.py`), a tensor is packed as differences from the base's tensor of the same
name if these are shorter. Every base is looked up before any output is written. Its
content hash is checked when it is used.

Output is complete or absent, and the source is only read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse import _core
from packhorse._core import Views
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import (
    BaseLike,
    Bases,
    open_bases,
    place_base,
)
from packhorse.disk.batches import (
    Coder,
    Listed,
    Mapped,
    Sink,
    Written,
    tensor_results,
    write_frames,
)
from packhorse.disk.packed_header import (
    PrefixWriter,
    is_packed,
    parse_packed_header,
    rooms_of,
)
from packhorse.disk.results import FileResult, Progress, TensorPlan, TensorResult
from packhorse.errors import CorruptionError, blaming
from packhorse.frame import plan_buffer
from packhorse.framework import Framework
from packhorse.layout import DTYPE_BY_CODE, Level
from packhorse.storage.locations import Place, open_place, writing
from packhorse.storage.safetensors_header import (
    FileHeader,
    TensorEntry,
    build_header,
    lay_out_forms,
)
from packhorse.storage.source import header_at, open_source
from packhorse.storage.source_file import Source, SourceFile, stamp_of
from packhorse.storage.strict_json import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "PICKLE_SUFFIXES",
    "Packed",
    "check_tensors",
    "join_parts",
    "lay_out",
    "logical_nbytes",
    "pack_file",
    "pack_range",
    "pack_tensors",
    "pickle_advice",
    "plan_file",
    "write_packed",
]

# Suffixes of pickle files; Packhorse never opens such files.
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


# Bytes of a part that are copied at a time.
_COPY_NBYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Packed:
    """What a part of a packed file holds.

    Attributes:
        tensors: the tensors.
        base_name: the name of the base, if there is one.
    """

    tensors: tuple[TensorResult, ...]
    base_name: str | None


class _Memory(io.BytesIO):
    """A sink in memory; `getvalue` returns its bytes without a copy."""

    @property
    def nbytes(self) -> int:
        return self.tell()

    def write_all(self, pieces: Iterable[Buffer]) -> None:
        self.writelines(pieces)

    def patch(self, offset: int, data: Buffer) -> None:
        self.seek(offset)
        self.write(data)
        self.seek(0, os.SEEK_END)


def logical_nbytes(
    src: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> int:
    """The size of all tensors of a file once unpacked: the total that `progress` counts up to.

    Args:
        src: a packed or plain safetensors file, at a path or a URL; only its header is read.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The sum of the tensors' sizes.

    Raises:
        PackhorseError, OSError: the header cannot be read.

    Example:
        >>> from packhorse.disk import logical_nbytes
        >>> logical_nbytes("model.safetensors"), logical_nbytes("model.ph.safetensors")
        (67584, 67584)
    """
    path = open_place(src, storage_options)
    header = header_at(path)
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
    storage_options: Mapping[str, Any] | None = None,
) -> FileResult:
    """Pack a safetensors file.

    Args:
        src: a plain safetensors file, at a path or a URL of fsspec, such as `s3://bucket/model`.
        dst: the packed file to write, usually with the suffix `.ph.safetensors`; a path or a URL.
            A file at a URL is written to a temporary file first, and uploaded as a whole.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        force: whether an existing file at `dst` may be replaced.
        progress: called with the number of tensor bytes packed since the last call.
        base: the model that this one was tuned from: a safetensors file, packed or not, a folder of
            such files, or tensors by name. A tensor is packed as differences from the base's tensor
            of the same name if these are shorter; unpacking then needs the base.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

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
    path, target = open_place(src, storage_options), open_place(dst, storage_options)
    _refuse_pickle(path)
    with open_source(path) as source:
        header = _plain_header(source)
        buffers = _tensors_of(source, header, header.entries)
        packed_nbytes, written = write_packed(
            target, header, buffers, level=level, threads=threads, progress=progress, force=force,
            source=source, base=base, storage_options=storage_options,
        )  # fmt: skip
    tensors = tuple(tensor_results(header.entries, *written))
    return FileResult(path, target, header.file_nbytes, packed_nbytes, tensors)


def write_packed(
    dst: str | os.PathLike[str],
    header: FileHeader,
    buffers: Iterable[Buffer],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    progress: Progress | None = None,
    force: bool = False,
    source: Source | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[int, Written]:
    """Write a packed file from an iterable of tensors.

    Args:
        dst: the file to write, at a path or a URL.
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
        storage_options: as for `pack_file`.

    Returns:
        The size of the file, and its frames.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_file`.
    """
    path, origin = open_place(dst, storage_options), None if source is None else source.path
    coder = Coder(resolve_level(level), resolve_threads(threads), progress or _ignore)
    with open_bases(place_base(base, storage_options)) as bases:
        if bases is not None:
            bases.refuse_output(path)
            coder = coder.against(bases, header, origin, path)
        with writing(path, source=origin, force=force) as output:
            written = _write_stream(output, header, buffers, coder)
            packed_nbytes = output.nbytes
            _check_unchanged(source, bases)
    return packed_nbytes, written


def pack_range(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    run: range,
    *,
    output: Place,
    level: Level | str = "default",
    threads: int | None = None,
    progress: Progress | None = None,
    base: BaseLike | None = None,
) -> Packed:
    """Pack some tensors of a file to a part, which `join_parts` needs.

    Args:
        src: a plain safetensors file, at a path or a URL.
        dst: the part to write: the frames of the tensors, end to end. One that exists is replaced.
        run: the indices of the tensors, in the order of the data.
        output: the packed file that the parts will become.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the number of tensor bytes packed since the last call.
        base: as for `pack_file`.

    Returns:
        The tensors of the part, and the name of the base.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_file`.
    """
    path = open_place(src)
    coder = Coder(resolve_level(level), resolve_threads(threads), progress or _ignore)
    with open_source(path) as source, open_bases(place_base(base, None)) as bases:
        header = _plain_header(source)
        if bases is not None:
            bases.refuse_output(output)
            coder = coder.against(bases, header, path, output)
        entries = header.entries[run.start : run.stop]
        with writing(open_place(dst), force=True) as sink:
            buffers = _tensors_of(source, header, entries)
            written = write_frames(sink, entries, buffers, rooms_of(entries), coder)
            _check_unchanged(source, bases)
    return Packed(tuple(tensor_results(entries, *written)), coder.base_name)


def join_parts(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    parts: Sequence[tuple[Place, Packed]],
    *,
    force: bool = False,
) -> FileResult:
    """Write a packed file from parts: the same bytes as `pack_file` writes.

    Args:
        src: the plain file that the parts come from; its header is read.
        dst: the packed file to write.
        parts: the parts with what `pack_range` returned for them; together they have all tensors,
            in the order of the data.
        force: whether an existing file at `dst` may be replaced.

    Returns:
        Sizes, for the file and for each tensor.

    Raises:
        CorruptionError: a part is cut short, or belongs to another file.
        OSError: a file cannot be read or written.
    """
    path, target = open_place(src), open_place(dst)
    header = header_at(path)
    tensors = tuple(tensor for _, packed in parts for tensor in packed.tensors)
    names = [entry.name for entry in header.entries]
    if names != [tensor.name for tensor in tensors]:
        raise CorruptionError(f"{path}: its parts have other tensors; pack the file again")
    base_name = next((packed.base_name for _, packed in parts), None)
    prefix = PrefixWriter(header, base_name)
    written = Written([t.packed_nbytes for t in tensors], [t.base_hash for t in tensors])
    with writing(target, source=path, force=force) as output:
        output.write(_rendered(prefix, written, base_name))
        for place, packed in parts:
            _append(output, place, sum(tensor.packed_nbytes for tensor in packed.tensors))
        packed_nbytes = output.nbytes
    return FileResult(path, target, header.file_nbytes, packed_nbytes, tensors)


def _append(output: Sink, part: Place, nbytes: int) -> None:
    """Copy a part to the end of a file."""
    found = stamp_of(part).nbytes
    if found != nbytes:
        raise CorruptionError(f"{part}: a part of {nbytes} bytes, but it has {found}; pack again")
    with open_source(part) as source:
        for start in range(0, nbytes, _COPY_NBYTES):
            output.write(source.map(start, min(_COPY_NBYTES, nbytes - start)))
        source.check()


def check_tensors(tensors: Mapping[str, Any], framework: Framework) -> None:
    """Refuse what is not a mapping of strings to tensors that can be stored.

    Raises:
        TypeError: it is not a mapping, a name is not a string, an object is not a tensor of the
            framework, or safetensors does not have its dtype. The message names the tensor.
        ValueError: its elements do not take a whole number of bytes.
    """
    _checked_views(tensors, framework)


def _checked_views(tensors: Mapping[str, Any], framework: Framework) -> Views:
    """Where tensors lie, which are as `check_tensors` wants them."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"a dict of tensors by name is needed, not {type(tensors).__name__}")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a string, not {name!r}")
    views = framework.views(list(tensors.values()))
    if unknown := set(views.unknown()):
        for i, (name, tensor) in enumerate(tensors.items()):
            if i in unknown:
                with blaming(f"tensor {shown(name)}", (TypeError, ValueError)):
                    framework.describe(tensor)
    return views


def lay_out(
    tensors: Mapping[str, Any],
    framework: Framework,
    metadata: Mapping[str, str] | None,
    refuse: Callable[[Mapping[str, Any], Views], None] | None = None,
) -> tuple[FileHeader, Iterable[ByteArray]]:
    """The header of a file with these tensors, and their bytes in the header's order: the arguments
    of `write_packed` and `pack_tensors`.

    Args:
        tensors: the tensors by name.
        framework: reads them.
        metadata: strings to keep in the file.
        refuse: raises an error if the file must not have these tensors, which lie where the views
            say; called before any is read.

    Raises:
        TypeError: as for `check_tensors`, or `metadata` is not a mapping of strings to strings.
    """
    if isinstance(tensors, Mapping):
        tensors = dict(tensors)  # the caller may change its own while the file is written
    views = _checked_views(tensors, framework)
    if refuse is not None:
        refuse(tensors, views)
    if views.unknown():
        parts = {name: framework.readable(tensor) for name, tensor in tensors.items()}
        header = build_header({name: part[1:] for name, part in parts.items()}, metadata)
        return header, (parts[entry.name][0] for entry in header.entries)
    forms, numbers = _core.forms_of_views(views)
    named = [(DTYPE_BY_CODE[code].name, shape) for code, shape in forms]
    names = list(tensors)
    header, order = lay_out_forms(names, named, numbers, metadata)
    return header, Listed(views, order, lambda i: framework.readable(tensors[names[i]])[0])


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
    coder = Coder(resolve_level(level), resolve_threads(threads), _ignore)
    with open_bases(base) as bases:
        coder = coder if bases is None else coder.against(bases, header, None)
        _write_stream(memory, header, buffers, coder)
    return memory.getvalue()


def _write_stream(
    sink: Sink, header: FileHeader, buffers: Iterable[Buffer], coder: Coder
) -> Written:
    prefix = PrefixWriter(header, coder.base_name)
    sink.write(bytes(prefix.nbytes))
    written = write_frames(sink, header.entries, buffers, prefix.rooms, coder)
    sink.patch(0, _rendered(prefix, written, coder.base_name))
    return written


def _rendered(prefix: PrefixWriter, written: Written, base_name: str | None) -> bytes:
    return prefix.render(written.sizes, base_name if any(written.base_hashes) else None)


def plan_file(
    src: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[TensorPlan]:
    """Estimate what `pack_file` would do, from a sample of each tensor; nothing is written.

    Args:
        src: a plain safetensors file, at a path or a URL; it is read as a whole from a URL.
        level: "fast", "default" or "max".
        base: as for `pack_file`.
        storage_options: as for `pack_file`.

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
    path = open_place(src, storage_options)
    _refuse_pickle(path)
    coder = Coder(resolve_level(level), resolve_threads(None), _ignore)
    with open_source(path) as source, open_bases(place_base(base, storage_options)) as bases:
        header = _plain_header(source)
        coder = coder if bases is None else coder.against(bases, header, path)
        buffers = _tensors_of(source, header, header.entries)
        pairs = zip(header.entries, buffers, strict=True)
        plans = [_plan(entry, buffer, coder) for entry, buffer in pairs]
        _check_unchanged(source, bases)
        return plans


def _check_unchanged(source: Source | None, bases: Bases | None) -> None:
    if source is not None:
        source.check()
    if bases is not None:
        bases.check_unchanged()


def _plan(entry: TensorEntry, buffer: memoryview, coder: Coder) -> TensorPlan:
    base, base_dtype = coder.base_of(entry, coder.threads)
    plan = plan_buffer(
        buffer, entry.dtype, entry.shape, level=coder.level, base=base, base_dtype=base_dtype
    )
    return TensorPlan(entry.name, entry.dtype, entry.shape, entry.nbytes, plan)


def _tensors_of(
    source: Source, header: FileHeader, entries: Sequence[TensorEntry]
) -> Iterable[memoryview]:
    first = header.data_offset
    places = [(first + start, stop - start) for _, _, _, start, stop in entries]
    if isinstance(source, SourceFile):
        return Mapped(source, places)
    return (source.map(*place) for place in places)


def _plain_header(source: Source) -> FileHeader:
    header = source.header()
    if is_packed(header):
        raise ValueError(f"{source.path}: already packed; unpack it first, or use it as it is")
    return header


def _refuse_pickle(path: Place) -> None:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ValueError(pickle_advice(path))


def pickle_advice(path: Place) -> str:
    """The message for somebody who wants to pack a pickle checkpoint."""
    target = f"{path.name.removesuffix(path.suffix)}.safetensors"
    return (
        f"{path}: Packhorse does not read pickle checkpoints, because reading one can run any "
        "code; convert it to safetensors first, in Python: "
        "`import torch, safetensors.torch; "
        f"tensors = torch.load({path.name!r}, map_location='cpu', weights_only=True); "
        "safetensors.torch.save_file("
        f"{{k: v.clone().contiguous() for k, v in tensors.items()}}, {target!r})`"
    )


def _ignore(nbytes: int) -> None:
    """The progress function if the caller gave none."""
