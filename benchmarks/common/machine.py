"""Describe the machine, so that readers can compare its figures with their own."""

import hashlib
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["core_scaling", "describe"]

# Instruction sets that codecs may use; the rest of the processor's list does not matter here.
RELEVANT_FLAGS = (
    *("ssse3", "sse4_1", "sse4_2", "avx2", "bmi2", "gfni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vbmi", "avx512_vbmi2"),
    *("asimd", "sve"),
)

CACHE_FILES = ("type", "level", "size")


def describe() -> dict[str, str | int | list[str]]:
    """The processor, its instruction sets that matter and its caches, memory, system and Python."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "family_model_stepping": "/".join(
            fields.get(key, "?") for key in ("cpu family", "model", "stepping")
        ),
        "flags": [flag for flag in RELEVANT_FLAGS if flag in flags],
        "caches": _caches(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
    }


def core_scaling(rounds: int = 7) -> float:
    """How much more work two threads do than one, if memory does not limit them: SHA-256 in the
    cache.

    2.0 means that the machine gives two cores. Near 1 it gives only one, because the two are
    threads of one core, or because other work runs. Figures for two threads cannot be better than
    this. The result is the median of some rounds.
    """
    block = bytes(1 << 17)

    def work(_: int) -> None:
        for _ in range(200):
            hashlib.sha256(block)

    def seconds(n_threads: int) -> float:
        start = time.perf_counter()
        list(pool.map(work, range(n_threads)))
        return time.perf_counter() - start

    with ThreadPoolExecutor(2) as pool:
        seconds(2)  # start both threads
        scalings = sorted(2 * seconds(1) / seconds(2) for _ in range(rounds))
    return round(scalings[rounds // 2], 2)


def _caches() -> list[str]:
    """The data caches of the first core, as the system reports them: "L2 1024K" and so on."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    told = [[(folder / name).read_text().strip() for name in CACHE_FILES] for folder in folders]
    return [f"L{level} {size}" for kind, level, size in told if kind != "Instruction"]


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", maxsplit=1)[0]
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }
