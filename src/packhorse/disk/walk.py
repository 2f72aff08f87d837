"""Walks a model folder and its subfolders, and follows links.

Links are followed because a download cache consists of links. Each real folder is walked once,
however many links lead to it; otherwise a few dozen links could stand for more files than there are
atoms. If the folder itself is in the tree, it is walked there, and the links to it are returned
separately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from packhorse.storage.opening import kind_of

__all__ = ["walk"]

_MAX_DEPTH = 100  # nested folders; few enough to walk or remove them without a stack overflow

_Identity: TypeAlias = tuple[int, int]  # the device of a folder, and its number there


def walk(folder: Path, links: dict[Path, Path] | None = None) -> Iterator[Path]:
    """All paths below a folder, each folder before its content, and each real folder once.

    Args:
        folder: where to begin.
        links: is filled while the iteration runs: maps each link that is not followed, because its
            folder is elsewhere in the tree too, to the path of that folder.

    Raises:
        ValueError: a folder contains itself, is nested too deeply, or contains a pipe, a socket or
            a device.
        FileNotFoundError: a link leads nowhere.
        OSError: a folder cannot be read.
    """
    yield from _Walk(folder, {} if links is None else links).below(folder, ())


class _Walk:
    def __init__(self, root: Path, links: dict[Path, Path]) -> None:
        self._links = links
        self._places = dict(_real_folders(root))  # where each folder is walked

    def below(self, folder: Path, above: tuple[_Identity, ...]) -> Iterator[Path]:
        """All paths below a folder; `above` are the folders that it is in."""
        above = (*above, _identity(folder.stat()))
        if len(above) > _MAX_DEPTH:
            raise ValueError(f"{folder}: folders are nested more than {_MAX_DEPTH} deep")
        for path in sorted(folder.iterdir()):
            _check(path)
            if not path.is_dir():
                yield path
            elif self._is_walked_here(path, above):
                yield path
                yield from self.below(path, above)

    def _is_walked_here(self, path: Path, above: tuple[_Identity, ...]) -> bool:
        identity = _identity(path.stat())
        if identity in above:
            raise ValueError(f"{path}: a link to a folder that contains it; remove the link")
        place = self._places.setdefault(identity, path)
        if place != path:
            self._links[path] = place
        return place == path


def _real_folders(folder: Path) -> Iterator[tuple[_Identity, Path]]:
    """The folders below a folder that are reached without a link, with their identities."""
    top = len(folder.parts)
    for parent, names, _ in os.walk(folder, onerror=_raise):
        if len(Path(parent).parts) - top > _MAX_DEPTH:
            names.clear()  # `below` refuses deeper folders
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                yield _identity(path.stat()), path


def _raise(error: OSError) -> None:
    raise error


def _check(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path}: a link to nothing; get the model again")
    if not path.is_dir() and not path.is_file():
        kind = kind_of(path.stat())
        raise ValueError(f"{path}: {kind}, neither a file nor a folder; remove it")


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
