"""What nvCOMP has for CPUs: bitcomp and gdeflate, called in its library, which needs no GPU there.

Its LZ4 for CPUs is lz4 itself, and its ANS has no form for CPUs.
"""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.sets import DataSet

__all__ = ["BitcompCodec", "GdeflateCodec"]

Bytes = NDArray[np.uint8]
PACKAGE = "nvidia-libnvcomp-cu13"
# nvcomp/native/bitcomp.h: unsigned integers, by bytes.
BITCOMP_TYPES = {1: 0, 2: 2, 4: 4, 8: 6}
BITCOMP_LOSSLESS, BITCOMP_DEFAULT = 0, 0
# nvcomp/native/gdeflate_cpu.h: functions of C++ in the namespace nvcomp::gdeflate.
GDEFLATE_BOUND = "_ZN6nvcomp8gdeflate32compressCPUGetMaxOutputChunkSizeEmPm"
GDEFLATE_COMPRESS = "_ZN6nvcomp8gdeflate11compressCPUEPKPKvPKmmmPKPvPmi"
GDEFLATE_DECOMPRESS = "_ZN6nvcomp8gdeflate13decompressCPUEPKPKvPKmmPKPvPmSA_"
GDEFLATE_CHUNK_NBYTES = 1 << 16  # the most that it takes


@cache
def _library(stem: str) -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in Path(folder).glob(f"libnvcomp/lib64/{stem}.so*"):
            return ctypes.CDLL(str(path))
    raise ImportError(f"there is no {stem}: pip install {PACKAGE}")


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class BitcompCodec:
    """bitcomp, lossless, on unsigned integers as wide as the elements."""

    def __init__(self, data: DataSet) -> None:
        self._lib = _library("libnvcomp")
        self._handle = ctypes.c_void_p()
        self._dst = np.empty(data.array.nbytes, np.uint8)
        kind = BITCOMP_TYPES[data.array.itemsize]
        self._call(
            "CreatePlan", ctypes.byref(self._handle), ctypes.c_size_t(data.array.nbytes),
            kind, BITCOMP_LOSSLESS, BITCOMP_DEFAULT,
        )  # fmt: skip
        self._lib.bitcompMaxBuflen.restype = ctypes.c_size_t
        bound = self._lib.bitcompMaxBuflen(ctypes.c_size_t(data.array.nbytes))
        self._packed = np.zeros(-(-bound // 8), np.uint64).view(np.uint8)  # aligned to 64 bits

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._lib, f"bitcomp{name}")(*arguments)
        if result:
            raise RuntimeError(f"bitcomp{name} returned {result}")

    def prepare(self, data: DataSet) -> Any:
        return data.array.reshape(-1).view(np.uint8)

    def encode(self, source: Bytes) -> Bytes:
        self._call("HostCompressLossless", self._handle, _address(source), _address(self._packed))
        size = ctypes.c_size_t()
        self._call("GetCompressedSize", _address(self._packed), ctypes.byref(size))
        return self._packed[: size.value]

    def decode(self, packed: Any) -> Bytes:
        source = np.frombuffer(packed, np.uint8)
        self._call("HostUncompress", self._handle, _address(source), _address(self._dst))
        return self._dst


class GdeflateCodec:
    """gdeflate on the raw bytes, in chunks of 64 KiB, the most that it takes."""

    def __init__(self, data: DataSet, *, level: int) -> None:
        self._lib, self._level = _library("libnvcomp_cpu"), level
        nbytes = data.array.nbytes
        starts = range(0, nbytes, GDEFLATE_CHUNK_NBYTES)
        bound = ctypes.c_size_t()
        self._lib[GDEFLATE_BOUND](ctypes.c_size_t(GDEFLATE_CHUNK_NBYTES), ctypes.byref(bound))
        self._sizes = np.array([min(GDEFLATE_CHUNK_NBYTES, nbytes - at) for at in starts], "u8")
        self._starts = np.array(starts, "u8")
        self._packed = np.zeros((len(starts), bound.value), np.uint8)
        self._packed_sizes = np.zeros(len(starts), "u8")
        self._dst = np.empty(nbytes, np.uint8)

    def prepare(self, data: DataSet) -> Any:
        return data.array.reshape(-1).view(np.uint8)

    def encode(self, source: Bytes) -> list[Bytes]:
        sources = self._starts + np.uint64(source.ctypes.data)
        packed = self._addresses(list(self._packed))
        self._lib[GDEFLATE_COMPRESS](
            _address(sources), _address(self._sizes), ctypes.c_size_t(GDEFLATE_CHUNK_NBYTES),
            ctypes.c_size_t(self._starts.size), _address(packed), _address(self._packed_sizes),
            self._level,
        )  # fmt: skip
        return [row[:n] for row, n in zip(self._packed, self._packed_sizes, strict=True)]

    def decode(self, packed: list[Any]) -> Bytes:
        pieces = [np.frombuffer(piece, np.uint8) for piece in packed]
        sources, outs = self._addresses(pieces), self._starts + np.uint64(self._dst.ctypes.data)
        sizes, written = np.array([piece.size for piece in pieces], "u8"), self._sizes.copy()
        self._lib[GDEFLATE_DECOMPRESS](
            _address(sources), _address(sizes), ctypes.c_size_t(sizes.size),
            _address(outs), _address(self._sizes), _address(written),
        )  # fmt: skip
        return self._dst

    @staticmethod
    def _addresses(pieces: list[Bytes]) -> NDArray[np.uint64]:
        return np.array([piece.ctypes.data for piece in pieces], np.uint64)
