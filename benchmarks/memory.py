"""Measure peak memory of packing and unpacking a large file: `python benchmarks/memory.py`.

A file of four tensors of 1 GiB is packed in one process and unpacked in another. The figure is
the largest resident set of that process, including mapped pages of the files, minus that of a
process that only imports the package. The command exits 1 if the figure reaches `LIMIT_NBYTES`.
"""

import argparse
import filecmp
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs import report

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "memory.json"
DOCUMENT = HERE.parent / "docs" / "benchmarks_codecs.md"
LIMIT_NBYTES = 1 << 30
SEED = 20240607

# VmHWM belongs to the program that runs now; ru_maxrss would carry over the peak of the process
# that forked it.
CHILD = """
import sys
from pathlib import Path
from packhorse.disk import pack_file, unpack_file
verb, paths = sys.argv[1], [Path(p) for p in sys.argv[2:]]
{"idle": lambda *_: None, "pack": pack_file, "unpack": unpack_file}[verb](*paths)
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def main(argv: list[str]) -> int:
    """Make the file, pack it, unpack it, print the peaks.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if a peak reaches the limit.
    """
    parser = argparse.ArgumentParser(description="Peak memory of packing a large file.")
    parser.add_argument("--tensors", type=int, default=4, metavar="N")
    parser.add_argument("--mib", type=int, default=1024, metavar="N", help="MiB of each tensor")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the files are made")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = _measure(Path(folder), args.tensors, args.mib << 20)
    for verb in ("pack", "unpack"):
        print(f"{verb}: {result[f'{verb}_above_nbytes'] / 2**20:.0f} MiB above the interpreter")
    if args.write:
        RESULT.write_text(json.dumps({"kind": "memory", **result}, indent=1) + "\n")
        DOCUMENT.write_text(report.document(RESULT.parent))
    return int(max(result["pack_above_nbytes"], result["unpack_above_nbytes"]) >= LIMIT_NBYTES)


def _measure(folder: Path, n_tensors: int, tensor_nbytes: int) -> dict[str, int]:
    source, packed, back = (folder / name for name in ("a.safetensors", "b", "c"))
    _write_file(source, n_tensors, tensor_nbytes)
    idle = _peak("idle")
    result: dict[str, int] = {
        "n_tensors": n_tensors,
        "tensor_nbytes": tensor_nbytes,
        "idle_nbytes": idle,
        "pack_above_nbytes": _peak("pack", source, packed) - idle,
        "unpack_above_nbytes": _peak("unpack", packed, back) - idle,
    }
    if not filecmp.cmp(source, back, shallow=False):
        raise RuntimeError(f"{source.name} is not restored byte for byte")
    return result


def _write_file(path: Path, n_tensors: int, tensor_nbytes: int) -> None:
    """A safetensors file of bf16 tensors, gaussian, each with a scale of its own."""
    shape = [tensor_nbytes // 2]
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [i * tensor_nbytes, (i + 1) * tensor_nbytes],
        }
        for i in range(n_tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = np.random.default_rng(SEED).standard_normal(shape[0], np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(n_tensors):
            scale = np.float32(0.01 * 1.1**i)
            file.write((block * scale).astype(ml_dtypes.bfloat16).view(np.uint8).data)


def _peak(verb: str, *paths: Path) -> int:
    """The greatest resident set of a process that does `verb`, in bytes."""
    command = [sys.executable, "-c", CHILD, verb, *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) << 10


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
