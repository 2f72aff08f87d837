"""The comparison with other engines: what is restored, how sizes are counted, and who loses."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from update_samples import masters, train_step

from packhorse.layout import DTYPES
from packhorse.reports.engines import compare_engines, huffman_nbytes
from packhorse.reports.results import EngineTable

ENGINES = ["gzip 6", "bz2 9", "xz 6", "zstd 3", "lz4"]
OURS = ["Packhorse fast", "Packhorse default", "Packhorse max"]
WIDTH = 384
SAMPLE_NBYTES = 1024 * 2 * WIDTH


def _bf16(weights: dict[str, np.ndarray[Any, Any]]) -> bytes:
    parts = [t.astype(ml_dtypes.bfloat16).tobytes() for t in weights.values()]
    return b"".join(parts)[:SAMPLE_NBYTES]


@pytest.fixture(scope="module")
def states() -> tuple[bytes, bytes]:
    """Real weights in bf16, and the same after a small step."""
    weights = masters(1)
    before = _bf16(weights)
    train_step(weights, 1e-4, seed=1)
    return before, _bf16(weights)


def _ratios(table: EngineTable) -> dict[str, float]:
    return {row.name: row.nbytes / row.packed_nbytes for row in table.rows}


def test_real_weights_are_packed_in_all_ways_and_not_changed(states: tuple[bytes, bytes]) -> None:
    sample = bytearray(states[0])
    table = compare_engines(sample, "BF16", seconds=1, title="weights", shape=(1024, WIDTH))
    assert sample == states[0]
    assert (table.title, table.has_base, table.skipped) == ("weights", False, {})
    ratios = _ratios(table)
    rivals = ["LMC: Huffman, grouped", "Huffman of zlib, grouped", "zipnn", "openzl"]
    assert [*ratios] == [*ENGINES, *(f"{name}, grouped" for name in ENGINES), *rivals, *OURS]
    assert 1.45 < ratios["LMC: Huffman, grouped"] < ratios["Packhorse default"] < 1.6
    lmc = ratios["LMC: Huffman, grouped"]
    assert ratios["Huffman of zlib, grouped"] == pytest.approx(lmc, rel=0.01)
    for row in table.rows:
        assert row.is_ours == (row.name in OURS)
        assert (row.pack_gb_per_s is None) == row.note.startswith("size only")
    assert {row.name for row in table.rows if row.loses} >= {"gzip 6", "bz2 9", "xz 6"}


def test_differences_are_packed_where_there_is_a_base(states: tuple[bytes, bytes]) -> None:
    before, after = map(bytearray, states)
    table = compare_engines(after, "BF16", before, seconds=1)
    assert (before, after) == states
    assert table.has_base
    ratios = _ratios(table)
    assert "zstd 3, XOR" in ratios
    assert "zstd 3, XOR, grouped" in ratios
    assert max(ratios, key=ratios.__getitem__) == "Packhorse max, delta"
    xor = np.frombuffer(before, np.uint8) ^ np.frombuffer(after, np.uint8)
    groups = xor[0::2], xor[1::2]
    wanted = sum(huffman_nbytes(np.bincount(group, minlength=256)) for group in groups)
    assert ratios["LMC: Huffman, XOR, grouped"] == len(after) / wanted


def _bits_by_lengths(counts: list[int]) -> int:
    """The bits of all codes by the length of each symbol's code, from a tree built with lists."""
    nodes = [(n, [symbol]) for symbol, n in enumerate(counts) if n]
    lengths = dict.fromkeys(range(len(counts)), 0)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[0], reverse=True)
        one, other = nodes.pop(), nodes.pop()
        nodes.append((one[0] + other[0], one[1] + other[1]))
        for symbol in nodes[-1][1]:
            lengths[symbol] += 1
    return sum(n * lengths[symbol] for symbol, n in enumerate(counts))


@pytest.mark.parametrize("spread", [0.3, 1, 4, 30])
def test_huffman_sizes_are_those_of_the_tree_and_near_the_entropy(spread: float) -> None:
    values = np.random.default_rng(0).normal(128, spread, 20_000).clip(0, 255).astype(np.uint8)
    counts = np.bincount(values, minlength=256)
    n_bits = _bits_by_lengths(counts.tolist())
    table = int(values.max()) + 1
    assert huffman_nbytes(counts) == table + -(-n_bits // 8)
    shares = counts[counts > 0] / values.size
    entropy = -(shares * np.log2(shares)).sum()
    assert entropy <= n_bits / values.size < max(entropy + 0.5, 1.1)


def test_huffman_takes_a_bit_for_a_single_value_and_nothing_for_none() -> None:
    assert huffman_nbytes(np.bincount([5] * 17, minlength=256)) == 6 + 3
    assert huffman_nbytes(np.zeros(256, np.int64)) == 0


@pytest.mark.parametrize("dtype", [row.name for row in DTYPES])
def test_every_dtype_is_compared_and_noise_is_packed_by_nobody(dtype: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 12 << 10, np.uint8).tobytes()
    table = compare_engines(noise, dtype, seconds=0.01)
    assert max(_ratios(table).values()) < 1.001
    assert _ratios(table)["Packhorse default"] > 0.97
    assert ("grouped" in table.skipped) == all("grouped" not in row.name for row in table.rows)


def test_slow_engines_get_less_and_say_so(states: tuple[bytes, bytes]) -> None:
    rows = {row.name: row for row in compare_engines(states[0], "BF16", seconds=0.3).rows}
    assert 1 << 18 <= rows["xz 6"].nbytes < SAMPLE_NBYTES
    assert rows["Packhorse fast"].nbytes == SAMPLE_NBYTES


def test_engines_that_are_missing_or_do_not_fit_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("lz4.block", "openzl.ext"):
        monkeypatch.setitem(sys.modules, name, None)
    table = compare_engines(bytes(1 << 12), "I64", seconds=0.01)
    assert table.skipped["lz4"].endswith("pip install lz4")
    assert table.skipped["openzl"].endswith("pip install openzl")
    assert table.skipped["zipnn"].startswith("it packs no I64")
    assert not {"lz4", "openzl", "zipnn"} & _ratios(table).keys()


def test_rival_that_fails_is_left_out_and_a_way_of_ours_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bz2.decompress", lambda packed: bytes(1 << 12))
    table = compare_engines(b"\1" * (1 << 12), "U8", seconds=0.01)
    reason = "it failed on this sample: bz2 9 does not restore it bit for bit"
    assert table.skipped["bz2 9"] == reason
    assert "bz2 9" not in _ratios(table)
    monkeypatch.setattr("packhorse.frame.Frame.decompress_into", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="Packhorse fast does not restore it bit for bit"):
        compare_engines(b"\1" * (1 << 12), "U8", seconds=0.01)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_tiny_samples_are_compared(dtype: str) -> None:
    for numel in (1, 3, 17):
        nbytes = numel * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
        sample = np.arange(nbytes, dtype=np.uint8)
        for base in (None, sample[::-1].copy()):
            rows = compare_engines(sample, dtype, base, seconds=0.01).rows
            assert {"zstd 3" + ", XOR" * (base is not None)} <= {row.name for row in rows}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((b"12345678", "BF17"), {}, "dtype 'BF17' is unknown; known are BOOL, U8"),
        ((b"123", "BF16"), {}, "3 bytes, which are not elements of BF16"),
        ((b"", "BF16"), {}, "0 bytes, which are not"),
        ((b"1234", "BF16", b"12"), {}, "the base has 2 bytes, the sample 4"),
        ((b"1234", "BF16"), {"shape": (3,)}, r"shape \(3,\) does not fit a sample of 2 elements"),
        ((b"1234", "BF16"), {"seconds": 0}, "seconds is 0; it must be positive"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare_engines(*arguments, **{"seconds": 0.01, **options})
