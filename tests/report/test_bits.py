"""Entropies, exponents and packed sizes of tensors, against NumPy and against the packed file."""

import math
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cases import each
from real_model import model_path, real_tensors
from safetensors.numpy import save_file

import packhorse
import packhorse.numpy
from packhorse.disk import pack_file, unpack_file
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.bits import (
    FLOATS,
    PlaneCounts,
    bit_entropies,
    describe_tensor,
    entropy,
    exponent_rows,
)
from packhorse.reports.results import TensorRow
from packhorse.reports.sampling import choose_places, take_sample
from packhorse.reports.sources import Source, opened

DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
INTEGERS = {"I16": np.int16, "I32": np.int32, "I64": np.int64, "U8": np.uint8}


def shannon(values: np.ndarray) -> float:
    """Entropy the long way."""
    shares = [n / values.size for n in Counter(values.tolist()).values()]
    return -sum(share * math.log2(share) for share in shares)


def counted(data: np.ndarray, dtype: str) -> PlaneCounts:
    counts = PlaneCounts(dtype)
    counts.add(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return counts


def described(path: Path, share: float = 1.0) -> list[tuple[TensorRow, PlaneCounts]]:
    with opened(Source("it", str(path))) as file:
        return [
            describe_tensor(file, take_sample(file, entry, choose_places(entry, share)))
            for entry in file.entries
        ]


@each("dtype", [*DTYPES, *INTEGERS])
def test_entropy_of_each_bit(dtype: str) -> None:
    rng = np.random.default_rng(1)
    if dtype in DTYPES:
        values = (rng.standard_normal(5000) * 0.03).astype(DTYPES[dtype])
    else:
        values = rng.integers(0, 100, 5000).astype(INTEGERS[dtype])
    nbytes = DTYPE_BY_NAME[dtype].unit_nbytes
    bits = np.unpackbits(values.view(np.uint8).reshape(-1, nbytes)[:, ::-1], axis=1)
    expected = [shannon(bits[:, i]) for i in range(8 * nbytes)]
    assert bit_entropies(counted(values, dtype)) == pytest.approx(expected, abs=1e-12)


@each("dtype", DTYPES)
def test_exponents(dtype: str) -> None:
    values = np.array([1, 1.5, 2, 3, -4, 0.5, 0, -0.0], DTYPES[dtype])
    counts = counted(values, dtype)
    bias = FLOATS[dtype].bias
    assert {int(e) - bias: int(counts.exponents[e]) for e in np.flatnonzero(counts.exponents)} == {
        0: 2, 1: 2, 2: 1, -1: 1, -bias: 2,
    } or "FNUZ" in dtype  # there -0 is the pattern of NaN  # fmt: skip
    if "FNUZ" in dtype:
        assert counts.exponents[bias : bias + 3].tolist() == [2, 2, 1]


def test_planes_of_real_weights() -> None:
    tensor = real_tensors()["encoder.layer.0.attention.self.query.weight"]
    bits = tensor.view(np.uint16)
    counts = counted(tensor, "BF16")
    assert entropy(counts.planes[0]) == pytest.approx(shannon((bits >> 7 & 0xFF).reshape(-1)))
    rest = ((bits << 1) | (bits >> 15)) & 0xFF
    assert entropy(counts.planes[1]) == pytest.approx(shannon(rest.reshape(-1)))


def test_packed_bytes_are_those_of_the_packed_file(tmp_path: Path) -> None:
    plain, packed = tmp_path / "m.safetensors", tmp_path / "m.ph.safetensors"
    save_file(real_tensors(), plain)
    for level in ("fast", "default", "max"):
        pack_file(plain, packed, level=level, force=True)
        with packhorse.open_file(packed) as file:
            frames = dict(file.outlines())
        for row, _ in described(plain):
            assert row.levels[level].nbytes == frames[row.name].nbytes, (row.name, level)
            assert row.levels[level].error == 0
            if level == "default":
                assert row.split == frames[row.name].split.name.lower()
                modes = [plane.modes for plane in frames[row.name].planes()]
                expected = [{mode.name.lower(): n for mode, n in each.items()} for each in modes]
                assert [plane.modes for plane in row.planes] == expected or len(row.planes) == 1


def test_a_packed_file_is_described_like_its_original(tmp_path: Path) -> None:
    plain, packed = tmp_path / "m.safetensors", tmp_path / "m.ph.safetensors"
    save_file(real_tensors(), plain)
    pack_file(plain, packed)
    for (a, _), (b, _) in zip(described(plain), described(packed), strict=True):
        assert (a.levels, a.bound, a.planes, a.bit_entropies) == (
            b.levels, b.bound, b.planes, b.bit_entropies
        )  # fmt: skip
        assert b.packed_nbytes == b.levels["default"].nbytes
        assert a.packed_nbytes is None


def test_no_coder_of_single_values_beats_the_bound() -> None:
    rows = [row for row, _ in described(model_path()) if row.nbytes > 1 << 18]
    assert len(rows) > 10
    for row in rows:
        assert row.bound.nbytes <= row.levels["default"].nbytes < row.bound.nbytes * 1.02, row.name


def test_samples_tell_the_packed_size_within_their_error(tmp_path: Path) -> None:
    """Of 36 matrices with error bars of two standard errors, about two may lie outside."""
    whole = {row.name: row for row, _ in described(model_path())}
    sampled = {row.name: row for row, _ in described(model_path(), 0.2)}
    wrong = [
        name
        for name, row in sampled.items()
        if row.sampled_nbytes < row.nbytes
        and abs(row.levels["default"].nbytes - whole[name].levels["default"].nbytes)
        > row.levels["default"].error + row.nbytes * 0.002
    ]
    assert sum(row.sampled_nbytes < row.nbytes for row in sampled.values()) > 10
    assert len(wrong) <= 4, wrong


@each("name, dtype, shape", [
    ("empty", np.float32, (0, 3)), ("scalar", ml_dtypes.bfloat16, ()), ("one", np.int64, (1,)),
    ("mask", np.bool_, (3000,)), ("tiny", ml_dtypes.float8_e4m3fn, (7, 9)),
])  # fmt: skip
def test_odd_tensors(tmp_path: Path, name: str, dtype: type, shape: tuple[int, ...]) -> None:
    path = tmp_path / "m.safetensors"
    packed = tmp_path / "m.ph.safetensors"
    packhorse.numpy.save_file({name: np.ones(shape, dtype)}, packed)
    unpack_file(packed, path, force=True)
    (row, counts), = described(path)  # fmt: skip
    assert row.name == name
    assert row.nbytes == np.ones(shape, dtype).nbytes
    assert row.bound.nbytes == 0
    assert set(row.bit_entropies) == {0.0}
    assert sum(sum(each.shares) + each.zeros for each in exponent_rows([(row, counts)])) in (
        0, pytest.approx(1)
    )  # fmt: skip
