"""Model folders as Hugging Face lays them out: shards, an index of them, and other files.

Each `X.safetensors` becomes `X.ph.safetensors`. Each `*.safetensors.index.json` is rewritten to
name the packed shards, and records its own original text. All other files are copied. Subfolders
are treated in the same way. Links are followed, because a download cache consists of links: the
output has files instead. A link to a folder that is also elsewhere in the tree becomes a link in
the output, so that each folder is packed once (`walk.py`). Unpacking restores the original folder
byte for byte.

A base can be such a folder too: the tensors in a subfolder are packed against those in the
subfolder of the same name, whatever shards they are in.

All names, headers and indexes are checked before anything is written. The output is built under a
temporary name beside its destination and renamed at the end, so the folder is complete or absent.
If the work is interrupted, nothing is left, and the next run starts from the beginning.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.base_files import BaseLike, Bases, open_parts
from packhorse.disk.container import (
    PICKLE_SUFFIXES,
    check_bases,
    logical_nbytes,
    pack_file,
    pickle_advice,
    plan_file,
    unpack_file,
)
from packhorse.disk.folder_index import (
    INDEX_SUFFIX,
    PLAIN_SUFFIX,
    packed_name,
    plain_name,
)
from packhorse.disk.foreign import FOREIGN_SUFFIXES
from packhorse.disk.index_file import original_index, packed_index, verify_index
from packhorse.disk.packed_header import is_packed
from packhorse.disk.results import FileResult, FolderResult, Problem, Progress, TensorPlan
from packhorse.disk.safetensors_header import read_header
from packhorse.disk.source_file import Stamp, check_unchanged
from packhorse.disk.verify import verify_file
from packhorse.disk.walk import walk
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.layout import FILE_SUFFIX, Level
from packhorse.storage.atomic import atomic_file, atomic_folder
from packhorse.storage.opening import open_regular

__all__ = [
    "folder_logical_nbytes",
    "pack_folder",
    "packed_files",
    "plan_folder",
    "unpack_folder",
    "verify_folder",
]

_COPY_NBYTES = 1 << 24


class _Kind(Enum):
    MODEL = "a safetensors file, which is packed or unpacked"
    INDEX = "an index, which is rewritten"
    OTHER = "any other file, which is copied"
    FOLDER = "a folder, which is created"
    LINK = "a link to a folder elsewhere in the tree, which is created too"


@dataclass(frozen=True, slots=True)
class _Item:
    """A file, folder or link of the source folder, and its output.

    Attributes:
        source: its path.
        output: the path of its output, relative to the output folder.
        kind: what it is.
        stamp: the stamp of the source before it was read; None for a folder.
        nbytes: the bytes that it adds to progress: the size of all tensors of a model file, or the
            size of any other file.
        text: the new text of an index, or the target of a link.
    """

    source: Path
    output: Path
    kind: _Kind
    stamp: Stamp | None = None
    nbytes: int = 0
    text: bytes = b""


def pack_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    base: BaseLike | None = None,
) -> FolderResult:
    """Pack a model folder.

    Args:
        src: a folder with `*.safetensors` files in it or in its subfolders.
        dst: the folder to create; an empty folder may exist there.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        force: whether a folder at `dst` may be replaced, if the new one has a counterpart for each
            of its files.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        base: the model that this one was tuned from, as for `pack_file`. The shards of the two may
            differ. If the base is a folder, a subfolder is packed against the base's subfolder of
            the same name.

    Returns:
        Sizes, for the folder and for each model file.

    Raises:
        ValueError: `src` has no safetensors file or has packed ones, the folders overlap, or the
            base has no safetensors file in any folder where `src` has one.
        CorruptionError, CompatibilityError: a model file, an index or the base is bad; nothing is
            written.
        BaseMismatchError: the base was itself packed against a base.
        OSError: a file cannot be read or written; FileExistsError if `dst` may not be replaced.

    Example:
        >>> from packhorse.disk import pack_folder
        >>> result = pack_folder("llama", "llama-packed", level="fast")
    """
    source = Path(src)
    resolve_level(level), resolve_threads(threads)
    items = _items_to_pack(source)
    _refuse_base(Path(dst), base)
    with open_parts(base) as part:
        _require_parts(items, part, source, base)

        def pack(path: Path, output: Path) -> FileResult:
            against = part(path.parent.relative_to(source))
            return pack_file(
                path, output, level=level, threads=threads, progress=progress, base=against
            )

        return _build(source, Path(dst), items, pack, force, progress)


def unpack_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> FolderResult:
    """Restore the model folder that was packed, every file byte for byte.

    Args:
        src: a folder that `pack_folder` wrote.
        dst: the folder to create; an empty folder may exist there.
        threads: the number of threads; None for one per core, at most 8.
        force: whether a folder at `dst` may be replaced, if the new one has a counterpart for each
            of its files.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        max_nbytes: refuse a folder whose tensors take more bytes in total; None for no limit.
        base: what the folder was packed against, if it has a base.

    Returns:
        Sizes, for the folder and for each model file.

    Raises:
        ValueError: `src` has no packed file, or the folders overlap.
        CorruptionError, CompatibilityError: a packed file, an index or the base is bad, or the
            folder exceeds the limit.
        BaseMismatchError: a tensor needs a base, and no base or another one was given.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read or written; FileExistsError if `dst` may not be replaced.

    Example:
        >>> from packhorse.disk import unpack_folder
        >>> result = unpack_folder("llama.ph", "llama-again")
    """
    source = Path(src)
    resolve_threads(threads)
    items = _items_to_unpack(source)
    _check_limit(items, max_nbytes, source)
    _refuse_base(Path(dst), base)
    with open_parts(base) as part:

        def unpack(path: Path, output: Path) -> FileResult:
            against = part(path.parent.relative_to(source))
            return unpack_file(path, output, threads=threads, progress=progress, base=against)

        for path in _models(items):
            check_bases(path, part(path.parent.relative_to(source)))
        return _build(source, Path(dst), items, unpack, force, progress)


def plan_folder(
    src: str | os.PathLike[str], *, level: Level | str = "default", base: BaseLike | None = None
) -> list[tuple[Path, list[TensorPlan]]]:
    """Estimate what `pack_folder` would do; nothing is written.

    Args:
        src: a folder with `*.safetensors` files in it or in its subfolders.
        level: "fast", "default" or "max".
        base: as for `pack_folder`.

    Returns:
        The path relative to `src` and the tensors' plans, for each model file.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_folder`.

    Example:
        >>> from packhorse.disk import plan_folder
        >>> [(str(path), len(plans)) for path, plans in plan_folder("llama")]
        [('model.safetensors', 21)]
    """
    source = Path(src)
    items = _items_to_pack(source)
    with open_parts(base) as part:
        _require_parts(items, part, source, base)
        with _unchanged(source, items):
            names = [path.relative_to(source) for path in _models(items)]
            return [(n, plan_file(source / n, level=level, base=part(n.parent))) for n in names]


def verify_folder(
    src: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> list[Problem]:
    """Check every packed file and every index of a packed folder, and continue after a bad one.

    Args:
        src: a folder that `pack_folder` wrote.
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        max_nbytes: report a packed file whose tensors take more bytes in total; None for no limit.
        base: what the folder was packed against, if it has a base; as for `verify_file`.

    Returns:
        All problems; an empty list if the folder is good. Copied files have no checksums, so they
        are not checked.

    Raises:
        ValueError: `src` has no packed file, or `threads` is wrong.
        CorruptionError, CompatibilityError: the base is bad.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read.

    Example:
        >>> from packhorse.disk import verify_folder
        >>> problems = verify_folder("llama.ph")
    """
    source = Path(src)
    resolve_threads(threads)
    models = set(packed_files(source))
    problems: list[Problem] = []
    with open_parts(base) as part:
        for path in (path for path in walk(source) if not path.is_dir()):
            if path in models:
                against = part(path.parent.relative_to(source))
                problems += _verify_model(path, threads, progress, max_nbytes, against)
                continue
            if path.name.endswith(INDEX_SUFFIX):
                problems += verify_index(path)
            if progress is not None:
                progress(path.stat().st_size)
    return problems


def packed_files(src: str | os.PathLike[str]) -> list[Path]:
    """The packed files of a folder and its subfolders.

    Args:
        src: the folder.

    Returns:
        The paths of the files, which are not opened.

    Raises:
        ValueError: there is no packed file.
        OSError: the folder cannot be read.

    Example:
        >>> from packhorse.disk import packed_files
        >>> files = packed_files("llama.ph")
    """
    paths = [path for path in walk(Path(src)) if path.is_file()]
    files = [path for path in paths if path.name.endswith(FILE_SUFFIX)]
    _require(files, Path(src), FILE_SUFFIX, paths)
    return files


def folder_logical_nbytes(src: str | os.PathLike[str]) -> int:
    """The total that `progress` counts up to for a folder, packed or not.

    Args:
        src: the folder; only headers are read.

    Returns:
        The size of all tensors of model files, plus the size of all other files. A model file with
        a bad header counts as 0.

    Raises:
        OSError: the folder cannot be read.

    Example:
        >>> from packhorse.disk import folder_logical_nbytes
        >>> total = folder_logical_nbytes("llama")
    """
    total = 0
    for path in walk(Path(src)):
        if path.name.endswith(PLAIN_SUFFIX) and path.is_file():
            with suppress(PackhorseError, ValueError):
                total += logical_nbytes(path)
        elif path.is_file():
            total += path.stat().st_size
    return total


def _items_to_pack(source: Path) -> list[_Item]:
    links: dict[Path, Path] = {}
    items = [_item_to_pack(path, path.relative_to(source)) for path in walk(source, links)]
    items += _links(links, source)
    models = [item for item in items if item.kind is _Kind.MODEL]
    pickles = [item.source for item in items if item.source.suffix.lower() in PICKLE_SUFFIXES]
    if pickles and not models:
        raise ValueError(pickle_advice(pickles[0]))
    _require(models, source, PLAIN_SUFFIX, [item.source for item in items])
    return items


def _item_to_pack(path: Path, relative: Path) -> _Item:
    if path.is_dir():
        return _Item(path, relative, _Kind.FOLDER)
    if path.name.endswith(FILE_SUFFIX):
        raise ValueError(
            f"{path}: already packed, judging by its name; unpack the folder, or rename the file"
        )
    stamp = Stamp.of(path.stat())
    if path.name.endswith(INDEX_SUFFIX):
        return _Item(path, relative, _Kind.INDEX, stamp, stamp.nbytes, packed_index(path))
    if not path.name.endswith(PLAIN_SUFFIX):
        return _Item(path, relative, _Kind.OTHER, stamp, stamp.nbytes)
    header = read_header(path)
    if is_packed(header):
        raise ValueError(f"{path}: already packed; unpack it first")
    output = relative.with_name(packed_name(relative.name))
    return _Item(path, output, _Kind.MODEL, stamp, header.data_nbytes)


def _items_to_unpack(source: Path) -> list[_Item]:
    links: dict[Path, Path] = {}
    items = [_item_to_unpack(path, path.relative_to(source)) for path in walk(source, links)]
    items += _links(links, source)
    paths = [item.source for item in items]
    _require(_models(items), source, FILE_SUFFIX, paths)
    taken: dict[Path, Path] = {}
    for item in items:
        other = taken.setdefault(item.output, item.source)
        if other is not item.source:
            raise ValueError(f"{other} and {item.source} would both unpack to {item.output}")
    return items


def _links(links: dict[Path, Path], source: Path) -> list[_Item]:
    """Items for links to folders elsewhere in the tree; the output has these links too."""
    return [
        _Item(path, path.relative_to(source), _Kind.LINK,
              text=os.fsencode(os.path.relpath(place, path.parent)))
        for path, place in links.items()
    ]  # fmt: skip


def _check_limit(items: list[_Item], max_nbytes: int | None, source: Path) -> None:
    nbytes = sum(item.nbytes for item in items if item.kind is _Kind.MODEL)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"{source}: its tensors take {nbytes} bytes in total, more than max_nbytes = "
            f"{max_nbytes}; unpack only some of its files, or allow more"
        )


def _item_to_unpack(path: Path, relative: Path) -> _Item:
    if path.is_dir():
        return _Item(path, relative, _Kind.FOLDER)
    stamp = Stamp.of(path.stat())
    if path.name.endswith(FILE_SUFFIX):
        output = relative.with_name(plain_name(relative.name))
        return _Item(path, output, _Kind.MODEL, stamp, logical_nbytes(path))
    if path.name.endswith(INDEX_SUFFIX):
        original = original_index(path)
        if original is not None:
            return _Item(path, relative, _Kind.INDEX, stamp, stamp.nbytes, original)
    return _Item(path, relative, _Kind.OTHER, stamp, stamp.nbytes)


def _models(items: list[_Item]) -> list[Path]:
    return [item.source for item in items if item.kind is _Kind.MODEL]


def _require_parts(
    items: list[_Item], part: Callable[[Path], Bases | None], source: Path, base: BaseLike | None
) -> None:
    """Refuse a base that has no file for any of the model files, or that is the folder itself."""
    if base is None:
        return
    if isinstance(base, str | os.PathLike) and source.samefile(base):
        raise ValueError(f"{source}: the base is the folder itself; name the older model")
    parts = [part(item.output.parent) for item in items if item.kind is _Kind.MODEL]
    if all(bases is None or bases.is_empty for bases in parts):
        raise ValueError(
            f"{base}: no *{PLAIN_SUFFIX} file in any folder where the model has one; name a base "
            "with the same subfolders"
        )


def _refuse_base(destination: Path, base: BaseLike | None) -> None:
    """Refuse an output that would replace the base."""
    if not isinstance(base, str | os.PathLike) or not destination.exists():
        return
    if Path(base).resolve().is_relative_to(destination.resolve()):
        raise ValueError(f"{destination}: the base is inside this output; name another output")


def _require(models: Sized, source: Path, suffix: str, paths: Iterable[Path]) -> None:
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


def _build(
    source: Path,
    destination: Path,
    items: list[_Item],
    convert: Callable[[Path, Path], FileResult],
    force: bool,
    progress: Progress | None,
) -> FolderResult:
    destination = Path(os.path.abspath(destination))
    _refuse_overlap(source, destination)
    results = []
    replaceable = {item.output for item in items} if force else None
    with atomic_folder(destination, replaceable) as folder, _unchanged(source, items):
        for item in items:
            target = folder / item.output
            if item.kind is _Kind.MODEL:
                result = convert(item.source, target)
                results.append(replace(result, output=destination / item.output))
            elif item.kind is _Kind.FOLDER:
                target.mkdir()
            elif item.kind is _Kind.LINK:
                target.symlink_to(os.fsdecode(item.text))
            else:
                _copy(item, target, progress)
    return _sum(source, destination, items, results)


@contextmanager
def _unchanged(source: Path, items: list[_Item]) -> Iterator[None]:
    """Check that no file of a folder is changed, added or removed while the block runs. If the
    block fails because of such a change, the error says so.

    Raises:
        OSError: a file was changed, added or removed.
    """
    try:
        yield
    except (PackhorseError, ValueError, FileNotFoundError):
        _check_unchanged(source, items)
        raise
    _check_unchanged(source, items)


def _check_unchanged(source: Path, items: list[_Item]) -> None:
    for item in items:
        if item.stamp is not None:
            check_unchanged(item.source, item.stamp)
    links: dict[Path, Path] = {}
    found = {*walk(source, links)}
    for path in (found | links.keys()) ^ {item.source for item in items}:
        raise OSError(
            f"{path}: added or removed while {source} was being read, so nothing was written; try "
            "again when nothing writes to that folder, or use a copy"
        )


def _refuse_overlap(source: Path, destination: Path) -> None:
    real, output = source.resolve(), destination.resolve()
    if output.is_relative_to(real) or real.is_relative_to(output):
        raise ValueError(
            f"{destination}: the output and the input {source} must not contain each other; "
            "name another output"
        )


def _copy(item: _Item, target: Path, progress: Progress | None) -> None:
    """Copy a file, or write an index with its new text."""
    status = item.source.stat()
    with atomic_file(target, like=status) as output:
        if item.kind is _Kind.INDEX:
            output.write(item.text)
        else:
            with open_regular(item.source) as file:
                while piece := file.read(_COPY_NBYTES):
                    output.write(piece)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    if progress is not None:
        progress(item.nbytes)


def _sum(
    source: Path, destination: Path, items: list[_Item], files: list[FileResult]
) -> FolderResult:
    rest = [item for item in items if item.kind in (_Kind.INDEX, _Kind.OTHER)]
    before = sum(item.nbytes for item in rest)
    after = sum(len(item.text) if item.kind is _Kind.INDEX else item.nbytes for item in rest)
    packing = any(item.output.name.endswith(FILE_SUFFIX) for item in items)
    original, packed = (before, after) if packing else (after, before)
    return FolderResult(
        source=source,
        output=destination,
        original_nbytes=original + sum(file.original_nbytes for file in files),
        packed_nbytes=packed + sum(file.packed_nbytes for file in files),
        files=tuple(files),
        n_copied=sum(item.kind is _Kind.OTHER for item in items),
    )


def _verify_model(
    path: Path,
    threads: int | None,
    progress: Progress | None,
    max_nbytes: int | None,
    base: Bases | None,
) -> list[Problem]:
    try:
        return verify_file(
            path, threads=threads, progress=progress, max_nbytes=max_nbytes, base=base
        )
    except ValueError as error:  # it has the name of a packed file, but it is not one
        return [Problem(path, None, None, str(error))]
