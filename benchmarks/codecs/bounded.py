"""Time bounded codes and their peers on rows of embeddings: `python benchmarks/codecs/bounded.py`.

Every arm proves its error first: ours must be within the bound for each element, and the largest
error of the others is printed beside the bound. Then each round runs all arms in turn, on one
thread, from memory and to memory that is reused where an arm can; times are processor time, and
each figure is the median of the rounds, in GB/s of F32 elements.

- **ours K**: codes of K bits, nearest or stochastic; **+ models** are these messages with rANS
  (docs/format.md, 13.2).
- **int8 rows**: what torchrec and FBGEMM do with rows, made with PyTorch: minimum, scale and 8 bits
  for each element of a row. **cast**: PyTorch's own casts.
- **zfp**, **SZ3**: codecs for arrays with the same absolute bound (packages zfpy and pysz; left out
  where they are missing). With zfpy 1.0.1.post0 installed, numcodecs and zarr cannot be imported,
  so put the two in a folder of their own: `pip install --no-deps --target DIR zfpy pysz`, and
  `PYTHONPATH=DIR`.

The bound for K bits is the one at which codes reach nearly all of the values. The second table has
the cost of small segments: 26 tables in one message.
"""

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import machine
from benchmarks.data import sets
from packhorse.codecs.base import choose_isa
from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    decode_bounded,
    encode_bounded,
    max_encoded_nbytes,
    read_segments,
)
from packhorse.codecs.bounded_models import CodeModel

__all__ = ["DATA", "Arm", "arms_for", "main", "measure", "prove", "small_segments"]

Rows = NDArray[np.float32]
ROUNDS = 11
BITS = (4, 6, 8)
N_TABLES = 26


class Arm(NamedTuple):
    """A codec with its numbers.

    Attributes:
        name: its name in the table.
        bound: of the error; None if it promises none.
        encode: makes a packed form of the rows.
        decode: makes rows of a packed form.
        nbytes: the bytes of a packed form.
    """

    name: str
    bound: float | None
    encode: Callable[[], Any]
    decode: Callable[[Any], Rows]
    nbytes: Callable[[Any], int]


class Figures(NamedTuple):
    """What was measured of an arm: its ratio, its largest error, and seconds of each round."""

    ratio: float
    error: float
    encode: list[float]
    decode: list[float]


# Data.


def table_rows(n_rows: int = 65_536, n_columns: int = 64, seed: int = 0) -> Rows:
    """Rows like those of a trained embedding table: some have moved, and have heavy tails; others
    are as they were initialised."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(-4.6, 0.75, (n_rows, 1)))
    rows = (scales * rng.standard_normal((n_rows, n_columns))).astype(np.float32)
    cold = rng.random(n_rows) < 0.3
    rows[cold] = rng.uniform(-0.003, 0.003, (int(cold.sum()), n_columns))
    return rows


def word_rows() -> Rows:
    """The word embeddings of a real model."""
    data = sets.make("model_fp32")
    return data.array[: 16_384 * 384].reshape(-1, 384).copy()


DATA: dict[str, Callable[[], Rows]] = {"table": table_rows, "words": word_rows}


# Arms.


def bound_for(rows: Rows, bits: int, rounding: Rounding) -> float:
    """The bound at which codes reach all but one value in two thousand."""
    spread = float(np.quantile(np.abs(rows), 0.9995))
    steps = 2 ** (bits - 1) - 1
    return 1.002 * spread / (2 * steps + 1 if rounding == Rounding.NEAREST else steps)


def our_arm(rows: Rows, bits: int, rounding: Rounding) -> Arm:
    segments = [Segment(rows.size, bound_for(rows, bits, rounding), bits)]
    out = np.empty(max_encoded_nbytes(segments, "F32"), np.uint8)
    decoded = np.empty_like(rows)

    def encode() -> Any:
        return encode_bounded(rows, "F32", segments, rounding=rounding, seed=1, out=out)

    def decode(message: Any) -> Rows:
        decode_bounded(message, decoded, dtype="F32")
        return decoded

    name = f"ours {bits}" + ("" if rounding == Rounding.NEAREST else " stochastic")
    return Arm(name, segments[0].bound, encode, decode, lambda message: message.nbytes)


def model_arm(rows: Rows, bits: int) -> Arm:
    """Our codes with models that an earlier message has brought."""
    plain = our_arm(rows, bits, Rounding.NEAREST)
    sender, receiver = CodeModel(refresh=1 << 30), CodeModel()
    first = plain.encode()
    most = first.nbytes
    receiver.decode(sender.encode(first), max_nbytes=most)

    def encode() -> bytes:
        return sender.encode(plain.encode())

    def decode(coded: bytes) -> Rows:
        return plain.decode(receiver.decode(coded, max_nbytes=most))

    return Arm(f"{plain.name} + models", plain.bound, encode, decode, len)


def int8_rows(rows: Rows) -> Arm:
    x, out = torch.from_numpy(rows), torch.empty(rows.shape)

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        scale = (high - low).div_(255).clamp_(min=1e-30)
        return (x - low).div_(scale).round_().to(torch.uint8), scale, low

    def decode(packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Rows:
        codes, scale, low = packed
        torch.mul(codes, scale, out=out)
        return out.add_(low).numpy()

    return Arm("int8 rows", None, encode, decode, lambda parts: sum(p.nbytes for p in parts))


def cast(rows: Rows, dtype: torch.dtype) -> Arm:
    x, out = torch.from_numpy(rows), torch.empty(rows.shape)
    packed = torch.empty(rows.shape, dtype=dtype)
    name = f"cast {str(dtype).removeprefix('torch.')}"
    return Arm(
        name,
        None,
        lambda: packed.copy_(x),
        lambda halves: out.copy_(halves).numpy(),
        lambda halves: int(halves.nbytes),
    )


def zfp_arm(rows: Rows, bits: int) -> Arm | None:
    zfpy = _package("zfpy")
    bound = bound_for(rows, bits, Rounding.NEAREST)
    return zfpy and Arm(
        f"zfp, bound of {bits}",
        bound,
        lambda: zfpy.compress_numpy(rows, tolerance=bound),
        zfpy.decompress_numpy,
        len,
    )


def sz3_arm(rows: Rows, bits: int) -> Arm | None:
    pysz = _package("pysz")
    if pysz is None:
        return None
    bound = bound_for(rows, bits, Rounding.NEAREST)
    config = pysz.szConfig(*rows.shape)
    config.errorBoundMode = pysz.szErrorBoundMode.ABS
    config.absErrorBound = bound
    return Arm(
        f"SZ3, bound of {bits}",
        bound,
        lambda: pysz.sz.compress(rows, config)[0],
        lambda packed: pysz.sz.decompress(packed, np.float32, rows.shape)[0],
        lambda packed: int(packed.nbytes),
    )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def arms_for(rows: Rows) -> Iterator[Arm]:
    """All arms that this machine has."""
    for bits in BITS:
        yield our_arm(rows, bits, Rounding.NEAREST)
        yield our_arm(rows, bits, Rounding.STOCHASTIC)
        yield model_arm(rows, bits)
    yield int8_rows(rows)
    yield cast(rows, torch.float16)
    yield cast(rows, torch.bfloat16)
    for bits in BITS:
        yield from filter(None, (zfp_arm(rows, bits), sz3_arm(rows, bits)))


# Measuring.


def prove(rows: Rows, arm: Arm) -> Figures:
    """The ratio and the largest error of an arm.

    Raises:
        AssertionError: one of ours is not within its bound.
    """
    packed = arm.encode()
    decoded = arm.decode(packed)
    error = float(np.abs(rows.astype(np.float64) - decoded.reshape(rows.shape)).max())
    if arm.name.startswith("ours"):
        assert arm.bound is not None
        assert error <= arm.bound, f"{arm.name}: the error is {error}"
    return Figures(rows.nbytes / arm.nbytes(packed), error, [], [])


def measure(rows: Rows, arms: list[Arm], rounds: int) -> dict[str, Figures]:
    """Proves all arms, then times them in turn."""
    found = {arm.name: prove(rows, arm) for arm in arms}
    gc.disable()
    for i in range(rounds):
        # Each round begins with another arm, so that none always follows the same one.
        for arm in arms[i % len(arms) :] + arms[: i % len(arms)]:
            start = time.process_time()
            packed = arm.encode()
            middle = time.process_time()
            arm.decode(packed)
            end = time.process_time()
            found[arm.name].encode.append(middle - start)
            found[arm.name].decode.append(end - middle)
    gc.enable()
    return found


def small_segments(n_elements: int, rounds: int) -> tuple[float, float]:
    """Microseconds to encode and to decode a message of 26 segments of some elements each."""
    rng = np.random.default_rng(3)
    rows = (0.01 * rng.standard_normal(N_TABLES * n_elements)).astype(np.float32)
    segments = [Segment(n_elements, 0.003, 4)] * N_TABLES
    out = np.empty(max_encoded_nbytes(segments, "F32"), np.uint8)
    decoded = np.empty_like(rows)
    n_calls = 200
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(n_calls):
            message = encode_bounded(rows, "F32", segments, out=out)
        middle = time.process_time()
        for _ in range(n_calls):
            decode_bounded(message, decoded, dtype="F32")
        seconds[0].append(middle - start)
        seconds[1].append(time.process_time() - middle)
    assert read_segments(message)[0].n == n_elements
    return tuple(1e6 * statistics.median(times) / n_calls for times in seconds)  # type: ignore[return-value]


def table(rows: Rows, arms: list[Arm], found: dict[str, Figures]) -> Iterator[str]:
    """The lines of a table."""
    yield f"{'arm':24} {'ratio':>6} {'bound':>9} {'error':>9} {'encode':>7} {'decode':>7}"
    for arm in arms:
        figures = found[arm.name]
        encode, decode = (
            rows.nbytes / statistics.median(seconds) / 1e9
            for seconds in (figures.encode, figures.decode)
        )
        bound = "none" if arm.bound is None else f"{arm.bound:.2e}"
        broken = arm.bound is not None and figures.error > arm.bound
        yield (
            f"{arm.name:24} {figures.ratio:6.2f} {bound:>9} {figures.error:9.2e}"
            f"{'!' if broken else ' '}{encode:7.2f} {decode:7.2f}"
        )


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Time bounded codes and their peers.")
    parser.add_argument("--data", choices=DATA, default="table", help="rows to code")
    parser.add_argument("--rows", type=int, help="only the first of them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = DATA[args.data]()[: args.rows]
    arms = list(arms_for(rows))
    print(f"{machine.describe()['cpu']}, {choose_isa().name.lower()}, one thread")
    print(f"{rows.shape[0]} rows of {rows.shape[1]} F32 ({args.data}); GB/s; ! bound broken\n")
    for line in table(rows, arms, measure(rows, arms, args.rounds)):
        print(line)
    print(f"\n{'segments':24} {'encode':>9} {'decode':>9}")
    for n in (100, 1000, 10_000):
        encode, decode = small_segments(n, args.rounds)
        print(f"{N_TABLES} of {n:6} elements{'':5} {encode:6.1f} us {decode:6.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
