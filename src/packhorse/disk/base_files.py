"""Bases for whole files: the tensors of another model, found by name (docs/format.md, section 8).

A base is a safetensors file, packed or not, a folder of them, or tensors in memory. Files are
opened and their headers checked; a tensor is mapped, or decoded if its file is packed, when its
turn comes, and dropped after it. Folders match folder by folder: for a model file in the subfolder
`vae` the tensors in `vae` of the base count, in whatever files they are there. Where several files
of a folder have a tensor of the name, packing takes the one in the file of the same name, else the
first that fits; unpacking takes the one with the content hash that the frame names.

Nothing is opened on the word of a packed file: what it calls its base is for messages alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from packhorse.codecs.content import content_hash
from packhorse.disk.folder_index import PLAIN_SUFFIX, plain_name
from packhorse.disk.model_file import ModelFile
from packhorse.disk.packed_frames import open_frame
from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.safetensors_header import TensorEntry
from packhorse.disk.source_file import SourceFile, open_source
from packhorse.errors import BaseMismatchError, ChangedError, CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.frame.base import allowed_casts
from packhorse.framework import framework_of
from packhorse.layout import CRITICAL_FLAGS_OFFSET, DTYPE_BY_NAME, FLAG_BASE
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
]


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of a base.

    Attributes:
        where: the file that it is in, for messages.
        file_name: the plain name of that file; empty for a tensor in memory.
        dtype: safetensors' name.
        shape: the dimensions.
        content_hash: where it is known without reading the tensor.
        is_based: whether it cannot be read, as it is packed against a base itself.
        read: the bytes, with so many threads.
        is_shared: whether others may write to the bytes while they are used.
        stamp: what moves when a file is written to; None if that cannot be told.
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
        """Whether a tensor of this dtype and shape may be packed against it."""
        casts = allowed_casts(DTYPE_BY_NAME[dtype])
        return DTYPE_BY_NAME[self.dtype] in casts and math.prod(self.shape) == math.prod(shape)

    def has_hash(self, wanted: bytes) -> bool:
        """Whether this is its content hash; it is read if need be."""
        found = self.content_hash or content_hash(np.frombuffer(self.read(1), np.uint8))
        return found == wanted


class Bases:
    """Tensors of a base, by name.

    Attributes:
        label: what messages call it.
        name: what files that are packed against it record; None if there is nothing to record.
        is_empty: whether it is a folder without any model file.
    """

    def __init__(
        self,
        label: str,
        name: str | None,
        find: Callable[[str], Sequence[BaseTensor]],
        sources: Sequence[SourceFile] = (),
        *,
        is_empty: bool = False,
    ) -> None:
        self.label = label
        self.name = name
        self.is_empty = is_empty
        self._find = find
        self._sources = sources

    def for_packing(
        self, entries: Sequence[TensorEntry], source: Path | None, file_name: str = ""
    ) -> dict[str, BaseTensor]:
        """What the tensors of a file are packed against; those that are left out have nothing.

        Args:
            entries: the tensors.
            source: their file, if there is one; it is no base of itself.
            file_name: the plain name of it, or of the file to be.

        Raises:
            ValueError: the base is the source itself.
            BaseMismatchError: a tensor that would do is packed against a base itself.
            CorruptionError, CompatibilityError: its frame is bad.
        """
        files = [base.path for base in self._sources]
        own = {str(file) for file in files if source is not None and file.samefile(source)}
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
        """The base of a frame, as far as can be told without reading it.

        Raises:
            BaseMismatchError: it is not here; the message begins with what is.
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
                f"the one in {base.where} has {(base.content_hash or b'').hex()}"
            )
        usable = [base for base in fitting if not base.is_based]
        if not usable:
            raise BaseMismatchError(f"the one in {fitting[0].where} {_IS_BASED}")
        if len(usable) == 1:
            return usable[0]
        return next((base for base in usable if base.has_hash(wanted)), usable[0])

    def refuse_output(self, output: Path) -> None:
        """Refuse to write over the base: what is packed against it would be lost.

        Raises:
            ValueError: the output is one of its files.
        """
        if output.exists() and any(output.samefile(base.path) for base in self._sources):
            raise ValueError(f"{output}: the output is the base itself; name another output")

    def check_unchanged(self) -> None:
        """See that what is packed against the base can be unpacked with its files.

        Raises:
            OSError: one of them was changed, replaced or removed since it was opened.
        """
        for base in self._sources:
            base.check()


_IS_BASED = "is packed against a base itself; unpack that file first, and take the result"

# What callers may give as a base: a file or folder, tensors by name, or what is open already.
BaseLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Bases


def _is_for(base: BaseTensor, entry: TensorEntry) -> bool:
    return entry.nbytes > 0 and base.suits(entry.dtype, entry.shape)


class Loan(NamedTuple):
    """The base of a frame, for `Frame.decompress_into`.

    Attributes:
        data: its bytes; None if the frame needs none.
        content_hash: where it has been compared already.
        is_shared: whether others may write to them meanwhile. Then what was decoded is right only
            if its content hash is.
    """

    data: Buffer | None = None
    content_hash: bytes | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Lender:
    """Gives the frames of one packed file their bases.

    Attributes:
        bases: where they are; None if the caller gave none.
        recorded: what the file calls its base, if it says so.
    """

    bases: Bases | None
    recorded: str | None
    # The base that was kept last, with its stamp.
    _kept: dict[str, tuple[Buffer, object]] = field(default_factory=dict)

    def find(self, name: str, frame: Frame) -> BaseTensor | None:
        """The base of a frame; None if it needs none.

        Raises:
            BaseMismatchError: it is not there, or another is, as far as that shows unread.
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
        """The base of a frame for the time of the block, which decodes with it.

        Args:
            name: of the tensor.
            frame: of that tensor.
            threads: how many to use.
            keep: it will be asked for again: hold a copy, in the place of that held before. Its
                hash holds whatever becomes of the file, whose times do not tell everything.

        Raises:
            BaseMismatchError: as `find`; one that the block raises gets the base's file.
            CorruptionError, CompatibilityError: the base's own frame is bad.
            ChangedError: in place of a CorruptionError of the block, where the frame is good and
                somebody has written to the base after it was compared.
        """
        base = self.find(name, frame)
        if base is None:
            yield Loan()
            return
        stamp = base.stamp()  # before the bytes are read, so that no change falls in between
        data, known = self._kept.get(name, (None, None))
        if data is not None and stamp == known:
            yield Loan(data, frame.base_hash)
            return
        data, is_shared = base.read(threads), base.is_shared
        if keep and is_shared:
            data, is_shared = np.frombuffer(data, np.uint8).copy(), False
        try:
            yield Loan(data, is_shared=is_shared)
            if keep and stamp is not None:  # the block has compared the hash, or would have failed
                self._kept.clear()
                self._kept[name] = data, stamp
        except BaseMismatchError as error:
            called = f"; the right one was called {shown(self.recorded)}" if self.recorded else ""
            raise BaseMismatchError(f"{error}, and is in {base.where}{called}") from None
        except CorruptionError:
            if is_shared and not _is_damaged(frame, base, threads):
                raise ChangedError(
                    f"{base.where}: tensor {shown(name)} changed while it was being read as a "
                    "base, so nothing was written; try again when nobody writes to it"
                ) from None
            raise

    def missing(self, name: str, frame: Frame, n_more: int = 0) -> BaseMismatchError:
        """The error for a caller who gave no base.

        Args:
            name: of the first tensor that needs one.
            frame: of that tensor.
            n_more: how many tensors need one beside it.
        """
        others = f" ({n_more} more tensors need theirs)" if n_more else ""
        return BaseMismatchError(
            f"{self._needed(name, frame)}{others}, and none was given; name the file or folder "
            "that it was packed against: --base PATH, in Python base="
        )

    def _needed(self, name: str, frame: Frame) -> str:
        called = f", of {shown(self.recorded)}" if self.recorded else ""
        return (
            f"tensor {shown(name)}: a base of {frame.base_dtype} with content hash "
            f"{(frame.base_hash or b'').hex()}{called}, is needed"
        )


def _is_damaged(frame: Frame, base: BaseTensor, threads: int) -> bool:
    """Whether a frame that could not be decoded is bad itself: its base, now in a copy that nobody
    writes to, is the right one and does not help."""
    try:
        copy = np.frombuffer(base.read(threads), np.uint8).copy()
    except CorruptionError:  # cut short meanwhile
        return False
    if content_hash(copy, threads=threads) != frame.base_hash:
        return False
    try:
        frame.verify(threads=threads, base=copy)
    except CorruptionError:
        return True
    return False


def based_frames(source: SourceFile, packed: PackedHeader) -> Iterator[tuple[str, Frame]]:
    """The frames of a packed file that say they have a base, by name, their headers checked.

    Raises:
        CorruptionError, CompatibilityError: one of them is bad. Others are not looked at.
    """
    for entry in packed.original.entries:
        offset, nbytes = packed.frame_offset(entry.name), packed.frames[entry.name].nbytes
        flags = source.read(offset + CRITICAL_FLAGS_OFFSET, 1)
        if flags and flags[0] & FLAG_BASE:
            with blaming(str(source.path)):
                frame = open_frame(source.map(offset, nbytes), packed, entry)
            yield entry.name, frame


@contextmanager
def open_bases(base: BaseLike | None) -> Iterator[Bases | None]:
    """Open a base for the time of the block; what is open already stays open.

    Args:
        base: a file or a folder, whose subfolders do not count; tensors by name; or None.

    Raises:
        ValueError: a folder without safetensors files.
        TypeError: not a path, nor tensors by name.
        CorruptionError, CompatibilityError: a file is not what it should be.
        OSError: it cannot be read.
    """
    if isinstance(base, Bases):
        yield base
        return
    with open_parts(base) as part:
        bases = part(Path())
        if bases is not None and bases.is_empty:
            raise ValueError(
                f"{bases.label}: no {PLAIN_SUFFIX} file in this folder, and the base must have one"
            )
        yield bases


@contextmanager
def open_parts(base: BaseLike | None) -> Iterator[Callable[[Path], Bases | None]]:
    """`open_bases` for a folder whose subfolders count.

    Yields:
        What gives the base of the files in a subfolder, by its path relative to the folder; None
        if there is no base. One that is no folder is that of all.
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
    path = Path(base)
    name = (path if path.name not in ("", "..") else path.resolve()).name
    hint = name.encode(errors="replace").decode()
    with ExitStack() as stack:
        if not path.is_dir():
            alone = _open_files([path], hint, str(path), stack)
            yield lambda relative: alone
            return
        parts: dict[Path, Bases] = {}

        def part(relative: Path) -> Bases:
            if relative not in parts:
                folder = path / relative
                parts[relative] = _open_files(_files_in(folder), hint, str(folder), stack)
            return parts[relative]

        yield part


def _files_in(folder: Path) -> list[Path]:
    """The safetensors files directly in a folder: plain ones first, which are cheaper to read."""
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if path.name.endswith(PLAIN_SUFFIX)]
    return sorted(
        (path for path in files if not path.is_dir()),
        key=lambda path: (plain_name(path.name) != path.name, path.name),
    )


def _open_files(paths: Sequence[Path], hint: str, label: str, stack: ExitStack) -> Bases:
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
    """A tensor of a file; of a packed one the frame's header is checked."""
    frame = file.frame(entry)
    return BaseTensor(
        str(file.path), plain_name(file.path.name), entry.dtype, entry.shape,
        frame.content_hash if frame else None, frame is not None and frame.base_hash is not None,
        lambda threads: file.read(entry, threads), not file.is_packed, file.source.now,
    )  # fmt: skip
