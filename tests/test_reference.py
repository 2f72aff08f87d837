"""The slow decoder reads every legal frame, and notices every truncation and every flipped bit."""

import ast
import random
import struct
from dataclasses import replace
from pathlib import Path

import frame_builder as fb
import pytest
import xxhash
from frame_builder import Constant, Palette, Rans, Stored, Zstd, build_frame

from packhorse import reference
from packhorse.errors import PackhorseError, TruncationError
from packhorse.layout import DTYPE_BY_NAME, DTYPES
from packhorse.reference import content_hash, decode_frame

# Units of the tensor, and log2 of the units of a chunk.
SIZES = ((0, 6), (1, 6), (63, 6), (64, 6), (65, 6), (1000, 9))
ALL_BYTES = tuple(range(256))

# id -> coding of every one-byte plane, and how many values its units may take
BYTE_CODINGS = {
    "stored": (Stored(), 256),
    "constant": (Constant(), 1),
    **{f"palette{bits}": (Palette(bits, has_escape=False), 1 << bits) for bits in range(1, 5)},
    **{f"palette{bits}-escape": (Palette(bits), 40) for bits in range(1, 5)},
    **{f"rans-{1 << log}-lanes": (Rans(log), 20) for log in range(2, 8)},
    "rans-alias-escape": (Rans(4, mapped=tuple(range(31))), 40),
    "rans-31-codes": (Rans(2, mapped=tuple(range(100, 131))), 40),
    "rans-plain-256": (Rans(5, mapped=ALL_BYTES), 200),
    "rans-plain-escape": (Rans(3, mapped=tuple(range(0, 256, 3))), 200),
    "rans-32-codes": (Rans(2, mapped=tuple(range(31)), escape_frequency=1000), 40),
    "rans-33-codes": (Rans(2, mapped=tuple(range(32)), escape_frequency=1000), 40),
}
DTYPE_SPLITS = [(row.name, int(split)) for row in DTYPES for split in row.splits]
# A coding sees bytes alone: all of them for one dtype of each way to split, some for each other.
ALL_CODINGS_FOR = {"U8", "BF16", "U16", "F32", "F64"}
SOME_CODINGS = ("stored", "constant", "palette3-escape", "rans-32-lanes", "rans-plain-escape")
BYTE_CASES = [
    pytest.param(name, split, coding, id=f"{name}-{split}-{coding}")
    for name, split in DTYPE_SPLITS
    for coding in (BYTE_CODINGS if name in ALL_CODINGS_FOR else SOME_CODINGS)
    if split or DTYPE_BY_NAME[name].unit_nbytes == 1
]


def n_planes(dtype: str, split: int) -> int:
    return DTYPE_BY_NAME[dtype].unit_nbytes if split else 1


def check_round_trip(data: bytes, dtype: str, codings: list, split: int, chunk_log: int) -> None:
    # F6 has 4 elements in 3 bytes: trim to whole elements, or the shape would not be one.
    bits = DTYPE_BY_NAME[dtype].bits
    data = data[: len(data) - len(data) % (3 if bits == 6 else max(1, bits // 8))]
    frame = bytes(build_frame(data, dtype, codings=codings, split=split, chunk_log=chunk_log))
    decoded = decode_frame(frame)
    assert decoded.data == data
    assert (decoded.dtype, decoded.shape) == (dtype, (len(data) * 8 // bits,))
    assert all(modes == tuple(c.mode for c in codings) for modes in decoded.modes)


@pytest.mark.parametrize(("dtype", "split", "coding"), BYTE_CASES)
def test_byte_planes_round_trip(dtype: str, split: int, coding: str) -> None:
    how, n_values = BYTE_CODINGS[coding]
    for n, chunk_log in SIZES:
        data = fb.units_of_values(n, DTYPE_BY_NAME[dtype].unit_nbytes, n_values, seed=n)
        check_round_trip(data, dtype, [how] * n_planes(dtype, split), split, chunk_log)


@pytest.mark.parametrize(("dtype", "split"), [pair for pair in DTYPE_SPLITS if pair[1]])
@pytest.mark.parametrize("lanes_log", [2, 4, 7])
def test_rans_planes_carry_bytes_of_the_last_stored_plane(
    dtype: str, split: int, lanes_log: int
) -> None:
    planes = n_planes(dtype, split)
    for n in (0, 1, 63, 64, 65, 1000, 8 << lanes_log):
        data = fb.units_of_values(n, DTYPE_BY_NAME[dtype].unit_nbytes, 90, seed=n)
        codings = [Rans(lanes_log), *[Stored()] * (planes - 1)]
        check_round_trip(data, dtype, codings, split, chunk_log=10)
        check_round_trip(data, dtype, [*codings[1:], codings[0]], split, chunk_log=10)
        several = [Rans(lanes_log), Stored(), *[Rans(2), Palette(4), Stored(), Rans(3)] * 2]
        check_round_trip(data, dtype, several[:planes], split, chunk_log=10)


def test_a_carrier_may_be_carried_to_the_last_byte() -> None:
    data = fb.units_of_values(64, 2, 30)
    frame = build_frame(data, "BF16", codings=[Rans(5), Stored()], split=2)
    assert frame.streams[0, 1][1] == 0
    assert decode_frame(bytes(frame)).data == data


@pytest.mark.parametrize(("dtype", "split"), [pair for pair in DTYPE_SPLITS if not pair[1]])
@pytest.mark.parametrize(
    "coding", [Stored(), Constant(), Zstd()], ids=["stored", "constant", "zstd"]
)
def test_whole_units_round_trip(dtype: str, split: int, coding: fb.Coding) -> None:
    n_values = 1 if isinstance(coding, Constant) else 50
    for n, chunk_log in SIZES:
        data = fb.units_of_values(n, DTYPE_BY_NAME[dtype].unit_nbytes, n_values, seed=n)
        check_round_trip(data, dtype, [coding], split, chunk_log)


@pytest.mark.parametrize(
    ("dtype", "split"), [p for p in DTYPE_SPLITS if DTYPE_BY_NAME[p[0]].unit_nbytes == 2]
)
def test_every_16_bit_pattern_survives(dtype: str, split: int) -> None:
    data = struct.pack("<65536H", *range(65536))
    codings = [Rans(5, mapped=ALL_BYTES), Stored()] if split else [Stored()]
    frame = build_frame(data, dtype, codings=codings, split=split, chunk_log=14)
    assert decode_frame(bytes(frame)).data == data


def test_the_float_split_gathers_the_exponent() -> None:
    """A constant plane decodes only if the encoder and the page agree on which bits it holds."""
    rng = random.Random(1)
    for dtype, code, exponent_bits in (("F32", "<I", 8), ("F64", "<Q", 11), ("BF16", "<H", 8)):
        width = DTYPE_BY_NAME[dtype].bits
        low_bits = width - 1 - exponent_bits
        values = [
            rng.getrandbits(1) << width - 1 | 0x81 << low_bits | rng.getrandbits(low_bits)
            for _ in range(100)
        ]
        data = b"".join(struct.pack(code, value) for value in values)
        codings = [Constant(), *[Stored()] * (DTYPE_BY_NAME[dtype].unit_nbytes - 1)]
        frame = build_frame(data, dtype, codings=codings, split=2, chunk_log=7)
        assert decode_frame(bytes(frame)).data == data
        assert frame.data[frame.streams[0, 0][0]] == 0x81


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 2), (6, 1, 1), (0,), (5, 0, 7), (1,) * 64])
def test_shapes_survive(shape: tuple[int, ...]) -> None:
    data = bytes(range(2 * shape_numel(shape)))
    decoded = decode_frame(bytes(build_frame(data, "F16", shape, codings=[Stored()])))
    assert (decoded.shape, decoded.data) == (shape, data)


def shape_numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for dim in shape:
        numel *= dim
    return numel


@pytest.mark.parametrize("n", [0, 1, 262143, 262144, 262145, 524288, 600000])
def test_content_hash_is_a_tree_of_leaves(n: int) -> None:
    data = random.Random(n).randbytes(n)
    leaves = [xxhash.xxh3_128_digest(data[i : i + 262144]) for i in range(0, n, 262144)]
    whole = xxhash.xxh3_128_digest(data)
    assert content_hash(data) == (
        whole if n <= 262144 else xxhash.xxh3_128_digest(b"".join(leaves))
    )


def test_content_hash_of_nothing_is_the_published_one() -> None:
    assert content_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_any_level_byte_is_read() -> None:
    frame = fb.SMALL["stored"]().lie(level=77)
    assert decode_frame(bytes(frame)).level == 77


def test_reference_shares_no_code_with_the_fast_paths() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
            modules |= set(names) if node.module == "packhorse" else {str(node.module)}
    ours = {module for module in modules if module.startswith("packhorse")}
    assert ours == {"packhorse.layout", "packhorse.errors"}
    assert not modules & {"numpy", "torch", "ml_dtypes"}


@pytest.mark.parametrize("name", fb.SMALL)
def test_every_truncation_is_reported(name: str) -> None:
    whole = bytes(fb.SMALL[name]())
    for length in range(len(whole)):
        with pytest.raises(TruncationError, match=r"ends at byte offset"):
            decode_frame(whole[:length])


@pytest.mark.parametrize("name", fb.SMALL)
def test_every_flipped_bit_is_noticed(name: str) -> None:
    whole = bytes(fb.SMALL[name]())
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackhorseError):
            decode_frame(bytes(damaged))


@pytest.mark.parametrize("name", fb.SMALL)
def test_a_flipped_bit_under_new_checksums_is_refused_or_harmless(name: str) -> None:
    """The content hash still tells the truth, so what decodes at all must be the same bytes."""
    whole = fb.SMALL[name]()
    for bit in range(8 * len(whole.data)):
        damaged = replace(whole, data=bytearray(whole.data))
        damaged.patch(bit // 8, bytes([whole.data[bit // 8] ^ 1 << bit % 8]))
        try:
            decoded = decode_frame(bytes(damaged))
        except PackhorseError:
            continue
        assert decoded.data == whole.source, f"bit {bit}"
