"""The size from which the copy engine brings blocks of rows faster than kernels that read them in
place: measured once for each GPU, and kept (packhorse.gpu.figure_cache).

Both ways reach about the same rate on long blocks; then the copy is taken, as it leaves the
multiprocessors to others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from packhorse.gpu.detect import identify
from packhorse.gpu.figure_cache import FigureCache, require, require_keys

__all__ = ["CROSSOVER_CACHE", "NEVER", "SIZES", "crossover_of", "find_crossover"]

SIZES = tuple(1 << log for log in range(16, 25))  # bytes of blocks that are measured: to 16 MiB
NEVER = 1 << 62  # a size that no block has
_SLOWER = 1.05  # times that a copy may take, as it leaves multiprocessors to others
_known: dict[torch.device, int] = {}
_lock = threading.Lock()


def _parse(entry: Any) -> tuple[str, int]:
    require_keys(entry, {"what", "nbytes"}, "an entry")
    require(entry["what"] == "copies", "the entry is of another kind")
    nbytes = entry["nbytes"]
    require(type(nbytes) is int and nbytes in (*SIZES, NEVER), "nbytes is not one of the sizes")
    return entry["what"], nbytes


CROSSOVER_CACHE: FigureCache[str, int] = FigureCache(
    stem="host-copies",
    version=1,
    parse=_parse,
    dump=lambda what, nbytes: {"what": what, "nbytes": nbytes},
    remedy="{}. So copies to the GPU are measured again; delete the file if this goes on",
)


def find_crossover(
    read: Callable[[int], float], copy: Callable[[int], float], sizes: tuple[int, ...] = SIZES
) -> int:
    """The size from which a copy is as fast as reading in place, for it and all larger sizes.

    Args:
        read: seconds to read a block of so many bytes in place.
        copy: seconds to copy it, and to decode it afterwards.
        sizes: bytes of blocks, ascending.
    """
    found = NEVER
    for nbytes in reversed(sizes):
        if copy(nbytes) > _SLOWER * read(nbytes):
            break
        found = nbytes
    return found


def crossover_of(device: torch.device, measure: Callable[[], int]) -> int:
    """The size for a GPU, from this process, from the cache, or measured now.

    Args:
        device: a CUDA device with its number.
        measure: finds the size, and waits for the GPU.
    """
    with _lock:
        if device not in _known:
            identity = identify(device)
            path = CROSSOVER_CACHE.path(identity.device)
            kept = CROSSOVER_CACHE.load(path, identity)
            if "copies" not in kept:
                kept = {"copies": measure()}
                with suppress(OSError):  # the next process measures again
                    CROSSOVER_CACHE.update(path, identity, kept)
            _known[device] = kept["copies"]
        return _known[device]
