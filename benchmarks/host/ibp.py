"""Rows packed by Invariant Bit Packing, gathered on the CPU by `ibp_rows.cpp` beside this file."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.process import find_compiler
from benchmarks.common.programs import compile_once
from packhorse.reference.ibp import IbpFit, fit_best, row_nbytes

__all__ = ["IbpRows", "find_best", "is_available"]

SOURCE = Path(__file__).with_name("ibp_rows.cpp")
LIBRARY = Path(__file__).resolve().parents[2] / "build" / "benchmarks" / "ibp_rows.so"
FLAGS = ("-std=c++20", "-O3", "-Wall", "-Wextra", "-mbmi2", "-mpopcnt", "-shared", "-fPIC")
_Bytes = NDArray[np.uint8]


def is_available() -> bool:
    """Whether this machine can compile and run it: a compiler, and an x86 with BMI2."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return find_compiler() is not None and "bmi2" in flags


@cache
def _library() -> ctypes.CDLL:
    compile_once([str(find_compiler()), *FLAGS, str(SOURCE)], LIBRARY, [SOURCE], SOURCE.parent)
    return ctypes.CDLL(str(LIBRARY))


def find_best(rows: _Bytes) -> tuple[IbpFit, NDArray[np.int64]] | None:
    """The fit that reads the least in sectors of 32 bytes, with words of 32 or 64 bits, and the
    bytes of each packed row. None if rows have no whole number of such words.

    Args:
        rows: uint8, (n_rows, bytes of a row).
    """
    sizes = [size for size in (4, 8) if rows.shape[1] % size == 0]
    found = []
    for size in sizes:
        words = rows.view(f"u{size}")
        fit = fit_best(words)
        found.append((fit, row_nbytes(words, fit)))
    return min(found, key=lambda one: float((-(-one[1] // 32)).mean()), default=None)


class IbpRows:
    """A table whose rows are packed in their places.

    Args:
        rows: uint8, (n_rows, bytes of a row). They are copied.
        fit: what they share.
    """

    def __init__(self, rows: _Bytes, fit: IbpFit) -> None:
        self._fit, self._bits = fit, 8 * fit.mask.itemsize
        self._rows = np.ascontiguousarray(rows).copy()
        self._is_packed = np.zeros(len(rows), np.uint8)
        self._call("pack", self._rows, len(rows), self._is_packed)

    @property
    def packed_share(self) -> float:
        """The share of rows that became shorter."""
        return float(self._is_packed.mean())

    def row(self, number: int) -> _Bytes:
        """The bytes at the place of a row."""
        return self._rows[number]

    def gather(self, ids: NDArray[np.int64], out: _Bytes, threads: int = 1) -> None:
        """Rows by number, into uint8 (n, bytes of a row)."""
        bounds = np.linspace(0, len(ids), threads + 1).astype(np.int64)

        def work(i: int) -> None:
            part = slice(bounds[i], bounds[i + 1])
            n = int(bounds[i + 1] - bounds[i])
            self._call("gather", self._rows, self._is_packed, ids[part], n, out[part])

        if threads == 1:
            return work(0)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    def _call(self, name: str, *arguments: Any) -> None:
        fit = self._fit
        everything = (fit.mask, fit.value, len(fit.mask), *arguments)
        function = getattr(_library(), f"ibp_{name}_{self._bits}")
        function(*(_argument(argument) for argument in everything))


def _argument(value: Any) -> Any:
    return ctypes.c_size_t(value) if isinstance(value, int) else ctypes.c_void_p(value.ctypes.data)
