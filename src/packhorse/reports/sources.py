"""What a report reads: models, checkpoints of a series, snapshots of a store.

A `Source` is only a name and a place; it can be sent to another process. `opened` opens it, and
then gives the bytes of one tensor at a time, or of some runs of a tensor. Of a plain file only the
runs are read, from the disk or a URL; of a packed file only the chunks that they touch; a tensor of
a snapshot is decoded whole, along its chain of deltas.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeAlias

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk import SnapshotStore, model_files
from packhorse.disk.model_file import ModelFile
from packhorse.disk.snapshots.catalog import Catalog
from packhorse.disk.snapshots.names import STORE_FILE
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.errors import BaseMismatchError, PackhorseError, blaming
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.names import steps_of
from packhorse.reports.results import SourceRow
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.locations import Place, open_place, open_storage
from packhorse.storage.source import open_source
from packhorse.storage.source_file import stamp_of

__all__ = ["READ_ERRORS", "Entry", "Opened", "Runs", "Source", "find_sources", "opened"]

# What reading a source may raise: it is damaged, gone, or nothing that a report can read.
READ_ERRORS = (PackhorseError, OSError, ValueError)

# The first byte of each run, and the one after its last.
_BLOCK_NBYTES = 3 << 21  # whole chunks, and whole elements of every dtype
Runs: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Source:
    """A model, a checkpoint or a snapshot.

    Attributes:
        name: a short name, different for all sources of a report.
        path: the path or URL of the file, the folder or the store.
        snapshot: the snapshot's name, if it is one of a store.
        step: its number in a series; None outside of one.
        storage_options: options for the file system of a URL, as in fsspec.
    """

    name: str
    path: str
    snapshot: str | None = None
    step: int | None = None
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor of a source; `packed_nbytes` is the size of its frame, or None if it is plain."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Opened:
    """An open source. It is used by one thread for each tensor, so by several threads at once.

    Attributes:
        source: the source.
        row: what the report says of it.
        entries: its tensors, in order.
    """

    def __init__(self, source: Source, row: SourceRow, tensors: Mapping[str, _Tensor]) -> None:
        self.source = source
        self.row = row
        self._tensors = tensors
        self.entries = tuple(tensor.entry for tensor in tensors.values())

    def entry(self, name: str) -> Entry | None:
        """The tensor of a name; None if there is none."""
        tensor = self._tensors.get(name)
        return tensor.entry if tensor else None

    def read(self, name: str, threads: int = 1) -> ByteArray:
        """All bytes of a tensor, which must not be written to.

        Raises:
            CorruptionError, CompatibilityError: the tensor is damaged, or too new.
            BaseMismatchError: the tensor is packed against a base.
        """
        return self._tensors[name].read(threads)

    def runs(self, name: str, runs: Runs, threads: int = 1) -> list[ByteArray]:
        """Runs of bytes of a tensor, each from a start to a stop; errors as for `read`."""
        return self._tensors[name].runs(runs, threads)

    def frame(self, name: str) -> Frame | None:
        """The frame of a tensor of a packed file, to look at its header; None for others."""
        return self._tensors[name].frame()

    def content_hash(self, name: str) -> bytes | None:
        """The content hash of a tensor, if it is written beside it: in packed files and stores."""
        return self._tensors[name].content_hash()

    def blocks(self, name: str, threads: int = 1) -> Iterator[ByteArray]:
        """All bytes of a tensor, one block of a few MiB after the other; errors as for `read`."""
        return self._tensors[name].blocks(threads)


def find_sources(
    sources: Sequence[str | os.PathLike[str]],
    *,
    as_series: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Source]:
    """Finds what the words of a caller mean.

    Args:
        sources: paths or URLs: a model file or folder, a snapshot store, or a pattern such as
            "run/checkpoint-*" of paths.
        as_series: whether paths that differ in one number are a series.
        storage_options: options for the file systems of URLs, as in fsspec.

    Returns:
        The sources. Those of a series have a `step` and come in its order: the snapshots of a
        store, or several paths that differ in one number. Others come in the order of the caller.

    Raises:
        FileNotFoundError: nothing matches a pattern, or a store has no snapshot.
        ValueError: no source was given.
        CorruptionError, CompatibilityError, OSError: a store cannot be read.
    """
    words = [word for source in sources for word in _expanded(os.fspath(source), storage_options)]
    if not words:
        raise ValueError("no source: name model files, folders or a snapshot store")
    places = {word: open_place(word, storage_options) for word in words}
    if len(words) == 1 and _is_store(places[words[0]]):
        return _snapshots(words[0], storage_options)
    steps = steps_of(words) if as_series else None
    names = _short_names(words)
    found = [
        Source(name, word, None, steps[i] if steps else None, storage_options)
        for i, (name, word) in enumerate(zip(names, words, strict=True))
    ]
    return sorted(found, key=lambda each: each.step) if steps else found  # type: ignore[arg-type, return-value]


def _expanded(word: str, options: Mapping[str, Any] | None) -> list[str]:
    """The paths that a pattern matches, or the path itself."""
    is_url = "://" in word
    if not glob.has_magic(word) or (not is_url and os.path.lexists(word)):
        return [word if is_url else str(Path(word))]
    found = _matching_urls(word, options) if is_url else sorted(glob.glob(word))
    if not found:
        raise FileNotFoundError(f"{word}: no file or folder matches this pattern; check the path")
    return found


def _matching_urls(pattern: str, options: Mapping[str, Any] | None) -> list[str]:
    """The URLs of files, and of folders that hold some, that match a pattern."""
    parts = pattern.split("/")
    n_plain = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    folder, wanted = "/".join(parts[:n_plain]), parts[n_plain:]
    place = open_place(folder, options)
    if isinstance(place, Path) or not place.is_dir():
        return []
    names = {path.parts[: len(wanted)] for path in place.files()}
    return sorted(
        "/".join([folder, *name])
        for name in names
        if len(name) == len(wanted) and all(map(fnmatchcase, name, wanted))
    )


def _is_store(place: Place) -> bool:
    return place.is_dir() and (place / STORE_FILE).exists()


def _snapshots(url: str, options: Mapping[str, Any] | None) -> list[Source]:
    with SnapshotStore(url, storage_options=options) as store:
        names = store.names()
    if not names:
        raise FileNotFoundError(f"{url}: this store has no snapshot yet; take one first")
    numbers = steps_of(names)
    if numbers is None or sorted(numbers) != numbers:
        numbers = list(range(len(names)))  # the order of taking
    return [
        Source(name, url, name, step, options) for name, step in zip(names, numbers, strict=True)
    ]


def _short_names(words: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [PurePosixPath(word).parts for word in words]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-n:]) for each in parts]
        if len(set(names)) == len(set(words)):
            break
    return [f"{name} ({i})" if names.index(name) != i else name for i, name in enumerate(names)]


@contextmanager
def opened(source: Source, threads: int = 1) -> Iterator[Opened]:
    """Opens a source until the block ends.

    Args:
        source: from `find_sources`.
        threads: how many threads decode one tensor.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is no model, such as a pickle or a folder without safetensors files; or two
            files of a folder have a tensor of the same name.
        CorruptionError, CompatibilityError: it is damaged, or too new.
        ChangedError: it was written to meanwhile.
        OSError: it cannot be read.
    """
    with ExitStack() as stack:
        if source.snapshot is not None:
            yield _open_snapshot(source, stack)
            return
        files = _open_files(source, stack)
        yield files[0]
        for file in files[1]:
            file.source.check()


class _Tensor(Protocol):
    entry: Entry

    def frame(self) -> Frame | None: ...
    def content_hash(self) -> bytes | None: ...
    def read(self, threads: int) -> ByteArray: ...
    def runs(self, runs: Runs, threads: int) -> list[ByteArray]: ...
    def blocks(self, threads: int) -> Iterator[ByteArray]: ...


def _block_runs(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, _BLOCK_NBYTES):
        yield start, min(start + _BLOCK_NBYTES, nbytes)


class _FileTensor:
    """A tensor of an open file."""

    def __init__(self, entry: Entry, file: ModelFile, number: int) -> None:
        self.entry = entry
        self._file = file
        self._header = file.original.entries[number]
        self._first = file.original.data_offset + self._header.start  # if the file is plain

    def frame(self) -> Frame | None:
        """Its frame, if the file is packed."""
        return self._file.outline(self._header)

    def content_hash(self) -> bytes | None:
        """The hash in its frame, if the file is packed."""
        frame = self.frame()
        return frame.content_hash if frame is not None else None

    def read(self, threads: int) -> ByteArray:
        """All bytes."""
        self._refuse_base(self.frame())
        return self._file.read(self._header, threads)

    def runs(self, runs: Runs, threads: int) -> list[ByteArray]:
        """Some bytes."""
        frame = self._file.outline(self._header, runs)
        if frame is None:
            source, first = self._file.source, self._first
            parts = [(source.sketch(first + a, b - a), first + a) for a, b in runs]
            source.fill(parts)
            return [data for data, _ in parts]
        self._refuse_base(frame)
        found = [np.empty(stop - start, np.uint8) for start, stop in runs]
        with blaming(f"{self._file.path}: tensor {self.entry.name!r}"):
            for (start, stop), memory in zip(runs, found, strict=True):
                frame.decompress_into(memory, start=start, stop=stop, threads=threads)
        return found

    def blocks(self, threads: int) -> Iterator[ByteArray]:
        """All bytes, a few at a time."""
        for start, stop in _block_runs(self.entry.nbytes):
            if self._file.is_packed:
                yield from self.runs([(start, stop)], threads)
            else:  # which reads ahead
                block = self._file.source.map(self._first + start, stop - start)
                yield np.frombuffer(block, np.uint8)

    def _refuse_base(self, frame: Frame | None) -> None:
        if frame is not None and frame.base_hash is not None:
            raise BaseMismatchError(
                f"{self._file.path}: tensor {self.entry.name!r} is packed against a base, which a "
                "report does not have; unpack the file, and report on the original"
            )


def _open_files(source: Source, stack: ExitStack) -> tuple[Opened, list[ModelFile]]:
    place = open_place(source.path, source.storage_options)
    if not place.exists():
        raise FileNotFoundError(f"{source.path}: no such file or folder; check the path")
    if _is_store(place):
        raise ValueError(
            f"{source.path}: a snapshot store makes a report of its own; name it alone"
        )
    paths = model_files(source.path, storage_options=source.storage_options)
    files = [ModelFile(stack.enter_context(open_source(path))) for path in paths]
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for number, found in enumerate(file.original.entries):
            if found.name in tensors:
                raise ValueError(
                    f"{file.path}: another file of {source.path} has the tensor {found.name!r}, "
                    "too; name the files of one model, each once"
                )
            entry = Entry(
                found.name, found.dtype, tuple(found.shape), found.nbytes,
                file.frame_nbytes(found.name),
            )  # fmt: skip
            tensors[found.name] = _FileTensor(entry, file, number)
    form = "folder" if place.is_dir() else "packed file" if files[0].is_packed else "plain file"
    is_packed = all(file.is_packed for file in files)
    row = SourceRow(
        source.name, source.path, form, source.step, len(tensors),
        sum(tensor.entry.nbytes for tensor in tensors.values()),
        sum(stamp_of(path).nbytes for path in paths) if is_packed else None,
    )  # fmt: skip
    return Opened(source, row, tensors), files


class _StoredTensor:
    """A tensor of a snapshot."""

    def __init__(self, entry: Entry, digest: bytes, decode: Callable[[int], ByteArray]) -> None:
        self.entry = entry
        self._digest = digest
        self._decode = decode

    def frame(self) -> None:
        """Frames of stores may be deltas, so that their planes say little of the tensor."""
        return

    def content_hash(self) -> bytes:
        """The hash in the manifest."""
        return self._digest

    def read(self, threads: int) -> ByteArray:
        """All bytes."""
        return self._decode(threads)

    def runs(self, runs: Runs, threads: int) -> list[ByteArray]:
        """Some bytes; copies, so that the rest of the tensor is let go."""
        data = self.read(threads)
        return [data[start:stop].copy() for start, stop in runs]

    def blocks(self, threads: int) -> Iterator[ByteArray]:
        """All bytes, which are decoded at once."""
        data = self.read(threads)
        return (data[start:stop] for start, stop in _block_runs(data.size))


def _open_snapshot(source: Source, stack: ExitStack) -> Opened:
    assert source.snapshot is not None
    storage = open_storage(source.path, source.storage_options)
    manifest = Catalog(storage).load(source.snapshot)
    frames = stack.enter_context(SnapshotFrames(storage))
    tensors: dict[str, _Tensor] = {}
    for ref in manifest.tensors:
        nbytes = math.prod(ref.shape) * DTYPE_BY_NAME[ref.dtype].bits // 8
        entry = Entry(ref.path, ref.dtype, ref.shape, nbytes, ref.frame.nbytes)

        def decode(threads: int, ref: Any = ref) -> ByteArray:
            with blaming(f"{source.path}: snapshot {source.snapshot!r}"):
                return frames.chain(ref.frame, ref.path).decode(threads, Scratch())

        tensors[ref.path] = _StoredTensor(entry, ref.frame.content.digest, decode)
    nbytes = sum(tensor.entry.nbytes for tensor in tensors.values())
    row = SourceRow(
        source.name, source.path, "snapshot", source.step, len(tensors), nbytes,
        sum(frame.nbytes for frame in manifest.frames()),
    )  # fmt: skip
    return Opened(source, row, tensors)
