"""Bases for whole files: the tensors of another model, found by name (docs/format.md, section 8).

A base is a safetensors file, packed or not, a folder of such files, or tensors in memory. Files are
opened and their headers checked immediately. Each tensor is mapped, or decoded if its file is
packed, only when it is needed, and released afterwards.

Folders match by subfolder: a model file in the subfolder `vae` is packed against the tensors
in `vae` of the base, whatever files they are in. If several files of a folder have a tensor of
that name, packing takes the tensor from the file of the same name, otherwise the first tensor that
fits. Unpacking takes the tensor with the content hash that the frame names.

A packed file records the name of its base, but that name is only used in messages; no file is
opened because of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from packhorse.codecs.content import content_hash
from packhorse.disk.folder_index import PLAIN_SUFFIX, plain_name
from packhorse.disk.model_file import ModelFile
from packhorse.disk.packed_frames import based_entries, open_frame, sketch_frames
from packhorse.disk.packed_header import PackedHeader
from packhorse.errors import BaseMismatchError, ChangedError, CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.frame.base import allowed_casts
from packhorse.framework import framework_of
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.locations import Place, is_same_file, open_place
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source
from packhorse.storage.strict_json import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BaseLike",
    "BaseTensor",
    "Bases",
    "Lender",
    "Loan",
    "based_frames",
    "open_bases",
    "open_parts",
    "place_base",
]


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of a base.

    Attributes:
        where: the path of its file, for messages.
        file_name: the name that its file has when unpacked; empty for a tensor in memory.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
        content_hash: the content hash if it is known without reading the tensor, otherwise None.
        is_based: whether it cannot be read, because it is itself packed against a base.
        read: takes a number of threads and returns the bytes.
        is_shared: whether others may write to the bytes while they are used.
        stamp: returns a value that changes when the file is written to; None if there is none.
    """

    where: str
    file_name: str
    dtype: str
    shape: tuple[int, ...]
    content_hash: bytes | None
    is_based: bool
    read: Callable[[int], Buffer]
    is_shared: bool
    stamp: Callable[[], object]

    def suits(self, dtype: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of this dtype and shape can be packed against this one."""
        casts = allowed_casts(DTYPE_BY_NAME[dtype])
        return DTYPE_BY_NAME[self.dtype] in casts and math.prod(self.shape) == math.prod(shape)

    def has_hash(self, wanted: bytes) -> bool:
        """Whether the tensor has this content hash; the tensor is read if its hash is not known."""
        found = self.content_hash or content_hash(np.frombuffer(self.read(1), np.uint8))
        return found == wanted


class Bases:
    """The tensors of a base, by name.

    Attributes:
        label: the name of the base in messages.
        name: the name that packed files record for it; None to record none.
        is_empty: whether it is a folder without model files.
    """

    def __init__(
        self,
        label: str,
        name: str | None,
        find: Callable[[str], Sequence[BaseTensor]],
        sources: Sequence[Source] = (),
        *,
        is_empty: bool = False,
    ) -> None:
        self.label = label
        self.name = name
        self.is_empty = is_empty
        self._find = find
        self._sources = sources

    def for_packing(
        self, entries: Sequence[TensorEntry], source: Place | None, file_name: str = ""
    ) -> dict[str, BaseTensor]:
        """The bases of a file's tensors, by name. A tensor without a base is left out.

        Args:
            entries: the tensors.
            source: their file, if there is one; a file is never its own base.
            file_name: the name of the file as a plain file, or of the file that will be written.

        Raises:
            ValueError: the base is the source itself.
            BaseMismatchError: a fitting tensor is itself packed against a base.
            CorruptionError, CompatibilityError: the frame of a tensor of the base is bad.
        """
        files = [base.path for base in self._sources]
        own = {str(file) for file in files if source is not None and is_same_file(file, source)}
        if own and len(own) == len(files):
            raise ValueError(f"{source}: the base is the file itself; name the older model")
        chosen = {}
        for entry in entries:
            suiting = [base for base in self._find(entry.name) if _is_for(base, entry)]
            suiting = [base for base in suiting if base.where not in own]
            if suiting:
                chosen[entry.name] = min(
                    suiting,
                    key=lambda base: (
                        base.is_based, base.file_name != file_name, base.dtype != entry.dtype
                    ),
                )  # fmt: skip
        for name, base in chosen.items():
            if base.is_based:
                raise BaseMismatchError(f"{base.where}: tensor {shown(name)} {_IS_BASED}")
        return chosen

    def for_frame(self, name: str, frame: Frame) -> BaseTensor:
        """The base of a frame, or the likely one if only reading the tensor could tell.

        Raises:
            BaseMismatchError: the base is not here; the message says what is here instead.
        """
        named = self._find(name)
        if not named:
            raise BaseMismatchError(f"{self.label} has no tensor of that name")
        base = named[0]
        fitting = [
            base
            for base in named
            if base.dtype == frame.base_dtype and base.suits(frame.dtype, frame.shape)
        ]
        if not fitting:
            raise BaseMismatchError(
                f"the one in {base.where} is {base.dtype} of shape {list(base.shape)}"
            )
        base, wanted = fitting[0], frame.base_hash or b""
        fitting = [base for base in fitting if base.content_hash in (None, wanted)]
        if not fitting:
            raise BaseMismatchError(
                f"the one in {base.where} has content hash {(base.content_hash or b'').hex()}"
            )
        usable = [base for base in fitting if not base.is_based]
        if not usable:
            raise BaseMismatchError(f"the one in {fitting[0].where} {_IS_BASED}")
        if len(usable) == 1:
            return usable[0]
        return next((base for base in usable if base.has_hash(wanted)), usable[0])

    def refuse_output(self, output: Place) -> None:
        """Refuse to overwrite the base, without which the output could not be unpacked.

        Raises:
            ValueError: the output is one of its files.
        """
        files = [base.path for base in self._sources]
        is_there = any(type(file) is type(output) for file in files) and output.exists()
        if is_there and any(is_same_file(output, file) for file in files):
            raise ValueError(f"{output}: the output is the base itself; name another output")

    def check_unchanged(self) -> None:
        """Check that the files of the base are still those that were read.

        Raises:
            OSError: one of them was changed, replaced or removed since it was opened.
        """
        for base in self._sources:
            base.check()


_IS_BASED = "is itself packed against a base; unpack that file first, and use the result as base"

# A base as callers give it: a file or folder, tensors by name, or a base that is already open.
BaseLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Bases


def _is_for(base: BaseTensor, entry: TensorEntry) -> bool:
    return entry.nbytes > 0 and base.suits(entry.dtype, entry.shape)


class Loan(NamedTuple):
    """The base of a frame, for `Frame.decompress_into`.

    Attributes:
        data: the bytes of the base; None if the frame needs no base.
        content_hash: the base's content hash if it has been checked already, otherwise None.
        is_shared: whether others may write to the bytes while they are used. Then the decoded
            tensor can be trusted only if its content hash is right.
    """

    data: Buffer | None = None
    content_hash: bytes | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Lender:
    """Provides the bases for the frames of one packed file.

    Attributes:
        bases: the tensors of the base; None if the caller gave no base.
        recorded: the name that the file records for its base, if it records one.
    """

    bases: Bases | None
    recorded: str | None
    # At most one tensor's base, by the tensor's name, and its stamp.
    _kept: dict[str, tuple[Buffer, object]] = field(default_factory=dict)

    def find(self, name: str, frame: Frame) -> BaseTensor | None:
        """The base of a frame; None if the frame needs no base.

        Raises:
            BaseMismatchError: the base is missing, or is known to be the wrong one without being
                read.
        """
        if frame.base_hash is None:
            return None
        if self.bases is None:
            raise self.missing(name, frame)
        try:
            return self.bases.for_frame(name, frame)
        except BaseMismatchError as error:
            raise BaseMismatchError(f"{self._needed(name, frame)}; {error}") from None

    @contextmanager
    def lend(self, name: str, frame: Frame, threads: int, *, keep: bool = False) -> Iterator[Loan]:
        """Lends the base of a frame to a block, which decodes the frame with it.

        Args:
            name: the tensor's name.
            frame: the tensor's frame.
            threads: the number of threads.
            keep: whether to keep a copy of the base for the next call, instead of the copy kept
                before. The copy stays correct even if the file changes but its times do not.

        Raises:
            BaseMismatchError: as for `find`; the block's own error gets the name of the base's
                file.
            CorruptionError, CompatibilityError: the base's own frame is bad.
            ChangedError: the block raised CorruptionError, but the frame is good: the base was
                written to after its hash was checked.
        """
        base = self.find(name, frame)
        if base is None:
            yield Loan()
            return
        stamp = base.stamp()  # before the bytes are read, so that no change is missed
        data, known = self._kept.get(name, (None, None))
        if data is not None and stamp == known:
            yield Loan(data, frame.base_hash)
            return
        data, is_shared = base.read(threads), base.is_shared
        if keep and is_shared:
            data, is_shared = np.frombuffer(data, np.uint8).copy(), False
        try:
            yield Loan(data, is_shared=is_shared)
            if keep and stamp is not None:  # the block did not fail, so it has checked the hash
                self._kept.clear()
                self._kept[name] = data, stamp
        except BaseMismatchError as error:
            called = f"; the right one was called {shown(self.recorded)}" if self.recorded else ""
            raise BaseMismatchError(f"{error}, and is in {base.where}{called}") from None
        except CorruptionError:
            if is_shared and not _is_damaged(frame, base, threads):
                raise ChangedError(
                    f"{base.where}: tensor {shown(name)} changed while it was being read as a "
                    "base, so nothing was written; try again when nothing writes to it"
                ) from None
            raise

    def missing(self, name: str, frame: Frame, n_more: int = 0) -> BaseMismatchError:
        """The error for a caller who gave no base.

        Args:
            name: the first tensor that needs a base.
            frame: the frame of that tensor.
            n_more: how many other tensors need a base.
        """
        others = f" ({n_more} more tensors need theirs)" if n_more else ""
        return BaseMismatchError(
            f"{self._needed(name, frame)}{others}, but none was given; name the file or folder "
            "that it was packed against: --base PATH, in Python base="
        )

    def _needed(self, name: str, frame: Frame) -> str:
        called = f", called {shown(self.recorded)}" if self.recorded else ""
        return (
            f"tensor {shown(name)}: a base of {frame.base_dtype} with content hash "
            f"{(frame.base_hash or b'').hex()}{called}, is needed"
        )


def _is_damaged(frame: Frame, base: BaseTensor, threads: int) -> bool:
    """Whether a frame that could not be decoded is itself bad. It is if it fails again with a copy
    of its base that has the right content hash."""
    try:
        copy = np.frombuffer(base.read(threads), np.uint8).copy()
    except CorruptionError:  # the base has been cut short in the meantime
        return False
    if frame.digest_of(copy, threads) != frame.base_hash:
        return False
    try:
        frame.verify(threads=threads, base=copy)
    except CorruptionError:
        return True
    return False


def based_frames(source: Source, packed: PackedHeader) -> Iterator[tuple[str, Frame]]:
    """The outlines of the frames that need a base, with their names; their headers are checked.

    Raises:
        CorruptionError, CompatibilityError: one of these headers is bad. Other frames are not
            opened.
    """
    entries = based_entries(source, packed)
    for entry, data in zip(entries, sketch_frames(source, packed, entries), strict=True):
        with blaming(str(source.path)):
            frame = open_frame(data, packed, entry)
        yield entry.name, frame


def place_base(base: BaseLike | None, storage_options: Mapping[str, Any] | None) -> BaseLike | None:
    """A base with its path or URL opened, if it is one; any other base as it is."""
    if base is None:  # what most callers give
        return None
    return open_place(base, storage_options) if isinstance(base, str | os.PathLike) else base


@contextmanager
def open_bases(base: BaseLike | None) -> Iterator[Bases | None]:
    """Opens a base for the time of the block; a base that is already open stays open after it.

    Args:
        base: a file; a folder, whose subfolders are ignored; tensors by name; or None.

    Raises:
        ValueError: the folder has no safetensors file.
        TypeError: the base is neither a path nor tensors by name.
        CorruptionError, CompatibilityError: a file is bad or too new.
        OSError: a file cannot be read.
    """
    if isinstance(base, Bases):
        yield base
        return
    with open_parts(base) as part:
        bases = part(Path())
        if bases is not None and bases.is_empty:
            raise ValueError(
                f"{bases.label}: this folder has no {PLAIN_SUFFIX} file, so it cannot be the base"
            )
        yield bases


@contextmanager
def open_parts(base: BaseLike | None) -> Iterator[Callable[[PurePath], Bases | None]]:
    """`open_bases` for a model folder, whose subfolders are matched with those of the base.

    Yields:
        A function that takes a subfolder's path, relative to the model folder, and returns the base
        of the files in it; None if there is no base. A base that is not a folder is the base of
        all files.
    """
    if base is None or isinstance(base, Bases):
        yield lambda relative: base
        return
    if isinstance(base, Mapping):
        tensors = Bases("the base given", None, lambda name: _in_memory(base, name))
        yield lambda relative: tensors
        return
    if not isinstance(base, str | os.PathLike):
        raise TypeError(f"a base is a path or tensors by name, not {type(base).__name__}")
    path = open_place(base)
    name = (path if path.name not in ("", "..") else Path(path).resolve()).name
    hint = name.encode(errors="replace").decode()
    with ExitStack() as stack:
        if not path.is_dir():
            alone = _open_files([path], hint, str(path), stack)
            yield lambda relative: alone
            return
        parts: dict[PurePath, Bases] = {}

        def part(relative: PurePath) -> Bases:
            if relative not in parts:
                folder = path / relative
                parts[relative] = _open_files(_files_in(folder), hint, str(folder), stack)
            return parts[relative]

        yield part


def _files_in(folder: Place) -> list[Place]:
    """The safetensors files directly in a folder; plain files first, as they are faster to read."""
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if path.name.endswith(PLAIN_SUFFIX)]
    return sorted(
        (path for path in files if not path.is_dir()),
        key=lambda path: (plain_name(path.name) != path.name, path.name),
    )


def _open_files(paths: Sequence[Place], hint: str, label: str, stack: ExitStack) -> Bases:
    files = [ModelFile(stack.enter_context(open_source(path))) for path in paths]
    places: dict[str, list[tuple[ModelFile, TensorEntry]]] = {}
    for file in files:
        for entry in file.original.entries:
            places.setdefault(entry.name, []).append((file, entry))

    def find(name: str) -> list[BaseTensor]:
        return [_in_file(file, entry) for file, entry in places.get(name, [])]

    sources = [file.source for file in files]
    return Bases(label, hint, find, sources, is_empty=not paths)


def _in_memory(tensors: Mapping[str, Any], name: str) -> list[BaseTensor]:
    if name not in tensors:
        return []
    tensor = tensors[name]
    framework = framework_of(tensor)
    if framework is None:
        raise TypeError(f"the base of {name!r} must be a tensor, not {type(tensor).__name__}")
    dtype, shape = framework.describe(tensor)
    return [
        BaseTensor(
            "the base given", "", dtype, shape, None, False,
            lambda threads: framework.readable(tensor)[0], True, lambda: None,
        )
    ]  # fmt: skip


def _in_file(file: ModelFile, entry: TensorEntry) -> BaseTensor:
    """A tensor of a file; if the file is packed, the header of the tensor's frame is checked."""
    content, is_based = file.content_of(entry)
    return BaseTensor(
        str(file.path), plain_name(file.path.name), entry.dtype, entry.shape,
        content, is_based,
        lambda threads: file.read(entry, threads),
        not (file.is_packed or file.source.is_private), file.source.now,
    )  # fmt: skip
