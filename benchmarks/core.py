"""Time the C++ core alone on real weights, without Python: `python benchmarks/core.py`.

A small program around the headers of `csrc/` (codecs/core.cpp) is compiled with the flags of
CMakeLists.txt and run on a data set, which it packs as one tensor: one thread, pinned to a core,
processor time, from memory and to memory. It checks every round trip first, bit for bit and against
the bytes of the portable loops. `docs/decisions.md` calls its figures *core*.

The command prints the medians and the best of the rounds, in GB/s of elements:

- **encode** includes the content hash and the CRC32C, **decode** the CRC32C;
- **decode-unchecked**, **hash** and **crc** are parts of these, and **copy** is memcpy;
- **plane-encode** and **plane-decode** are rANS on plane 0 of one chunk, from the middle of
  the data, which stays in the cache; `docs/decisions.md` calls these figures *loop*.

`--stages` shows instead where the encoder's time goes at level default: microseconds a chunk, and
cycles an element, of each stage; with `--elements N` of one tensor of N elements, which stays in
the cache. The stages are called one by one, and nothing is fetched ahead, so they add up to more
than a call.

`--chunk-log` and `--level` show the cost of a choice. Chunks that are smaller than the leaves of
the content hash, 256 KiB, are hashed one by one. To compare variants of the code, run the command
in two checkouts, in turn.

`--count` needs no ARM machine: it compiles the program for 64-bit ARM and runs it in an emulator
that counts instructions (Debian: g++-aarch64-linux-gnu qemu-user). It prints the instructions for
each element, on the portable path and with NEON. A count says nothing of caches and of how many
instructions a processor runs at once; on an ARM machine, the command without `--count` measures
speeds.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs.measure import cores
from benchmarks.common import machine
from benchmarks.common.process import find_compiler
from benchmarks.common.programs import compile_once
from benchmarks.data import sets

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "codecs" / "core.cpp"
PROGRAM = ROOT / "build" / "benchmarks" / "core"
COUNTER = ROOT / "benchmarks" / "codecs" / "count_instructions.cpp"
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# GCC's AVX-512 headers provoke the two warnings.
FLAGS = (
    *("-std=c++20", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    *(f"-I{ROOT / 'csrc'}", "-pthread"),
)
ROUNDS = 7
COUNTED_MB = 4  # counting is slow, and a few chunks say the same as many
STAGE_ROUNDS = 15


class Kind(NamedTuple):
    """A data set, and how its elements are cut.

    Attributes:
        data: name of the set.
        unit_nbytes: bytes of an element.
        chunk_log: log2 of the elements of a chunk.
    """

    data: str
    unit_nbytes: int
    chunk_log: int


KINDS = {
    "bf16": Kind("model_bf16", 2, 17),
    "fp16": Kind("model_fp16", 2, 17),
    "fp32": Kind("model_fp32", 4, 16),
    "fp8": Kind("fp8_e4m3", 1, 18),
    "fp8_block": Kind("fp8_block", 1, 18),
    "fp8_e5m2": Kind("fp8_e5m2", 1, 18),
}
SPLIT = 2  # of floats: exponents apart from mantissas
MAX_CHUNK_NBYTES = 1 << 20  # at level max, for the tables of classes


class Level(IntEnum):
    """Levels by the numbers that the core knows."""

    FAST = 1
    DEFAULT = 2
    MAX = 3


class Isa(IntEnum):
    """Code paths by the numbers that the core knows."""

    PORTABLE = 0
    NEON = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_VBMI2 = 4


class Timing(NamedTuple):
    """The measurements of one operation.

    Attributes:
        nbytes: of elements, each round.
        seconds: of the processor, for each round.
    """

    nbytes: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """GB/s."""
        return self.nbytes / statistics.median(self.seconds) / 1e9

    @property
    def best(self) -> float:
        """GB/s."""
        return self.nbytes / min(self.seconds) / 1e9


def main(argv: list[str]) -> int:
    """Compile the program if needed, run it, print what it measured.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if there is no compiler, or a round trip fails.
    """
    args = _parse(argv)
    if args.count:
        return _print_counts(args)
    compiler = find_compiler()
    if compiler is None:
        print("a C++ compiler is missing: install g++ or clang++, or name one in CXX")
        return 1
    kind = KINDS[args.dtype]
    array = sets.make(kind.data, limit_nbytes=args.first_mb and args.first_mb * 1_000_000).array
    isa = Isa[args.isa.upper()] if args.isa else best_isa()
    level = Level[args.level.upper()]
    chunk_log = args.chunk_log or _chunk_log(kind, level)
    if args.elements:
        array, chunk_log = _middle(array, args.elements), _whole_log(chunk_log, args.elements)
    try:
        if args.stages:
            print(f"{machine.describe()['cpu']}, {isa.name.lower()}, {kind.data}\n")
            print(table_of_stages(build(compiler), array, kind.unit_nbytes, chunk_log, isa))
            return 0
        packed_nbytes, timings = measure(
            build(compiler), array, kind.unit_nbytes, chunk_log, level, isa, args.rounds
        )
    except subprocess.CalledProcessError as error:
        print(f"{Path(error.cmd[0]).name} failed:\n{error.stderr}")
        return 1
    load, cpu = os.getloadavg()[0], machine.describe()["cpu"]
    print(f"{cpu}, {isa.name.lower()}, load {load:.1f}")
    print(
        f"{kind.data}, level {level.name.lower()}, 2^{chunk_log} units in a chunk, "
        f"{args.rounds} rounds: ratio {array.nbytes / packed_nbytes:.4f}\n"
    )
    print("| | median GB/s | best GB/s |\n|---|--:|--:|")
    for name, timing in timings.items():
        print(f"| {name} | {timing.median:.2f} | {timing.best:.2f} |")
    return 0


def _print_counts(args: argparse.Namespace) -> int:
    compiler = find_compiler()
    if compiler is None or not all(map(shutil.which, (ARM_COMPILER, EMULATOR))):
        print(f"{ARM_COMPILER} or {EMULATOR} is missing: install g++-aarch64-linux-gnu, qemu-user")
        return 1
    kind, level = KINDS[args.dtype], Level[args.level.upper()]
    array = sets.make(kind.data, limit_nbytes=(args.first_mb or COUNTED_MB) * 1_000_000).array
    chunk_log = args.chunk_log or _chunk_log(kind, level)
    program = build(ARM_COMPILER, PROGRAM.with_suffix(".arm"), more=("-static",))
    counter = build(compiler, PROGRAM.with_suffix(".so"), source=COUNTER, more=("-shared", "-fPIC"))
    columns = [
        count(program, counter, array, kind.unit_nbytes, chunk_log, level, isa)
        for isa in (Isa.PORTABLE, Isa.NEON)
    ]
    print(f"{kind.data}, level {level.name.lower()}: instructions of 64-bit ARM for each element\n")
    print("| | portable | NEON |\n|---|--:|--:|")
    for name in columns[0]:
        print(f"| {name} | {columns[0][name]:.2f} | {columns[1][name]:.2f} |")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", choices=KINDS, default="bf16")
    parser.add_argument(
        "--level", choices=[level.name.lower() for level in Level], default="default"
    )
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa], help="default: best")
    parser.add_argument("--chunk-log", type=int, metavar="N", help="log2 of the units of a chunk")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--stages", action="store_true", help="time the stages of the encoder")
    parser.add_argument("--elements", type=int, metavar="N", help="only N from the middle")
    parser.add_argument("--first-mb", type=int, metavar="N", help="only the first N MB of the set")
    parser.add_argument("--count", action="store_true", help="count instructions of ARM instead")
    return parser.parse_args(argv)


def _chunk_log(kind: Kind, level: Level) -> int:
    if level is Level.MAX:
        return (MAX_CHUNK_NBYTES // kind.unit_nbytes).bit_length() - 1
    return kind.chunk_log


def _middle(array: "np.ndarray[Any, Any]", n_elements: int) -> "np.ndarray[Any, Any]":
    first = max(0, (array.size - n_elements) // 2)
    return array[first : first + n_elements]


def _whole_log(chunk_log: int, n_elements: int) -> int:
    """A tensor of at most one and a half chunks is one chunk."""
    return chunk_log + (1 << chunk_log < n_elements <= 3 << (chunk_log - 1))


def best_isa() -> Isa:
    """The code path that the core would choose here."""
    from packhorse.codecs.base import choose_isa

    return Isa(choose_isa())


def available_isas() -> list[Isa]:
    """All code paths of this machine, weakest first."""
    from packhorse.codecs import base

    return [Isa(isa) for isa in base.available_isas()]


def build(
    compiler: str,
    program: Path = PROGRAM,
    optimisation: str = "-O3",
    source: Path = SOURCE,
    more: tuple[str, ...] = (),
) -> Path:
    """Compile the program unless it was compiled from what the sources are now.

    Args:
        compiler: path of the compiler.
        program: where the program goes.
        optimisation: how hard the compiler tries; by default as for the package.
        source: its source, beside the headers of the core.
        more: flags.

    Returns:
        Its path.

    Raises:
        subprocess.CalledProcessError: it does not compile; `stderr` says why.
    """
    headers = [*(ROOT / "csrc").rglob("*.hpp"), *(ROOT / "benchmarks" / "common").glob("*.hpp")]
    command = [compiler, optimisation, *FLAGS, *more, str(source)]
    compile_once(command, program, [source, *headers], ROOT)
    return program


def measure(
    program: Path,
    array: "np.ndarray[Any, Any]",
    unit_nbytes: int,
    chunk_log: int,
    level: Level,
    isa: Isa,
    rounds: int,
) -> tuple[int, dict[str, Timing]]:
    """Run the program.

    Args:
        program: the result of `build`.
        array: floats, which are packed as one tensor.
        unit_nbytes: bytes of one of them.
        chunk_log: log2 of the elements of a chunk.
        level: how hard the core tries.
        isa: the code path.
        rounds: how often each operation is timed.

    Returns:
        The packed bytes, and the measurements by name.

    Raises:
        subprocess.CalledProcessError: the program refuses its arguments or a round trip fails;
            `stderr` says which.
    """
    numbers = (unit_nbytes, SPLIT, chunk_log, int(level), int(isa), rounds)
    with cores(1):
        done = _run([str(program)], array, numbers)
    return _read(done.stdout)


def count(
    program: Path,
    counter: Path,
    array: "np.ndarray[Any, Any]",
    unit_nbytes: int,
    chunk_log: int,
    level: Level,
    isa: Isa,
) -> dict[str, float]:
    """Run the program for ARM in the emulator; see `measure` for the arguments.

    Returns:
        The instructions of each operation for each element, or byte of a plane.
    """
    emulated = [EMULATOR, "-plugin", str(counter), str(program)]
    numbers = (unit_nbytes, SPLIT, chunk_log, int(level), int(isa), 1)
    done = _run(emulated, array, numbers)
    counts = [int(line) for line in done.stderr.split()]
    _, timings = _read(done.stdout)
    used = zip(timings.items(), counts[::2], counts[1::2], strict=True)
    return {
        name: (end - begin) * (1 if name.startswith("plane") else unit_nbytes) / timing.nbytes
        for (name, timing), begin, end in used
    }


def _run(
    command: list[str], array: "np.ndarray[Any, Any]", numbers: tuple[int, ...]
) -> subprocess.CompletedProcess[str]:
    unit_nbytes, _, chunk_log, *_ = numbers
    with tempfile.TemporaryDirectory() as folder:
        source, plane = Path(folder) / "source", Path(folder) / "plane"
        array.tofile(source)
        first_plane(array, unit_nbytes, 1 << chunk_log).tofile(plane)
        arguments = [str(source), str(plane), *map(str, numbers)]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)


def _read(printed: str) -> tuple[int, dict[str, Timing]]:
    lines = [line.split() for line in printed.splitlines()]
    packed_nbytes = int(lines[0][1])
    return packed_nbytes, {
        name: Timing(int(nbytes), [float(word) for word in seconds])
        for name, nbytes, *seconds in lines[1:]
    }


def table_of_stages(
    program: Path,
    array: "np.ndarray[Any, Any]",
    unit_nbytes: int,
    chunk_log: int,
    isa: Isa,
    rounds: int = STAGE_ROUNDS,
) -> str:
    """Time the stages of the encoder.

    Args:
        program: the result of `build`.
        array: floats, which are packed as one tensor.
        unit_nbytes: bytes of one of them.
        chunk_log: log2 of the elements of a chunk.
        isa: the code path.
        rounds: how often everything is timed; the best counts.

    Returns:
        A table: microseconds a chunk and cycles an element by stage, then those of a whole call.

    Raises:
        subprocess.CalledProcessError: the program refuses its arguments; `stderr` says why.
    """
    with tempfile.TemporaryDirectory() as folder, cores(1):
        source = Path(folder) / "source"
        array.tofile(source)
        numbers = (unit_nbytes, SPLIT, chunk_log, int(Level.DEFAULT), int(isa), rounds)
        command = [str(program), str(source), "-", *map(str, numbers)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {name: float(number) for name, number in map(str.split, done.stdout.splitlines())}
    chunks, cycles = found.pop("chunks"), found.pop("cycles")
    lines = [
        f"| stage | us a chunk | cycles an element, at {cycles / 1e9:.2f} GHz |",
        "|---|--:|--:|",
    ]
    lines += [
        f"| {name} | {seconds / chunks * 1e6:.2f} | {seconds * cycles / array.size:.2f} |"
        for name, seconds in found.items()
    ]
    return "\n".join([*lines, f"\n{array.nbytes / found['whole-call'] / 1e9:.2f} GB/s"])


def first_plane(
    array: "np.ndarray[Any, Any]", unit_nbytes: int, n_units: int
) -> "np.ndarray[Any, Any]":
    """Plane 0 of `n_units` elements from the middle: their upper bits, with the sign moved away."""
    first = max(0, (array.size - n_units) // 2)
    units = array[first : first + n_units].view(f"<u{unit_nbytes}")
    if unit_nbytes == 1:
        return (units << 1 | units >> 7).astype(np.uint8)
    return (units >> (8 * unit_nbytes - 9)).astype(np.uint8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
