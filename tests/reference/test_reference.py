"""The slow decoder reads every legal frame, and notices every truncation and flipped bits."""

import ast
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
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
    **{f"palette{bits}": (Palette(bits, has_escape=False), 1 << bits) for bits in range(5)},
    **{f"palette{bits}-escape": (Palette(bits), 40) for bits in range(1, 5)},
    **{f"palette-raw{bits}": (Palette(2, raw_bits=bits), 200) for bits in range(1, 9)},
    "palette-raw-only": (Palette(0, has_escape=False, raw_bits=8), 200),
    "palette-raw-zeros": (Palette(0, has_escape=False, raw_bits=8), 1),
    "palette-raw-mask": (Palette(3, raw_bits=6, raw_mask=0x3F), 1),
    **{f"rans-{1 << log}-lanes": (Rans(log), 20) for log in range(2, 8)},
    **{f"rans-raw{bits}": (Rans(4, raw_bits=bits), 200) for bits in range(1, 8)},
    "rans-raw-escape": (Rans(2, raw_bits=3, mapped=(0, 5, 31)), 200),
    "rans-raw-all-symbols": (Rans(7, raw_bits=4, mapped=tuple(range(16))), 200),
    "rans-raw-mask": (Rans(3, raw_bits=5, raw_mask=0x1F), 3),
    "rans-margin": (Rans(3, mapped=(7, 200), margin=(7, 55)), 40),
    "rans-alias-escape": (Rans(4, mapped=tuple(range(31))), 40),
    "rans-31-codes": (Rans(2, mapped=tuple(range(100, 130))), 40),
    "rans-32-codes": (Rans(2, mapped=tuple(range(31)), escape_frequency=1000), 40),
    "rans-33-codes": (Rans(2, mapped=tuple(range(32)), escape_frequency=1000), 40),
    "rans-64-codes": (Rans(7, mapped=tuple(range(63)), escape_frequency=1000), 40),
    "rans-65-codes": (Rans(2, mapped=tuple(range(64)), escape_frequency=1000), 40),
    "rans-wide-values": (Rans(5), 55),
    "rans-plain-256": (Rans(5, mapped=ALL_BYTES), 200),
    "rans-plain-escape": (Rans(3, mapped=tuple(range(0, 256, 3))), 200),
}
ALL_SMALL = {**fb.SMALL, **fb.DELTAS}
DTYPE_SPLITS = [(row.name, int(split)) for row in DTYPES for split in row.splits]
# A coding depends only on bytes. So all codings are tested with one dtype for each way to split,
# and some codings with each other dtype.
ALL_CODINGS_FOR = {("U8", 0), ("BF16", 2), ("F8_E4M3", 2), ("U32", 1)}
SOME_CODINGS = (
    "stored",
    "constant",
    "palette3-escape",
    "palette-raw5",
    "rans-32-lanes",
    "rans-raw-escape",
    "rans-64-codes",
    "rans-plain-escape",
)
BYTE_CASES = [
    pytest.param(name, split, coding, id=f"{name}-{split}-{coding}")
    for name, split in DTYPE_SPLITS
    for coding in (BYTE_CODINGS if (name, split) in ALL_CODINGS_FOR else SOME_CODINGS)
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


@pytest.mark.parametrize("name", ["rans-carry", "prediction"])
def test_a_carrier_may_stay_whole(name: str) -> None:
    less, whole = (fb.SMALL[name](carry=carry) for carry in (True, False))
    assert [frame.streams[0, 1][1] for frame in (less, whole)] == [22, 30]
    assert decode_frame(bytes(whole)).data == whole.source


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


@pytest.mark.parametrize(
    ("dtype", "code", "exponent_bits"), [("F32", "<I", 8), ("F64", "<Q", 11), ("BF16", "<H", 8)]
)
def test_the_float_split_gathers_the_exponent(dtype: str, code: str, exponent_bits: int) -> None:
    """A constant plane decodes only if the encoder and the page agree on which bits it holds."""
    rng, width = random.Random(1), DTYPE_BY_NAME[dtype].bits
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
    # The sign is the lowest bit of plane 1; F64 has the upper three exponent bits above it.
    offset, nbytes = frame.streams[0, 1]
    place = 3 if dtype == "F64" else 0
    signs = [byte >> place & 1 for byte in frame.data[offset : offset + nbytes]]
    assert signs == [value >> width - 1 for value in values]


def test_the_float_split_of_bytes_puts_the_sign_lowest() -> None:
    data = bytes(range(256))
    frame = build_frame(data, "F8_E4M3", codings=[Stored()], split=2, chunk_log=8)
    plane = frame.data[frame.header_nbytes :]
    assert [byte & 1 for byte in plane] == [0] * 128 + [1] * 128
    assert [byte >> 1 for byte in plane] == [*range(128), *range(128)]
    assert decode_frame(bytes(frame)).data == data


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


def imports_of(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
            modules |= set(names) if node.module == "packhorse" else {str(node.module)}
    return modules


def test_reference_shares_no_code_with_the_fast_paths() -> None:
    files = set(Path(reference.__file__).parent.glob("*.py"))
    modules = set().union(*map(imports_of, files))
    ours = {name for name in modules if name.startswith("packhorse")}
    outside = {name for name in ours if not name.startswith("packhorse.reference.")}
    assert outside == {"packhorse.layout", "packhorse.table_layout", "packhorse.errors"}
    assert "torch" not in modules
    # Bounded codes are defined by the arithmetic of floats, which NumPy and ml_dtypes do.
    assert {path.name for path in files if "ml_dtypes" in imports_of(path)} == {"bounded.py"}
    with_numpy = {path.name for path in files if "numpy" in imports_of(path)}
    assert with_numpy == {"bounded.py", "coded.py", "ibp.py", "tables.py", "weights.py"}


def test_the_builder_shares_no_code_with_the_package() -> None:
    modules = set().union(*map(imports_of, Path(fb.__file__).parent.glob("*.py")))
    assert {name for name in modules if name.startswith("packhorse")} == {"packhorse.layout"}


@pytest.mark.parametrize("name", ALL_SMALL)
def test_every_truncation_is_reported(name: str) -> None:
    built = ALL_SMALL[name]()
    for length in range(len(built.data)):
        with pytest.raises(TruncationError, match=r"ends at byte offset"):
            decode_frame(bytes(built)[:length], base=built.base)


def bits_of(whole: fb.BuiltFrame) -> Iterator[int]:
    """All bits of the header and every fifth one of the payload, so that each byte has some. The
    fast decoders are tested with others of the payload."""
    start = 8 * whole.header_nbytes
    return chain(range(start), range(start + 1, 8 * len(whole.data), 5))


@pytest.mark.parametrize("name", ALL_SMALL)
def test_flipped_bits_are_noticed(name: str) -> None:
    whole = ALL_SMALL[name]()
    for bit in bits_of(whole):
        damaged = bytearray(whole.data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackhorseError):
            decode_frame(bytes(damaged), base=whole.base)


@pytest.mark.parametrize("name", ALL_SMALL)
def test_a_flipped_bit_under_new_checksums_is_refused_or_harmless(name: str) -> None:
    """The content hash is still right, so a frame that decodes at all must give the same bytes."""
    whole = ALL_SMALL[name]()
    for bit in bits_of(whole):
        damaged = replace(whole, data=bytearray(whole.data))
        damaged.patch(bit // 8, bytes([whole.data[bit // 8] ^ 1 << bit % 8]))
        try:
            decoded = decode_frame(bytes(damaged), base=whole.base)
        except PackhorseError:
            continue
        assert decoded.data == whole.source, f"bit {bit}"
