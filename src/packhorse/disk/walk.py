"""Walking a model folder: everything in it and below, links followed.

Links are followed because a download cache is made of them. A real folder is walked once, however
many links lead to it: else a few dozen links could stand for more files than there are atoms. Where
the folder itself lies in the tree, that is where it is walked; the links to it are told apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from packhorse.storage.opening import kind_of

__all__ = ["walk"]

_MAX_DEPTH = 100  # folders in folders; far from where walking or removing them exhausts the stack

_Identity: TypeAlias = tuple[int, int]  # of a folder: its device and its number there


def walk(folder: Path, links: dict[Path, Path] | None = None) -> Iterator[Path]:
    """Everything below a folder, each folder before what is in it, and each real folder once.

    Args:
        folder: where to begin.
        links: gets, while the iteration runs, each link to a folder that is not followed because
            that folder stands elsewhere in the tree too: where the link is, and where the folder.

    Raises:
        ValueError: a folder lies in itself, or too deep, or holds a pipe, a socket or a device.
        FileNotFoundError: a link leads nowhere.
        OSError: a folder cannot be read.
    """
    yield from _Walk(folder, {} if links is None else links).below(folder, ())


class _Walk:
    def __init__(self, root: Path, links: dict[Path, Path]) -> None:
        self._links = links
        self._places = dict(_real_folders(root))  # where each folder is walked

    def below(self, folder: Path, above: tuple[_Identity, ...]) -> Iterator[Path]:
        """Everything below a folder that lies in these others."""
        above = (*above, _identity(folder.stat()))
        if len(above) > _MAX_DEPTH:
            raise ValueError(f"{folder}: folders lie more than {_MAX_DEPTH} deep in each other")
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
            raise ValueError(f"{path}: a link to a folder that it lies in; take it away")
        place = self._places.setdefault(identity, path)
        if place != path:
            self._links[path] = place
        return place == path


def _real_folders(folder: Path) -> Iterator[tuple[_Identity, Path]]:
    """The folders that lie in a folder without any link, by identity."""
    top = len(folder.parts)
    for parent, names, _ in os.walk(folder, onerror=_raise):
        if len(Path(parent).parts) - top > _MAX_DEPTH:
            names.clear()  # what is deeper is refused later
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
        raise ValueError(f"{path}: {kind}, neither a file nor a folder; take it away")


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
