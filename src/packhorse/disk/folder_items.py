"""Lists what is in a model folder, and what packing or unpacking makes of each file.

All names, headers and indexes are checked here, before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath

from packhorse.disk.container import PICKLE_SUFFIXES, logical_nbytes, pickle_advice
from packhorse.disk.folder_index import INDEX_SUFFIX, PLAIN_SUFFIX, packed_name, plain_name
from packhorse.disk.index_file import original_index, packed_index
from packhorse.disk.packed_header import is_packed
from packhorse.disk.walk import walk
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.layout import FILE_SUFFIX
from packhorse.storage.foreign import FOREIGN_SUFFIXES
from packhorse.storage.locations import Place
from packhorse.storage.source import header_at
from packhorse.storage.source_file import AnyStamp, Stamp, difference, stamp_of

__all__ = [
    "RECORD_NAME",
    "Item",
    "Kind",
    "check_items",
    "files_in",
    "items_by_name",
    "items_to_pack",
    "items_to_unpack",
    "logical_nbytes_of",
    "models",
    "packed_in",
    "refuse_unfinished",
    "unchanged",
]

# In a folder at a URL, as long as it is not complete: what has been written so far.
RECORD_NAME = ".packhorse-unfinished.json"


class Kind(Enum):
    """What happens with a file or folder of the source."""

    MODEL = "a safetensors file, which is packed or unpacked"
    INDEX = "an index, which is rewritten"
    OTHER = "any other file, which is copied"
    FOLDER = "a folder, which is created"
    LINK = "a link to a folder elsewhere in the tree, which is created too"


@dataclass(frozen=True, slots=True)
class Item:
    """A file, folder or link of the source folder, and its output.

    Attributes:
        source: its place.
        relative: its path in the source folder.
        output: the path of its output in the output folder.
        kind: what it is.
        stamp: the stamp of the source before it was read; None for a folder.
        nbytes: the bytes that it adds to progress: the size of all tensors of a model file, or the
            size of any other file.
        text: the new text of an index, or the target of a link.
    """

    source: Place
    relative: PurePath
    output: PurePath
    kind: Kind
    stamp: AnyStamp | None = None
    nbytes: int = 0
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file or folder; `stamp` is None for a folder."""

    place: Place
    relative: PurePath
    stamp: AnyStamp | None

    @property
    def name(self) -> str:
        return self.relative.name


def _walk(source: Place, links: dict[Path, Path] | None = None) -> Iterator[_Found]:
    """Everything in a folder. Links that are not followed are added to `links`, as for `walk`."""
    if not isinstance(source, Path):
        for relative, stamp in source.files().items():
            yield _Found(source / relative, relative, stamp)
        return
    for path in walk(source, links):
        is_folder = path.is_dir()
        yield _Found(path, path.relative_to(source), None if is_folder else Stamp.of(path.stat()))


def files_in(source: Place) -> list[tuple[Place, PurePath, int]]:
    """All files in a folder and its subfolders: place, path in the folder, and size."""
    return [
        (found.place, found.relative, found.stamp.nbytes)
        for found in _walk(source)
        if found.stamp is not None
    ]


def packed_in(source: Place) -> list[Place]:
    """The packed files in a folder and its subfolders.

    Raises:
        ValueError: there is none.
        CorruptionError: the folder is not complete.
    """
    files = files_in(source)
    refuse_unfinished(source, (path for _, path, _ in files))
    packed = [place for place, path, _ in files if path.name.endswith(FILE_SUFFIX)]
    _require(packed, source, FILE_SUFFIX, (path for _, path, _ in files))
    return packed


def refuse_unfinished(source: Place, paths: Iterable[PurePath]) -> None:
    """Refuse a folder that an interrupted run has left.

    Raises:
        CorruptionError: it is such a folder.
    """
    if PurePosixPath(RECORD_NAME) in {PurePosixPath(path) for path in paths}:
        raise CorruptionError(
            f"{source}: this folder is not complete: the command that was writing it was "
            "interrupted; run the same command again, which goes on with what is missing"
        )


def logical_nbytes_of(source: Place) -> int:
    """The size of all tensors of model files, plus the size of all other files. A model file with a
    bad header counts as 0."""
    total = 0
    for place, path, nbytes in files_in(source):
        if path.name.endswith(PLAIN_SUFFIX):
            with suppress(PackhorseError, ValueError):
                total += logical_nbytes(place)
        else:
            total += nbytes
    return total


def items_to_pack(source: Place) -> list[Item]:
    """What packing a folder does.

    Raises:
        ValueError: the folder has no safetensors file, or has packed ones.
        CorruptionError, CompatibilityError: a model file or an index is bad.
        OSError: a file cannot be read.
    """
    items = _items(source, _item_to_pack)
    pickles = [item.source for item in items if item.relative.suffix.lower() in PICKLE_SUFFIXES]
    if pickles and not models(items):
        raise ValueError(pickle_advice(pickles[0]))
    _require(models(items), source, PLAIN_SUFFIX, (item.relative for item in items))
    return items


def items_to_unpack(source: Place) -> list[Item]:
    """What unpacking a folder does.

    Raises:
        ValueError: the folder has no packed file, or two files would have the same output.
        CorruptionError, CompatibilityError: a packed file or an index is bad.
        OSError: a file cannot be read.
    """
    items = _items(source, _item_to_unpack)
    _require(models(items), source, FILE_SUFFIX, (item.relative for item in items))
    taken: dict[PurePath, Place] = {}
    for item in items:
        other = taken.setdefault(item.output, item.source)
        if other is not item.source:
            raise ValueError(f"{other} and {item.source} would both unpack to {item.output}")
    return items


def items_by_name(source: Place, verb: str) -> list[Item]:
    """What packing or unpacking a folder does, judging by names alone: no file is opened, and
    `nbytes` are the sizes of files.

    Args:
        source: the folder.
        verb: "pack", or any other verb for a packed folder.

    Raises:
        ValueError: the folder has no model file, or has packed ones that are to be packed.
        CorruptionError: an interrupted run has left the folder.
        OSError: the folder cannot be read.
    """
    is_packing = verb == "pack"
    suffix = PLAIN_SUFFIX if is_packing else FILE_SUFFIX

    def make(found: _Found, stamp: AnyStamp) -> Item:
        kind, output = Kind.OTHER, found.relative
        if found.name.endswith(INDEX_SUFFIX):
            kind = Kind.INDEX
        elif is_packing and found.name.endswith(FILE_SUFFIX):
            raise ValueError(_packed_already(found.place))
        elif found.name.endswith(suffix):
            rename = packed_name if is_packing else plain_name
            kind, output = Kind.MODEL, found.relative.with_name(rename(found.name))
        return Item(found.place, found.relative, output, kind, stamp, stamp.nbytes)

    items = _items(source, make)
    _require(models(items), source, suffix, (item.relative for item in items))
    return items


def _packed_already(path: Place) -> str:
    return f"{path}: already packed, judging by its name; unpack the folder, or rename the file"


def models(items: Sequence[Item]) -> list[Item]:
    """The model files among items."""
    return [item for item in items if item.kind is Kind.MODEL]


def _items(source: Place, make: Callable[[_Found, AnyStamp], Item]) -> list[Item]:
    links: dict[Path, Path] = {}
    found = list(_walk(source, links))
    refuse_unfinished(source, (each.relative for each in found))
    items = [
        Item(each.place, each.relative, each.relative, Kind.FOLDER)
        if each.stamp is None
        else make(each, each.stamp)
        for each in found
    ]
    return items + [
        Item(path, path.relative_to(source), path.relative_to(source), Kind.LINK,
             text=os.fsencode(os.path.relpath(place, path.parent)))
        for path, place in links.items()
    ]  # fmt: skip


def _item_to_pack(found: _Found, stamp: AnyStamp) -> Item:
    path, relative = found.place, found.relative
    if found.name.endswith(FILE_SUFFIX):
        raise ValueError(_packed_already(path))
    if found.name.endswith(INDEX_SUFFIX):
        text = packed_index(path)
        return Item(path, relative, relative, Kind.INDEX, stamp, stamp.nbytes, text)
    if not found.name.endswith(PLAIN_SUFFIX):
        return Item(path, relative, relative, Kind.OTHER, stamp, stamp.nbytes)
    header = header_at(path)
    if is_packed(header):
        raise ValueError(f"{path}: already packed; unpack it first")
    output = relative.with_name(packed_name(found.name))
    return Item(path, relative, output, Kind.MODEL, stamp, header.data_nbytes)


def _item_to_unpack(found: _Found, stamp: AnyStamp) -> Item:
    path, relative = found.place, found.relative
    if found.name.endswith(FILE_SUFFIX):
        output = relative.with_name(plain_name(found.name))
        return Item(path, relative, output, Kind.MODEL, stamp, logical_nbytes(path))
    if found.name.endswith(INDEX_SUFFIX):
        original = original_index(path)
        if original is not None:
            return Item(path, relative, relative, Kind.INDEX, stamp, stamp.nbytes, original)
    return Item(path, relative, relative, Kind.OTHER, stamp, stamp.nbytes)


def _require(models: Sized, source: Place, suffix: str, paths: Iterable[PurePath]) -> None:
    if models:
        return
    found = {path.suffix.lower() for path in paths}
    kinds = sorted({FOREIGN_SUFFIXES[name] for name in found & FOREIGN_SUFFIXES.keys()})
    remedy = "name a model folder"
    if suffix != PLAIN_SUFFIX and PLAIN_SUFFIX in found:
        remedy = f"its *{PLAIN_SUFFIX} files are not packed, so pack it first"
    elif kinds:
        remedy = f"it has files of {', '.join(kinds)}, but Packhorse packs safetensors"
    raise ValueError(f"{source}: there is no *{suffix} file in it or its subfolders; {remedy}")


@contextmanager
def unchanged(source: Place, items: Sequence[Item], result: str) -> Iterator[None]:
    """Check that no file of a folder is changed, added or removed while the block runs. If the
    block fails because of such a change, the error says so.

    Args:
        source: the folder.
        items: what was in it before.
        result: what became of the output, for the message.

    Raises:
        OSError: a file was changed, added or removed.
    """
    try:
        yield
    except (PackhorseError, ValueError, FileNotFoundError):
        check_items(source, items, result)
        raise
    check_items(source, items, result)


def check_items(source: Place, items: Sequence[Item], result: str) -> None:
    """Compare a folder with what was in it before; arguments and errors as for `unchanged`."""
    listed = {} if isinstance(source, Path) else {each.place: each.stamp for each in _walk(source)}
    for item in items:
        if item.stamp is None:
            continue
        try:
            now = stamp_of(item.source) if isinstance(item.source, Path) else listed[item.source]
        except (FileNotFoundError, NotADirectoryError, KeyError):
            now = None
        fault = "it was moved or removed" if now is None else difference(item.stamp, now)
        if fault:
            raise _changed(item.source, f"changed while it was being read ({fault})", result)
    links: dict[Path, Path] = {}
    found = listed.keys() or {each.place for each in _walk(source, links)}
    for place in (found | links.keys()) ^ {item.source for item in items}:
        raise _changed(place, f"added or removed while {source} was being read", result)


def _changed(place: Place, what: str, result: str) -> OSError:
    return OSError(
        f"{place}: {what}, so {result}; try again when nothing writes to it, or use a copy"
    )
