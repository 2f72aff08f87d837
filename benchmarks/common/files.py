"""The files of a store: their size, flushing them, and taking them out of the system's cache."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["cached_nbytes", "evict", "flush", "nbytes_on_disk", "read_ahead_kib"]

MADV_DONTNEED = 4
PAGE = mmap.PAGESIZE


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def nbytes_on_disk(folder: Path) -> int:
    """Bytes that the disk has given to the files; the holes of a sparse file do not count."""
    return sum(512 * path.stat().st_blocks for path in _files(folder))


def flush(paths: Iterable[Path]) -> None:
    """Wait until files or folders are on the disk, for stores that do not wait themselves."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def evict(folder: Path) -> None:
    """Take all files of a folder out of the system's cache, as a lack of memory would.

    The system keeps pages that are mapped, so this process lets go of those first. Nothing is lost:
    pages of a shared mapping go to the file, and the next access reads them again.
    """
    _let_go(folder)
    for path in _files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _let_go(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    inside = f"{folder.resolve()}{os.sep}"
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *path = line.split(maxsplit=5)
        if not path or not path[0].startswith(inside) or not access.endswith("s"):
            continue
        start, end = (int(side, 16) for side in span.split("-"))
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")


def read_ahead_kib(folder: Path) -> int | None:
    """KiB that the system reads at once where a mapped file is not in its cache; None if it does
    not say."""
    device = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (block, block / ".."):  # a partition has no queue of its own
        if (place / "queue/read_ahead_kb").exists():
            return int((place / "queue/read_ahead_kb").read_text())
    return None


def cached_nbytes(folder: Path) -> int:
    """Bytes of the files that are in the system's cache now."""
    return sum(_cached_nbytes(path) for path in _files(folder) if path.stat().st_size)


def _cached_nbytes(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // PAGE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        start = ctypes.c_void_p(view.ctypes.data)
        length = ctypes.c_size_t(len(mapped))
        failed = libc.mincore(start, length, ctypes.c_void_p(pages.ctypes.data))
        del view  # or the mapping cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int(np.count_nonzero(pages & 1)) * PAGE
