"""Exporting a shelf to a safetensors file, and importing models: plain or packed, file or folder.

Of a folder of shards, the index says which tensors are in which file; without one, all files of the
folder are read. Plain tensors are mapped part by part, packed ones decoded window by window.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np

from packhorse.arguments import resolve_threads
from packhorse.bits import pack_bits, unpack_bits_into
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import BaseLike, Lender, open_bases, place_base
from packhorse.disk.folder_index import INDEX_SUFFIX, PLAIN_SUFFIX, packed_name, weight_map
from packhorse.disk.index_file import read_index
from packhorse.disk.model_file import ModelFile
from packhorse.disk.shelf.exchange import (
    BLOCK_NBYTES,
    Block,
    Incoming,
    Meter,
    Outgoing,
    ReadsLikeShelf,
    ShelfProgress,
    bits_of,
    name_below,
    native_dtype,
    outgoing,
    store,
    tile_shape,
    tiles,
)
from packhorse.errors import CorruptionError, blaming
from packhorse.layout import DTYPE_BY_NAME, FILE_SUFFIX
from packhorse.storage.locations import Place, open_place, writing
from packhorse.storage.safetensors_header import FileHeader, TensorEntry, build_header
from packhorse.storage.source import open_source
from packhorse.storage.strict_json import parse_json, shown

__all__ = ["SafetensorsExport", "SafetensorsImport"]

_PART_NBYTES = 1 << 22  # of elements of 4 and 6 bits, which take up to twice as much in memory


class SafetensorsExport(ReadsLikeShelf):
    """Exporting to safetensors files."""

    def export_safetensors(
        self,
        path: str | os.PathLike[str],
        names: str | Iterable[str] | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        progress: ShelfProgress | None = None,
        force: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Place:
        """Write tensors as a plain safetensors file, which `packhorse.disk.pack_file` can pack.

        Args:
            path: the file to write, at a path or a URL.
            names: the tensors; None for all, without nested states.
            metadata: pairs of strings for the file's header.
            progress: called with the bytes done, and the bytes of all tensors.
            force: whether an existing file may be replaced.
            storage_options: options for the file system of a URL, as in fsspec.

        Returns:
            The file.

        Raises:
            KeyError: the shelf has no tensor of a name.
            TypeError: a name is that of a nested state.
            ValueError: the file's name is that of a packed file, or a tensor of elements of 4 or 6
                bits does not end at a byte.
            OSError: the file cannot be written; FileExistsError if it exists and `force` is False.
        """
        place = open_place(path, storage_options)
        if place.name.endswith(FILE_SUFFIX):
            raise ValueError(
                f"{place}: is the name of a packed file; export to a name that ends with "
                f"{PLAIN_SUFFIX}, and pack that: packhorse pack"
            )
        with outgoing(self, names, progress) as (tensors, meter):
            header = _header(tensors, metadata)
            with writing(place, force=force) as output:
                output.write(header.prefix())
                for entry in header.entries:
                    for piece in _pieces(tensors[entry.name], meter):
                        output.write(piece)
        return place


class SafetensorsImport:
    """Importing from safetensors files."""

    def import_safetensors(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        names: str | Iterable[str] | None = None,
        *,
        base: BaseLike | None = None,
        replace: bool = False,
        resume: bool = False,
        progress: ShelfProgress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Read the tensors of a model: of a safetensors file, packed or not, or of a folder of
        such.

        Args:
            path: the file, the index of a sharded model, or the folder, at a path or a URL.
            prefix: a name for the model in the shelf, in front of the names of its tensors.
            names: tensors of the model; None for all.
            base: what a packed model was packed against, if it has a base; as for `unpack_file`.
            replace: whether tensors of the same names may be replaced.
            resume: whether each tensor is a transaction of its own, instead of all together.
                Tensors that the shelf has already, equal in every bit, are then kept.
            progress: called with the bytes done, and the bytes of all tensors.
            storage_options: options for the file systems of all URLs of this call, as in fsspec.

        Returns:
            The names of the tensors in the shelf.

        Raises:
            KeyError: the model has no tensor of a name.
            ValueError: the folder has no model, or several; or the shelf has a tensor of such a
                name, and `replace` is False.
            CorruptionError, CompatibilityError: a file is damaged, or too new.
            BaseMismatchError: a tensor needs a base, and no base or another one was given.
            OSError: a file cannot be read, or has changed.
        """
        place = open_place(path, storage_options)
        with ExitStack() as stack:
            bases = stack.enter_context(open_bases(place_base(base, storage_options)))
            found = _found(place, stack)
            if names is not None:
                asked = [names] if isinstance(names, str) else list(names)
                for name in asked:
                    if name not in found:
                        raise KeyError(f"{place}: has no tensor {shown(name)}")
                found = {name: found[name] for name in asked}
            lender = Lender(bases, None)
            tensors = [
                _incoming(name_below(prefix, name), file, entry, lender)
                for name, (file, entry) in found.items()
            ]
            return store(self, tensors, replace=replace, resume=resume, progress=progress)


# Exporting.


def _header(tensors: Mapping[str, Outgoing], metadata: Mapping[str, str] | None) -> FileHeader:
    for name, tensor in tensors.items():
        numel, bits = math.prod(tensor.shape), DTYPE_BY_NAME[tensor.dtype].bits
        if numel * bits % 8:
            raise ValueError(
                f"tensor {shown(name)}: {numel} elements of {bits} bits do not end at a byte, "
                "which safetensors requires; leave it out by names="
            )
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return build_header(forms, metadata)


def _pieces(tensor: Outgoing, meter: Meter) -> Iterator[ByteArray]:
    """The bytes of a tensor, as a file has them."""
    bits = DTYPE_BY_NAME[tensor.dtype].bits
    rest = np.empty(0, np.uint8)  # elements of 4 or 6 bits that do not end at a byte yet
    for _, block in tensor.read(tensor.tile(BLOCK_NBYTES), meter):
        data = bits_of(block)
        if bits < 8:
            data = np.concatenate([rest, data])
            n = data.size - data.size % 4
            data, rest = pack_bits(data[:n], bits), data[n:]
        yield data
    if rest.size:  # two elements of 4 bits: others end at a byte with the tensor
        yield pack_bits(rest, bits)


# Importing.


_Found: TypeAlias = dict[str, tuple[ModelFile, TensorEntry]]


def _found(place: Place, stack: ExitStack) -> _Found:
    """The tensors of a model by name, with the files that they are in, which are open."""
    if place.name.endswith(INDEX_SUFFIX):
        return _indexed(place, stack)
    if not place.is_dir():
        return _in_files([place], stack)
    paths: list[Place] = sorted(place.iterdir(), key=lambda path: path.name)
    indexes = [path for path in paths if path.name.endswith(INDEX_SUFFIX)]
    if len(indexes) == 1:
        return _indexed(indexes[0], stack)
    files = [path for path in paths if path.name.endswith(PLAIN_SUFFIX)]
    if indexes:
        names = ", ".join(path.name for path in indexes)
        raise ValueError(f"{place}: has several models: {names}; name the index of one")
    if not files:
        raise ValueError(f"{place}: there is no *{PLAIN_SUFFIX} file in this folder; name another")
    return _in_files(files, stack)


def _in_files(paths: Sequence[Place], stack: ExitStack) -> _Found:
    found: _Found = {}
    for path in paths:
        file = _open(path, stack)
        for entry in file.original.entries:
            if entry.name in found:
                raise ValueError(
                    f"{path}: tensor {shown(entry.name)} is also in "
                    f"{found[entry.name][0].path.name}; import one of the files"
                )
            found[entry.name] = file, entry
    return found


def _indexed(index: Place, stack: ExitStack) -> _Found:
    """The tensors that the index of a sharded model names. Its files may be packed, one by one or
    with the index."""
    document = parse_json(read_index(index), label=str(index))
    found: _Found = {}
    opened: dict[str, dict[str, tuple[ModelFile, TensorEntry]]] = {}
    for name, where in weight_map(document, str(index)).items():
        if where not in opened:
            file = _open(_beside(index, where), stack)
            opened[where] = {entry.name: (file, entry) for entry in file.original.entries}
        if name not in opened[where]:
            raise CorruptionError(
                f"{index}: puts tensor {shown(name)} in {shown(where)}, which does not have it; "
                "get the model again"
            )
        found[name] = opened[where][name]
    return found


def _beside(index: Place, name: str) -> Place:
    """A file that an index names, or its packed form."""
    if name.startswith("/") or ".." in name.split("/"):
        raise CorruptionError(f"{index}: names {shown(name)}, which is outside its folder")
    for path in (index.parent / name, index.parent / packed_name(name)):
        if path.exists():
            return path
    raise CorruptionError(
        f"{index}: names {shown(name)}, which is not in the folder; get the model again"
    )


def _open(path: Place, stack: ExitStack) -> ModelFile:
    return ModelFile(stack.enter_context(open_source(path)))


def _incoming(name: str, file: ModelFile, entry: TensorEntry, lender: Lender) -> Incoming:
    native, bits = native_dtype(entry.dtype), DTYPE_BY_NAME[entry.dtype].bits
    tile = tile_shape(entry.shape, [1] * len(entry.shape), BLOCK_NBYTES // native.itemsize)

    def blocks() -> Iterator[Block]:
        feed = _Feed(_unpacked(_data(file, entry, lender), bits))
        for box in tiles(entry.shape, tile):
            shape = [cut.stop - cut.start for cut in box]
            block = np.empty(shape, native)
            feed.fill(block.reshape(-1).view(np.uint8))
            yield box, block
        feed.end()

    where = f"{file.path}: tensor {shown(entry.name)}"
    return Incoming(name, entry.dtype, entry.shape, where, blocks, file.source.check)


def _data(file: ModelFile, entry: TensorEntry, lender: Lender) -> Iterator[ByteArray]:
    """The bytes of a tensor in pieces, each valid until the next is taken."""
    frame, threads = file.frame(entry), resolve_threads(None)
    if frame is None:
        first = file.original.data_offset + entry.start
        for start in range(0, entry.nbytes, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, entry.nbytes - start)
            yield np.frombuffer(file.source.map(first + start, nbytes), np.uint8)
        return
    with blaming(str(file.path)), lender.lend(entry.name, frame, threads) as loan:
        yield from frame.pieces(threads=threads, base=loan.data)


def _unpacked(pieces: Iterator[ByteArray], bits: int) -> Iterator[ByteArray]:
    """Pieces in which each element has a byte or more, as in memory."""
    if bits >= 8:
        yield from pieces
        return
    group = math.lcm(bits, 8) // 8  # bytes after which an element ends
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        for start in range(0, piece.size, _PART_NBYTES):
            part = np.concatenate([rest, piece[start : start + _PART_NBYTES]])
            n = part.size - part.size % group
            out = np.empty(n * 8 // bits, np.uint8)
            unpack_bits_into(part[:n], bits, out)
            rest = part[n:]
            yield out


class _Feed:
    """Hands out the bytes of pieces in other portions."""

    def __init__(self, pieces: Iterator[ByteArray]) -> None:
        self._pieces = pieces
        self._piece = np.empty(0, np.uint8)

    def fill(self, out: ByteArray) -> None:
        """Write the next bytes to memory, all of it."""
        done = 0
        while done < out.size:
            if not self._piece.size:
                self._piece = next(self._pieces)
                continue
            n = min(self._piece.size, out.size - done)
            out[done : done + n] = self._piece[:n]
            self._piece, done = self._piece[n:], done + n

    def end(self) -> None:
        """Take what is left, so that the pieces' check of the content runs."""
        for _ in self._pieces:
            pass
