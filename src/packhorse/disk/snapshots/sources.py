"""Safetensors files as a state: what `SnapshotStore.take_files` takes.

The tensors of all files make one dict by their names. Plain files are mapped, tensor by tensor;
packed ones are decoded, a batch at a time. No framework is needed, so any dtype will do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_hash
from packhorse.disk.container import PICKLE_SUFFIXES, pickle_advice
from packhorse.disk.folder_index import PLAIN_SUFFIX
from packhorse.disk.frames import map_region, open_frame
from packhorse.disk.header import FileHeader, TensorEntry, read_file_header
from packhorse.disk.packed_header import PackedHeader, is_packed, parse_packed_header
from packhorse.disk.snapshots.casts import find_casts, packing_order
from packhorse.disk.snapshots.take import Spec, State
from packhorse.disk.strict_json import shortened
from packhorse.errors import CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME

__all__ = ["FileState", "model_files", "open_sources"]


@dataclass(frozen=True, slots=True)
class FileState:
    """The state that some files hold.

    Attributes:
        state: their tensors, by name.
        metadata: what all files say in `__metadata__`; the first that has a key counts.
    """

    state: State
    metadata: dict[str, str]


def model_files(source: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a source: itself, or those directly in a folder, by name.

    Raises:
        ValueError: it is a pickle, or a folder without safetensors files.
    """
    path = Path(source)
    if not path.is_dir():
        _refuse_pickles([path])
        return [path]
    files = sorted(item for item in path.iterdir() if item.is_file())
    models = [file for file in files if file.name.endswith(PLAIN_SUFFIX)]
    if not models:
        _refuse_pickles(files)
        raise ValueError(f"{path}: no {PLAIN_SUFFIX} file in this folder; name one that has some")
    return models


def _refuse_pickles(files: Iterable[Path]) -> None:
    for file in files:
        if file.suffix.lower() in PICKLE_SUFFIXES:
            raise ValueError(pickle_advice(file))


@contextmanager
def open_sources(files: Sequence[Path], threads: int) -> Iterator[FileState]:
    """Open files for the time of the block.

    Args:
        files: plain or packed safetensors files.
        threads: how many to use for decoding.

    Raises:
        ValueError: two of them have a tensor of the same name.
        CorruptionError, CompatibilityError: one is not what it should be.
        OSError: one cannot be read.
    """
    with ExitStack() as stack:
        opened = [_File(stack.enter_context(path.open("rb")), path, threads) for path in files]
        places = [(file, entry) for file in opened for entry in file.original.entries]
        _refuse_same_names(places)
        specs = [Spec(entry.name, entry.dtype, entry.shape) for _, entry in places]
        document = {"dict": [[spec.path, {"tensor": i}] for i, spec in enumerate(specs)]}
        metadata: dict[str, str] = {}
        for file in reversed(opened):
            metadata |= file.original.metadata or {}
        casts = find_casts(specs, lambda i, n: places[i][0].head(places[i][1], n))
        groups = packing_order(len(specs), casts)
        state = State(document, specs, groups, casts, lambda i: places[i][0].read(places[i][1]))
        yield FileState(state, metadata)


class _File:
    """One open file."""

    def __init__(self, file: BinaryIO, path: Path, threads: int) -> None:
        self._file = file
        self._threads = threads
        self.path = path
        self._header = read_file_header(file, str(path))
        self._packed: PackedHeader | None = None
        if is_packed(self._header):
            self._packed = parse_packed_header(self._header, label=str(path))

    @property
    def original(self) -> FileHeader:
        """The header, of a packed file that of the original."""
        return self._packed.original if self._packed else self._header

    def read(self, entry: TensorEntry) -> ByteArray:
        """The bytes of a tensor: mapped, or decoded."""
        if self._packed is None:
            return self._mapped(entry, entry.nbytes)
        decoded = np.empty(entry.nbytes, np.uint8)
        with blaming(str(self.path)):
            frame = self._frame(self._packed, entry)
            frame.decompress_into(decoded, threads=self._threads)
            if content_hash(decoded, threads=self._threads) != frame.content_hash:
                raise CorruptionError(
                    f"tensor {shortened(entry.name)!r} at byte "
                    f"{self._packed.frame_offset(entry.name)}: the content hash of the decoded "
                    "bytes is not that of the frame"
                )
        return decoded

    def head(self, entry: TensorEntry, n: int) -> ByteArray:
        """The bytes of a tensor's first elements; of a packed one its first chunk is decoded."""
        nbytes = min(n * DTYPE_BY_NAME[entry.dtype].bits // 8, entry.nbytes)
        if self._packed is None:
            return self._mapped(entry, nbytes)
        decoded = np.empty(nbytes, np.uint8)
        with blaming(str(self.path)):
            self._frame(self._packed, entry).decompress_into(decoded, stop=nbytes, threads=1)
        return decoded

    def _mapped(self, entry: TensorEntry, nbytes: int) -> ByteArray:
        start = self._header.data_offset + entry.start
        return np.frombuffer(map_region(self._file, start, nbytes), np.uint8)

    def _frame(self, packed: PackedHeader, entry: TensorEntry) -> Frame:
        offset, nbytes = packed.frame_offset(entry.name), packed.frames[entry.name].nbytes
        return open_frame(map_region(self._file, offset, nbytes), packed, entry)


def _refuse_same_names(places: Sequence[tuple[_File, TensorEntry]]) -> None:
    owners: dict[str, Path] = {}
    for file, entry in places:
        if entry.name in owners:
            raise ValueError(
                f"{file.path}: the tensor {shortened(entry.name)!r} is in {owners[entry.name]} "
                "too; take files of one model, each once"
            )
        owners[entry.name] = file.path
