"""Units of any dtype that lead the encoder to each of its modes: what seeds are made of."""

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.layout import DType, Split

__all__ = [
    "FEW",
    "KINDS",
    "PLANES",
    "make_halves",
    "make_matrix",
    "make_plane",
    "make_runs",
    "make_step",
    "make_units",
]

KINDS = ("constant", "few", "phrases", "weights", "noise")
_N_UNITS = 384  # coded streams begin to pay at about this length
FEW = 0.05  # the scale of a step that changes few units


def make_units(kind: str, dtype: DType, n: int = _N_UNITS) -> bytes:
    """Units of a dtype that make the encoder choose one mode or another."""
    rng = np.random.default_rng([len(kind), dtype.code, n])
    size = dtype.unit_nbytes
    noise = rng.integers(0, 256, (n, size), np.uint8)
    if kind == "constant":
        return noise[:1].tobytes() * n
    if kind == "few":
        return noise[np.minimum(rng.geometric(0.5, n) - 1, 5)].tobytes()
    if kind == "phrases":
        return np.resize(noise[:41], (n, size)).tobytes()
    if kind == "weights":  # a skewed byte on top of noise, where the exponent is
        noise[:, -1] = np.minimum(rng.geometric(0.3, n), 60) + 90
        return (noise.view(f"<u{size}") >> int(Split.FLOAT in dtype.splits)).tobytes()
    return noise.tobytes()


def make_matrix(dtype: DType, n_rows: int, n_columns: int) -> bytes:
    """Units whose exponents nearly follow from row and column."""
    rng = np.random.default_rng([dtype.code, n_rows, n_columns])
    logs = rng.normal(0, 4, (n_rows, 1)) + rng.normal(0, 4, n_columns)
    logs = logs + rng.normal(0, 0.3, (n_rows, n_columns))
    # Small values are powers of two, so that the exponent predicts something about the mantissa.
    values = rng.choice([-1, 1], logs.shape) * np.exp2(np.where(logs > 0, logs, np.floor(logs)))
    if dtype.unit_nbytes == 1:
        exponents = np.clip(logs / 6 + 16, 0, 31).astype(np.uint8)
        return (exponents << 2 | rng.integers(0, 4, logs.shape, np.uint8)).tobytes()
    bits = values.astype(np.float64 if dtype.unit_nbytes == 8 else np.float32)
    units = bits.view(f"<u{bits.itemsize}") >> 8 * max(0, bits.itemsize - dtype.unit_nbytes)
    return units.astype(f"<u{dtype.unit_nbytes}").tobytes()


# The number of values of a plane, and how much their frequencies differ.
PLANES = ((2, 0.9), (5, 0.5), (20, 0.2), (50, 0.06), (200, 0.02), (256, 0.1))


def make_plane(n: int, n_values: int, skew: float) -> ByteArray:
    """Bytes with this many different values, which are scattered so that no bit is noise."""
    rng = np.random.default_rng([n, n_values])
    ranks = np.minimum(rng.geometric(skew, n), n_values) - 1
    return rng.permutation(256)[ranks].astype(np.uint8)


def make_runs(unit_nbytes: int) -> dict[str, np.ndarray]:
    """Runs of numbers that occurred before, and steps."""
    unit, rng = np.dtype(f"u{unit_nbytes}"), np.random.default_rng(unit_nbytes)
    words = rng.integers(0, 30_000, (12, 9)).astype(unit)
    phrases = words[rng.integers(0, 12, 300)].reshape(-1)
    return {"phrases": phrases, "rising": np.cumsum(rng.integers(1, 9, 2000)).astype(unit)}


def make_halves(n: int) -> bytes:
    """Numbers of four bits, two in each of `n` bytes."""
    halves = np.random.default_rng(4).binomial(15, 0.4, (n, 2)).astype(np.uint8)
    return (halves[:, 0] | halves[:, 1] << 4).tobytes()


def make_step(base: bytes, unit_nbytes: int, scale: float) -> bytes:
    """Units that are a few steps away from those of a base; some of them are far away. If the scale
    is `FEW`, only one in 20 is another one than in the base."""
    units = np.frombuffer(base, f"<u{unit_nbytes}")
    rng = np.random.default_rng([unit_nbytes, units.size])
    if scale == FEW:
        near = rng.choice([-1, 1, 1, 3, -90], units.size) * (rng.random(units.size) < 0.05)
        return (units + near.astype(np.int64).view(np.uint64).astype(units.dtype)).tobytes()
    away = rng.normal(0, scale, units.size).astype(np.int64).view(np.uint64)
    far = rng.integers(0, 1 << 64, units.size, np.uint64) * (rng.random(units.size) < 0.01)
    return (units + (away + far).astype(units.dtype)).tobytes()
