"""Reads an index in its folder, and looks at the files beside it that it names.

`folder_index.py` knows what an index means. This module tells it whether a file exists, and which
tensors the file's header names.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from packhorse.disk.folder_index import file_faults, is_packed_index, pack_index, unpack_index
from packhorse.disk.results import Problem
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.layout import MAX_FILE_HEADER_NBYTES
from packhorse.storage.locations import Place
from packhorse.storage.opening import open_regular
from packhorse.storage.source import header_at

__all__ = ["original_index", "packed_index", "read_index", "tensors_beside", "verify_index"]


def packed_index(path: Place) -> bytes:
    """The packed form of an index.

    Raises:
        CorruptionError, CompatibilityError: the file is not an index, or a file that it names is
            bad.
        ValueError: it is the index of a packed folder.
        OSError: a file cannot be read.
    """
    text, tensors = read_index(path), tensors_beside(path)
    return pack_index(text, label=str(path), has=_beside(path), tensors=tensors)


def original_index(path: Place) -> bytes | None:
    """The original text of an index in a packed folder; None if the index is not packed.

    Raises:
        CorruptionError, CompatibilityError: it is damaged, or a file does not fit it.
        OSError: a file cannot be read.
    """
    text, label, has = read_index(path), str(path), _beside(path)
    if not is_packed_index(text, label=label, has=has):
        return None
    return unpack_index(text, label=label, has=has, tensors=tensors_beside(path))


def verify_index(path: Place) -> list[Problem]:
    """The problems of an index in a packed folder. A file with a bad header is left out: verifying
    the file itself reports that."""
    known = tensors_beside(path)

    def tensors(name: str) -> frozenset[str] | None:
        with suppress(PackhorseError):
            return known(name)
        return None

    try:
        text, label, has = read_index(path), str(path), _beside(path)
        if not is_packed_index(text, label=label, has=has):
            return []
        unpack_index(text, label=label)
        words = file_faults(text, label=label, has=has, tensors=tensors)
    except PackhorseError as error:
        words = [str(error)]
    return [Problem(path, None, None, message) for message in words]


def tensors_beside(index: Place) -> Callable[[str], frozenset[str] | None]:
    """A function that takes the name of a file in the folder of an index and returns the names of
    its tensors, from its header; None if there is no such file."""
    has = _beside(index)

    def tensors(name: str) -> frozenset[str] | None:
        if not has(name):
            return None
        return frozenset(entry.name for entry in header_at(index.parent / name).entries)

    return tensors


def _beside(index: Place) -> Callable[[str], bool]:
    """A function that says whether there is a file of a name in the folder of an index."""

    if not isinstance(index, Path):
        names = {str(path) for path in index.parent.files()}
        return names.__contains__
    folder = index.parent

    def has(name: str) -> bool:
        if name.startswith("/") or ".." in name.split("/"):
            return False
        try:
            return (folder / name).is_file()
        except ValueError:  # a NUL or half a surrogate pair, which file names cannot have
            return False
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise

    return has


def read_index(path: Place) -> bytes:
    """The text of an index.

    Raises:
        CorruptionError: it is longer than any index.
        OSError: it cannot be read.
    """
    if not isinstance(path, Path):
        opened = path.open()
        _check_length(path, opened.nbytes)
        return bytes(opened.head(opened.nbytes))
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        _check_length(path, nbytes)
        return file.read(nbytes)


def _check_length(path: Place, nbytes: int) -> None:
    if nbytes > MAX_FILE_HEADER_NBYTES:
        raise CorruptionError(
            f"{path}: the index has {nbytes} bytes, but at most {MAX_FILE_HEADER_NBYTES} are "
            "allowed"
        )
