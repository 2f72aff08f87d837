"""The states that a folder may have after a power loss. Every operation on it is recorded, and
replayed without data that were not flushed.

POSIX promises little: bytes are safe after `fsync` of the file, names after `fsync` of the folder.
Any part of later changes may be there or not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from packhorse.storage import atomic
from packhorse.storage.rename import rename_new

__all__ = ["Recorder", "Told"]

_RECORDED = (
    "open", "close", "pwrite", "pwritev", "fsync", "replace", "unlink", "mkdir", "rmdir"
)  # fmt: skip


@dataclass(frozen=True)
class Told:
    """A mark in the record; it says what the caller knew from then on."""

    what: Any


@dataclass(frozen=True)
class _Op:
    kind: str  # name, write, sync, sync_folder
    key: Any  # of what must be synced: an inode or a folder
    apply: Callable[[_Disk], None] = lambda disk: None


@dataclass
class _Disk:
    """Names and bytes, while a record is replayed."""

    names: dict[Path, int | None] = field(default_factory=dict)  # None is a folder
    data: dict[int, bytearray] = field(default_factory=dict)

    def write(self, inode: int, offset: int, data: bytes) -> None:
        content = self.data.setdefault(inode, bytearray())
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data


class Recorder:
    """Records the operations that this process does below a folder by `os`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._live: dict[Path, int | None] = {}
        self._open: dict[int, Path | int] = {}
        self._n_inodes = 0
        self.ops: list[_Op | Told] = []

    def tell(self, what: Any) -> None:
        """Put a mark into the record."""
        self.ops.append(Told(what))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the block ends."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (
                "open",
                "close",
                "pwrite",
                "pwritev",
                "fsync",
                "replace",
                "unlink",
                "mkdir",
                "rmdir",
            ):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            patch.setattr(atomic, "rename_new", self._wrapped("replace", rename_new))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        note = getattr(self, f"_note_{name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(result, *args)
            return result

        return call

    def _inside(self, path: Any) -> Path | None:
        if isinstance(path, int) or not Path(path).is_relative_to(self._root):
            return None
        return Path(path).relative_to(self._root)

    def _name(self, path: Path, apply: Callable[[_Disk], None]) -> None:
        self.ops.append(_Op("name", path.parent, apply))

    def _note_open(self, result: int, path: Any, flags: int, *_: Any) -> None:
        inside = self._inside(path)
        if inside is None:
            return
        if stat.S_ISDIR(os.stat(path).st_mode):
            self._open[result] = inside
            return
        inode = self._live.get(inside)
        if inode is None:
            self._n_inodes += 1
            inode = self._live[inside] = self._n_inodes
            self._name(inside, lambda disk: disk.names.__setitem__(inside, inode))
        self._open[result] = inode

    def _note_close(self, _: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _note_pwrite(self, written: int, descriptor: int, data: Any, offset: int) -> None:
        inode = self._open.get(descriptor)
        if isinstance(inode, int):
            copy = bytes(data)[:written]
            self.ops.append(_Op("write", inode, lambda disk: disk.write(inode, offset, copy)))

    def _note_pwritev(self, written: int, descriptor: int, views: Any, offset: int) -> None:
        self._note_pwrite(written, descriptor, b"".join(views), offset)

    def _note_fsync(self, _: None, descriptor: int) -> None:
        target = self._open.get(descriptor)
        if isinstance(target, int):
            self.ops.append(_Op("sync", target))
        elif target is not None:
            self.ops.append(_Op("sync_folder", target))

    def _note_replace(self, _: None, source: Any, target: Any) -> None:
        old, new = self._inside(source), self._inside(target)
        if old is None or new is None:
            return
        inode = self._live[new] = self._live.pop(old)

        def apply(disk: _Disk) -> None:
            disk.names.pop(old, None)
            disk.names[new] = inode

        self._name(new, apply)

    def _note_unlink(self, _: None, path: Any, *__: Any) -> None:
        inside = self._inside(path)
        if inside is not None:
            self._live.pop(inside, None)
            self._name(inside, lambda disk: disk.names.pop(inside, None) and None)

    def _note_mkdir(self, _: None, path: Any, *__: Any) -> None:
        inside = self._inside(path)
        if inside is not None:
            self._live[inside] = None
            self._name(inside, lambda disk: disk.names.__setitem__(inside, None))

    _note_rmdir = _note_unlink

    def replay(self, n_ops: int, survives: Callable[[int], bool], folder: Path) -> list[Any]:
        """Make a folder as it may be after a power loss that follows some operations.

        Args:
            n_ops: the number of operations before the power loss.
            survives: whether an operation that was not flushed has survived.
            folder: an empty folder to make it in.

        Returns:
            The marks of the record until then.
        """
        done = self.ops[:n_ops]
        synced = {}
        for i, op in enumerate(done):
            if isinstance(op, _Op) and op.kind in ("sync", "sync_folder"):
                synced[op.kind == "sync", op.key] = i
        disk = _Disk()
        for i, op in enumerate(done):
            if isinstance(op, _Op) and (
                synced.get((op.kind == "write", op.key), -1) > i or survives(i)
            ):
                op.apply(disk)
        for path, inode in sorted(disk.names.items()):
            if (folder / path).parent.is_dir():
                if inode is None:
                    (folder / path).mkdir(exist_ok=True)
                else:
                    (folder / path).write_bytes(disk.data.get(inode, b""))
        return [op.what for op in done if isinstance(op, Told)]
