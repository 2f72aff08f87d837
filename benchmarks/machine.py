"""What a reader must know of the machine to compare its figures with theirs."""

import os
import platform
from pathlib import Path

__all__ = ["describe"]

# What a codec here may use; the rest of the processor's list says nothing about these figures.
RELEVANT_FLAGS = (
    *("ssse3", "sse4_1", "sse4_2", "avx2", "bmi2", "gfni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vbmi", "avx512_vbmi2"),
    *("asimd", "sve"),
)


def describe() -> dict[str, str | int | list[str]]:
    """The processor with the instruction sets that matter, cores, memory, system and Python."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "family_model_stepping": "/".join(
            fields.get(key, "?") for key in ("cpu family", "model", "stepping")
        ),
        "flags": [flag for flag in RELEVANT_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo, nothing where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", maxsplit=1)[0]
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }
