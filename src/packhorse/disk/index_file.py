"""An index where it lies: its text, and the files beside it that it names.

`folder_index.py` says what an index means and asks what is here: whether a file is there, and which
tensors its header names.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from packhorse.disk.folder_index import file_faults, is_packed_index, pack_index, unpack_index
from packhorse.disk.results import Problem
from packhorse.disk.safetensors_header import read_header
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.layout import MAX_FILE_HEADER_NBYTES
from packhorse.storage.opening import open_regular

__all__ = ["original_index", "packed_index", "tensors_beside", "verify_index"]


def packed_index(path: Path) -> bytes:
    """The packed form of an index.

    Raises:
        CorruptionError, CompatibilityError: it is none, or a file that it names is bad.
        ValueError: it is that of a packed folder.
        OSError: it cannot be read.
    """
    text, tensors = _read(path), tensors_beside(path)
    return pack_index(text, label=str(path), has=_beside(path), tensors=tensors)


def original_index(path: Path) -> bytes | None:
    """The original of an index in a packed folder; None if it is not packed itself.

    Raises:
        CorruptionError, CompatibilityError: it is damaged, or a file is not the one that it names.
        OSError: it cannot be read.
    """
    text, label, has = _read(path), str(path), _beside(path)
    if not is_packed_index(text, label=label, has=has):
        return None
    return unpack_index(text, label=label, has=has, tensors=tensors_beside(path))


def verify_index(path: Path) -> list[Problem]:
    """All that is wrong with an index in a packed folder. A file whose header is bad is passed
    over: verifying the file itself tells that."""
    known = tensors_beside(path)

    def tensors(name: str) -> frozenset[str] | None:
        with suppress(PackhorseError):
            return known(name)
        return None

    try:
        text, label, has = _read(path), str(path), _beside(path)
        if not is_packed_index(text, label=label, has=has):
            return []
        unpack_index(text, label=label)
        words = file_faults(text, label=label, has=has, tensors=tensors)
    except PackhorseError as error:
        words = [str(error)]
    return [Problem(path, None, None, message) for message in words]


def tensors_beside(index: Path) -> Callable[[str], frozenset[str] | None]:
    """Which tensors the header of a file in the folder of an index names; None if there is no such
    file."""
    has = _beside(index)

    def tensors(name: str) -> frozenset[str] | None:
        if not has(name):
            return None
        return frozenset(entry.name for entry in read_header(index.parent / name).entries)

    return tensors


def _beside(index: Path) -> Callable[[str], bool]:
    """Whether a file of a name is in the folder of an index."""

    def has(name: str) -> bool:
        if name.startswith("/") or ".." in name.split("/"):
            return False
        try:
            return (index.parent / name).is_file()
        except ValueError:  # a NUL, or half a surrogate pair, which no file system holds
            return False
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise

    return has


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_FILE_HEADER_NBYTES:
            found = f"an index of {nbytes} bytes"
            raise CorruptionError(
                f"{path}: {found}, and at most {MAX_FILE_HEADER_NBYTES} are allowed"
            )
        return file.read(nbytes)
