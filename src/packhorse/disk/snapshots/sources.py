"""Reads safetensors files as a state, for `SnapshotStore.take_files`.

The state is one dict of the tensors of all files, by name. Plain files are mapped, tensor by
tensor; packed files are decoded, a batch at a time; files at URLs are read ahead. No framework is
needed, so any dtype works.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.codecs.base import ByteArray
from packhorse.disk.container import PICKLE_SUFFIXES, pickle_advice
from packhorse.disk.folder_index import PLAIN_SUFFIX
from packhorse.disk.model_file import ModelFile
from packhorse.disk.snapshots.take import State
from packhorse.storage.frames.casts import find_casts, packing_order
from packhorse.storage.frames.refs import TensorSpec
from packhorse.storage.locations import Place, open_place
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.strict_json import shortened

__all__ = ["FileState", "model_files", "open_sources"]


@dataclass(frozen=True, slots=True)
class FileState:
    """The state that some files hold.

    Attributes:
        state: the tensors of the files, by name.
        metadata: the `__metadata__` of all files. If several files have a key, the first one's
            value is used.
    """

    state: State
    metadata: dict[str, str]


def model_files(
    source: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[Place]:
    """The safetensors files of a source: the file itself, or those directly in a folder, by name.

    Args:
        source: a file or a folder, at a path or a URL.
        storage_options: options for the file system of a URL, as in fsspec.

    Returns:
        The paths of the files, which are not opened.

    Raises:
        ValueError: the source is a pickle, or a folder without safetensors files.

    Example:
        >>> from packhorse.disk import model_files
        >>> [str(path) for path in model_files("llama")]
        ['llama/model.safetensors']
    """
    path = open_place(source, storage_options)
    if not path.is_dir():
        _refuse_pickles([path])
        return [path]
    files = _files_in(path)
    models = [file for file in files if file.name.endswith(PLAIN_SUFFIX)]
    if not models:
        _refuse_pickles(files)
        raise ValueError(
            f"{path}: no {PLAIN_SUFFIX} file in this folder; name a folder that has some"
        )
    return models


def _files_in(folder: Place) -> Sequence[Place]:
    if isinstance(folder, Path):
        return sorted(item for item in folder.iterdir() if not item.is_dir())
    return [folder / path for path in folder.files() if len(path.parts) == 1]


def _refuse_pickles(files: Iterable[Place]) -> None:
    for file in files:
        if file.suffix.lower() in PICKLE_SUFFIXES:
            raise ValueError(pickle_advice(file))


@contextmanager
def open_sources(files: Sequence[Place], threads: int) -> Iterator[FileState]:
    """Open files until the block ends.

    Args:
        files: plain or packed safetensors files.
        threads: how many threads to use for decoding.

    Raises:
        ValueError: two files have a tensor of the same name.
        CorruptionError, CompatibilityError: a file is damaged, or too new.
        OSError: a file cannot be read. `State.check` raises it if a file was changed meanwhile.
    """
    with ExitStack() as stack:
        opened = [ModelFile(stack.enter_context(open_source(path))) for path in files]
        places = [(file, entry) for file in opened for entry in file.original.entries]
        _refuse_same_names(places)
        specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for _, entry in places]
        document = {"dict": [[spec.name, {"tensor": i}] for i, spec in enumerate(specs)]}
        metadata: dict[str, str] = {}
        for file in reversed(opened):
            metadata |= file.original.metadata or {}
        casts = find_casts(specs, lambda i, n: places[i][0].head(places[i][1], n))
        groups = packing_order(len(specs), casts)

        def read(i: int) -> ByteArray:
            file, entry = places[i]
            return file.read(entry, threads)

        def check() -> None:
            for file in opened:
                file.source.check()

        state = State(document, specs, groups, casts, read, check=check)
        yield FileState(state, metadata)


def _refuse_same_names(places: Sequence[tuple[ModelFile, TensorEntry]]) -> None:
    owners: dict[str, Place] = {}
    for file, entry in places:
        if entry.name in owners:
            raise ValueError(
                f"{file.path}: the tensor {shortened(entry.name)!r} is also in "
                f"{owners[entry.name]}; take the files of one model, each once"
            )
        owners[entry.name] = file.path
