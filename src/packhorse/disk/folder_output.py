"""Writes the output of packing or unpacking a model folder.

A folder of this machine is built under a temporary name beside its destination and renamed at the
end, so it is complete or absent. If the work is interrupted, nothing is left, and the next run
starts from the beginning.

At a URL, files appear one by one. Before the first file, a record is written beside them, which
says what is being done; it also lists what has been done, file by file, and is removed at the end.
Readers refuse a folder with such a record. The same task, run again, skips the files that the
record lists, if neither they nor their sources have changed since.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhorse.codecs.content import content_hash
from packhorse.disk.base_files import BaseLike, based_frames
from packhorse.disk.folder_items import RECORD_NAME, Item, Kind, unchanged
from packhorse.disk.index_file import read_index
from packhorse.disk.packed_header import parse_packed_header
from packhorse.disk.results import FileResult, FolderResult, Progress, TensorResult
from packhorse.errors import CorruptionError
from packhorse.storage.atomic import atomic_folder
from packhorse.storage.documents import compact_json
from packhorse.storage.locations import Place, is_within, writing
from packhorse.storage.opening import open_regular
from packhorse.storage.remote_path import RemotePath
from packhorse.storage.source import open_source
from packhorse.storage.source_file import stamp_of
from packhorse.storage.strict_json import parse_json

__all__ = ["Task", "build_folder", "copy_item", "read_record", "refuse_others", "save_record"]

_COPY_NBYTES = 1 << 24
_NOTHING = "nothing was written"
_UNFINISHED = "the output is not complete"

# Writes the output of a model file.
_Convert = Callable[[Item, Place], FileResult]


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done.

    Attributes:
        verb: "pack" or "unpack".
        source: the folder to read.
        destination: the folder to write.
        items: what is in the source.
        base: the base; None if there is none.
        level: the level of packing.
    """

    verb: str
    source: Place
    destination: Place
    items: Sequence[Item]
    base: BaseLike | None
    level: str = ""

    def described(self) -> dict[str, Any]:
        """The task in a record: two runs with equal descriptions write the same files."""
        return {
            "verb": self.verb,
            "source": _full(self.source),
            "level": self.level,
            "base": _described_base(self.base),
        }


def _full(place: Place) -> str:
    return os.path.abspath(place) if isinstance(place, Path) else str(place)


def _described_base(base: BaseLike | None) -> Any:
    """A base with the stamps of its files. Tensors in memory are never the same as others."""
    if base is None:
        return None
    if not isinstance(base, Path | RemotePath):
        return os.urandom(16).hex()
    if isinstance(base, Path):
        files = [path for path in base.rglob("*") if path.is_file()] if base.is_dir() else [base]
        stamps = {str(path): list(stamp_of(path)) for path in files}
    else:
        stamps = {str(path): list(stamp) for path, stamp in base.files().items()}
    return [_full(base), content_hash(compact_json(stamps), threads=1).hex()]


def build_folder(
    task: Task, convert: _Convert, *, force: bool, progress: Progress | None
) -> FolderResult:
    """Write all files of a folder.

    Args:
        task: what is to be done.
        convert: writes the output of a model file.
        force: whether a folder at the destination may be replaced, if the new one has a counterpart
            for each of its files.
        progress: called with the bytes done since the last call.

    Raises:
        ValueError: the source and the destination overlap.
        FileExistsError: the destination may not be replaced.
        OSError: a file cannot be read or written, or the source changed.
    """
    if is_within(task.destination, task.source) or is_within(task.source, task.destination):
        raise ValueError(
            f"{task.destination}: the output and the input {task.source} must not contain each "
            "other; name another output"
        )
    if isinstance(task.destination, Path):
        destination = Path(os.path.abspath(task.destination))
        return _build_local(replace(task, destination=destination), convert, force, progress)
    return _Upload(task, task.destination, convert, progress).run(force=force)


def _build_local(
    task: Task, convert: _Convert, force: bool, progress: Progress | None
) -> FolderResult:
    destination, results = Path(task.destination), []
    outputs = [Path(item.output) for item in task.items]
    replaceable = _with_parents(outputs) if force else None
    with (
        atomic_folder(destination, replaceable) as folder,
        unchanged(task.source, task.items, _NOTHING),
    ):
        for item in task.items:
            target = folder / item.output
            if not isinstance(task.source, Path):  # a URL has no items for folders
                target.parent.mkdir(parents=True, exist_ok=True)
            if item.kind is Kind.MODEL:
                result = convert(item, target)
                results.append(replace(result, output=destination / item.output))
            elif item.kind is Kind.FOLDER:
                target.mkdir()
            elif item.kind is Kind.LINK:
                target.symlink_to(os.fsdecode(item.text))
            else:
                copy_item(item, target, progress, force=False)
    return _sum(task, results)


def _with_parents(paths: Iterable[Path]) -> set[Path]:
    return {above for path in paths for above in (path, *path.parents)}


class _Upload:
    """Writes a folder at a URL, file by file."""

    def __init__(
        self, task: Task, destination: RemotePath, convert: _Convert, progress: Progress | None
    ) -> None:
        self._task = task
        self._destination = destination
        self._convert = convert
        self._progress = progress
        self._done: dict[str, Any] = {}
        self._record = destination / RECORD_NAME

    def run(self, *, force: bool) -> FolderResult:
        """Write what is missing."""
        for item in self._task.items:
            if item.kind is Kind.LINK:
                raise ValueError(
                    f"{item.source}: a link to a folder that is packed elsewhere in the tree, "
                    "which cannot be stored at a URL; remove the link, or pack to a disk"
                )
        self._begin(force=force)
        items = [item for item in self._task.items if item.kind is not Kind.FOLDER]
        results = {}
        with unchanged(self._task.source, self._task.items, _UNFINISHED):
            # An index comes last: readers look for it first.
            for item in sorted(items, key=lambda item: item.kind is Kind.INDEX):
                found = self._write(item)
                if found is not None:
                    results[item.output] = found
        self._record.remove()
        return _sum(self._task, [results[i.output] for i in items if i.output in results])

    def _begin(self, *, force: bool) -> None:
        """Check what is at the destination, and write the record.

        Raises:
            FileExistsError: something is there that may not be replaced.
        """
        try:
            there = {str(path): list(at) for path, at in self._destination.files().items()}
        except FileNotFoundError:
            there = {}
        is_ours = there.pop(RECORD_NAME, None) is not None and self._continue(there, force)
        if there and not (is_ours or force):
            raise FileExistsError(
                f"{self._destination}: already exists and is not empty; allow replacing it (force, "
                "--force) or name another"
            )
        refuse_others(self._task, there)
        save_record(self._task, self._done)

    def _continue(self, there: dict[str, list[int]], force: bool) -> bool:
        """Take over what an earlier run of the same task has done."""
        done = read_record(self._task, force=force)
        if done is None:
            return False
        sources = {item.output.as_posix(): _listed(item.stamp) for item in self._task.items}
        self._done = {
            name: stamps
            for name, stamps in done.items()
            if name in there and stamps == [sources.get(name), there[name]]
        }
        return True

    def _write(self, item: Item) -> FileResult | None:
        """Write the output of an item, unless it is there; the result, if it is a model file."""
        name, target = item.output.as_posix(), self._destination / item.output
        if name in self._done:
            if self._progress is not None:
                self._progress(item.nbytes)
            return self._known(item, target) if item.kind is Kind.MODEL else None
        result = None
        if item.kind is Kind.MODEL:
            result = self._convert(item, target)
        else:
            copy_item(item, target, self._progress, force=True)
        self._done[name] = [_listed(item.stamp), list(target.stamp())]
        save_record(self._task, self._done)
        return result

    def _known(self, item: Item, target: RemotePath) -> FileResult:
        """The result for a model file that an earlier run has written, from headers."""
        packed_at = target if self._task.verb == "pack" else item.source
        with open_source(packed_at) as source:
            packed = parse_packed_header(source.header(), label=str(packed_at))
            based = {name: frame.base_hash for name, frame in based_frames(source, packed)}
        tensors = tuple(
            TensorResult(
                entry.name, entry.dtype, entry.shape, entry.nbytes,
                packed.frames[entry.name].nbytes, based.get(entry.name),
            )
            for entry in packed.original.entries
        )  # fmt: skip
        original, nbytes = packed.original.file_nbytes, packed.packed.file_nbytes
        return FileResult(item.source, target, original, nbytes, tensors)


def refuse_others(task: Task, names: Iterable[str]) -> None:
    """Refuse a destination that has a file which the task does not write.

    Raises:
        FileExistsError: it has such a file.
    """
    for name in set(names) - {item.output.as_posix() for item in task.items}:
        raise FileExistsError(
            f"{task.destination}: contains {name}, which the new folder would not have; move "
            "it away or name another output"
        )


def read_record(task: Task, *, force: bool) -> dict[str, Any] | None:
    """What an interrupted run of this task has done, from the record at the destination: by the
    name of each output, the stamps of its source and its own. None if the record is that of another
    task and `force` is set.

    Raises:
        FileExistsError: it is that of another task, and `force` is not set.
    """
    place, record = task.destination / RECORD_NAME, {}
    with suppress(CorruptionError):
        record = parse_json(read_index(place), label=str(place))
    done = record.get("done")
    if record.get("task") == task.described() and isinstance(done, dict):
        return done
    if force:
        return None
    raise FileExistsError(
        f"{task.destination}: an interrupted command with other arguments, or for another version "
        "of the base, has left its files here; repeat that command, or allow replacing them "
        "(force, --force)"
    )


def save_record(task: Task, done: Mapping[str, Any]) -> None:
    """Write the record of a task, which marks its destination as unfinished."""
    text = json.dumps({"task": task.described(), "done": done}, ensure_ascii=False, indent=1)
    with writing(task.destination / RECORD_NAME, force=True) as output:
        output.write(text.encode())


def _listed(stamp: Any) -> list[int]:
    return list(stamp or ())


def copy_item(item: Item, target: Place, progress: Progress | None, *, force: bool) -> None:
    """Copy a file, or write an index with its new text; `force` says whether to replace one."""
    own = item.source if isinstance(item.source, Path) else None
    status = None if own is None else own.stat()
    with writing(target, source=own, force=force) as output:
        if item.kind is Kind.INDEX:
            output.write(item.text)
        elif own is not None:
            with open_regular(own) as file:
                while piece := file.read(_COPY_NBYTES):
                    output.write(piece)
        else:
            with open_source(item.source) as source:
                for start in range(0, item.nbytes, _COPY_NBYTES):
                    output.write(source.map(start, min(_COPY_NBYTES, item.nbytes - start)))
                source.check()
    if status is not None and isinstance(target, Path):
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    if progress is not None:
        progress(item.nbytes)


def _sum(task: Task, files: Sequence[FileResult]) -> FolderResult:
    rest = [item for item in task.items if item.kind in (Kind.INDEX, Kind.OTHER)]
    before = sum(item.nbytes for item in rest)
    after = sum(len(item.text) if item.kind is Kind.INDEX else item.nbytes for item in rest)
    original, packed = (before, after) if task.verb == "pack" else (after, before)
    return FolderResult(
        source=task.source,
        output=task.destination,
        original_nbytes=original + sum(file.original_nbytes for file in files),
        packed_nbytes=packed + sum(file.packed_nbytes for file in files),
        files=tuple(files),
        n_copied=sum(item.kind is Kind.OTHER for item in task.items),
    )
