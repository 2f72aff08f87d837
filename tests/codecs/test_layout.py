"""The constants of the format agree with the page and with the C++ core, and fit their fields."""

import ast
import re
import struct
from enum import IntEnum
from pathlib import Path

import pytest
from format_page import section, table_cells

from packhorse import _core, layout
from packhorse.codecs.base import STATUS_WORDS
from packhorse.codecs.bounded import _MESSAGE_WORDS
from packhorse.codecs.weights import _FAULT_WORDS
from packhorse.frame.header_faults import _WORDS as _HEADER_WORDS
from packhorse.layout import (
    DTYPES,
    WEIGHT_FORMATS,
    BoundedFault,
    BoundedForm,
    ClassSource,
    EscapedField,
    HeaderFault,
    Level,
    Mode,
    PaletteField,
    PlaneField,
    PlaneSource,
    Rounding,
    Split,
    Status,
    StreamField,
    WeightFault,
)

SOURCES = Path(__file__).parents[2] / "csrc"
CORE = (SOURCES / "common" / "layout.hpp").read_text()
HEADERS = (SOURCES / "frame" / "header.hpp").read_text()
PLANS = (SOURCES / "tensor" / "plan.hpp").read_text()
CHECKS = (SOURCES / "rows" / "weights_unpack.hpp").read_text()
BOUNDED = "\n".join(path.read_text() for path in sorted((SOURCES / "bounded").glob("*.hpp")))

MAX_U32 = (1 << 32) - 1
FIXED_FIELD_MAXIMA = (
    layout.FRAME_MAGIC,
    layout.FRAME_VERSION,
    max(dtype.code for dtype in DTYPES),
    layout.MAX_DIMS,
    max(Split),
    layout.CRITICAL_FLAGS,
    max(Level),
    layout.MAX_CHUNK_LOG,
    MAX_U32,
    layout.MAX_BITS // 4,  # a frame is at most twice its tensor
    b"\xff" * 16,
    MAX_U32,
    MAX_U32,
    layout.MAX_DIMS - 1,  # at least one dimension is of columns
    b"\0" * 3,
    MAX_U32,
)


def test_every_field_of_the_fixed_header_holds_its_maximum() -> None:
    packed = layout.FIXED_HEADER.pack(*FIXED_FIELD_MAXIMA)
    assert layout.FIXED_HEADER.unpack(packed) == FIXED_FIELD_MAXIMA
    assert layout.FIXED_HEADER_NBYTES == len(packed) == 56


def test_a_descriptor_holds_the_longest_stream_and_the_last_mode() -> None:
    bits = layout.STREAM_NBYTES_BITS
    assert (1 << bits) - 1 == layout.STREAM_NBYTES_MASK
    assert max(Mode) < 1 << (32 - bits)
    # The longest stream: 12 bits, all raw bits and an escape for every unit; four models, and the
    # states.
    n = layout.MAX_CHUNK_NBYTES
    model = 2 + -(-257 * 3 // 2)
    fixed = layout.CLASSED_MODELS_OFFSET + layout.MAX_CLASSES * model + 4 * 128
    per_unit = n * layout.PROB_BITS // 8 + n * layout.MAX_RANS_RAW_BITS // 8 + n
    assert fixed + per_unit <= layout.STREAM_NBYTES_MASK
    # The longest stream of mode delta: 12 bits, an escape, and as many raw and extra bits as a unit
    # has. A unit of 64 bits may have 64 extra bits above 27 raw ones.
    model = 2 + -(-3 * (layout.DELTA_TOKENS + 1) // 2)
    fixed = layout.DELTA_MODELS_OFFSET + layout.MAX_DELTA_CLASSES * (model + 64) + 4 * 128
    for bits, most_bits in ((8, 8), (16, 16), (32, 32), (64, 91)):
        units = n // (bits // 8)
        per_unit = units * (layout.PROB_BITS + 8 + most_bits) // 8
        assert fixed + per_unit <= layout.STREAM_NBYTES_MASK
    # The side data are one plane, and may be as long as a plane of a chunk.
    assert layout.MAX_SIDE_NBYTES <= layout.MAX_CHUNK_NBYTES


def test_chunk_and_stream_sizes_fit_together() -> None:
    assert 1 << layout.MAX_CHUNK_LOG == layout.MAX_CHUNK_NBYTES
    assert 1 << layout.MIN_CHUNK_LOG == layout.FRAME_ALIGNMENT
    for nbytes in (layout.CHUNK_NBYTES, layout.ZSTD_CHUNK_NBYTES):
        assert nbytes <= layout.MAX_CHUNK_NBYTES
        assert nbytes & (nbytes - 1) == 0
        assert nbytes // max(dtype.unit_nbytes for dtype in DTYPES) >= 1 << layout.MIN_CHUNK_LOG


def test_the_largest_tensor_keeps_its_sizes_inside_63_bits() -> None:
    assert layout.MAX_BITS == 1 << 63
    assert struct.calcsize("<Q") == 8


def test_magic_is_not_text() -> None:
    assert layout.FRAME_MAGIC[0] > 0x7F


def test_dtype_codes_and_names_are_unique() -> None:
    assert len({dtype.code for dtype in DTYPES}) == len(DTYPES)
    assert len({dtype.name for dtype in DTYPES}) == len(DTYPES)
    assert {dtype.code: dtype for dtype in DTYPES} == layout.DTYPE_BY_CODE
    assert {dtype.name: dtype for dtype in DTYPES} == layout.DTYPE_BY_NAME
    assert all(0 < dtype.code < 256 for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_a_dtype_is_consistent(dtype: layout.DType) -> None:
    assert dtype.unit_nbytes in (1, 2, 4, 8)
    assert dtype.splits[0] == Split.WHOLE
    is_real = dtype.name.startswith(("F", "BF", "C")) and dtype.bits >= 8
    has_sign = is_real and dtype.name != "F8_E8M0"
    is_wide_integer = not is_real and dtype.unit_nbytes > 1
    assert (Split.FLOAT in dtype.splits, Split.BYTES in dtype.splits) == (has_sign, is_wide_integer)
    assert dtype.unit_nbytes == 1 or dtype.bits % (8 * dtype.unit_nbytes) == 0


def test_dtypes_are_those_of_safetensors() -> None:
    integers = {f"{sign}{bits}" for sign in "UI" for bits in (8, 16, 32, 64)}
    floats = {"F16", "BF16", "F32", "F64", "C64", "F4", "F6_E2M3", "F6_E3M2"}
    bytes_ = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert {dtype.name for dtype in DTYPES} == {"BOOL"} | integers | floats | bytes_


def test_the_dtype_table_of_the_page_is_the_one_of_the_code() -> None:
    rows = set()
    for cells in table_cells(section(3)):
        for half in (cells[:5], cells[6:11]):
            if half[0].isdigit():
                code, name, bits, unit_nbytes, splits = half
                numbers = tuple(Split(int(split)) for split in splits.split(","))
                rows.add(layout.DType(name, int(code), int(bits), int(unit_nbytes), numbers))
    assert rows == set(DTYPES)


def check_fields(rows: list[list[str]], fields: struct.Struct) -> None:
    """Compares the offsets and sizes of a table with those of a struct."""
    offset, sizes = 0, []
    for row in rows:
        assert int(row[0]) == offset, row
        sizes.append(int(row[1]))
        offset += sizes[-1]
    assert offset == fields.size
    codes = re.findall(r"\d*[a-zA-Z]", fields.format)
    assert sizes == [struct.calcsize(f"<{code}") for code in codes]


def test_the_header_table_of_the_page_is_the_struct_of_the_code() -> None:
    cells = [row for row in table_cells(section(2)) if row[0].isdigit()]
    check_fields([row for row in cells if len(row) == 4], layout.FIXED_HEADER)
    check_fields([row for row in cells if len(row) == 3], layout.BASE_BLOCK)
    assert f"base ({layout.BASE_BLOCK_NBYTES} bytes, if flag 0 is set)" in section(2)
    assert layout.FLAG_BASE == 1 << 0
    assert layout.FLAG_SUM == 1 << 1
    assert layout.CRITICAL_FLAGS == layout.FLAG_BASE | layout.FLAG_SUM
    crc = next(row for row in cells if row[2] == "header CRC")
    assert int(crc[0]) == layout.HEADER_CRC_OFFSET


@pytest.mark.parametrize(("number", "enum"), [(4, Split), (6, Mode)])
def test_the_numbers_of_splits_and_modes_are_those_of_the_page(
    number: int, enum: type[Split] | type[Mode]
) -> None:
    rows = table_cells(section(number))
    header = next(i for i, row in enumerate(rows) if row[:2] == [enum.__name__.lower(), "name"])
    found = {}
    for row in rows[header + 2 :]:
        if not row[0].isdigit() or row[1].isdigit():
            break
        found[row[1].upper().replace(" ", "_")] = int(row[0])
    assert found == {member.name: int(member) for member in enum}


def cpp_constants() -> dict[str, int]:
    """The integer constants of csrc/common/layout.hpp, as UPPER_CASE names."""
    found: dict[str, int] = {}
    for name, text in re.findall(r"^constexpr [\w:]+ k(\w+) = ([^;]+);", CORE, re.M):
        expression = re.sub(r"\bk([A-Z]\w*)", lambda match: str(found[upper(match[1])]), text)
        found[upper(name)] = evaluate(re.sub(r"(?<=\d)(u|ul|ull)\b", "", expression))
    return found


def upper(camel: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", camel).upper()


def evaluate(expression: str) -> int:
    """Evaluates sums, products and shifts of integers, which C++ and Python read alike."""
    tree = ast.parse(expression, mode="eval")
    allowed = (ast.Expression, ast.BinOp, ast.operator, ast.Constant)
    assert all(isinstance(node, allowed) for node in ast.walk(tree)), expression
    return int(eval(compile(tree, "layout.hpp", "eval")))


def cpp_enum(name: str, source: str = CORE) -> dict[str, int]:
    match = re.search(rf"enum class {name} : \w+ {{([^}}]*)}}", source)
    assert match
    return {upper(key): int(value) for key, value in re.findall(r"k(\w+) = (\d+)", match[1])}


def test_the_core_has_the_same_constants() -> None:
    core = cpp_constants()
    shared = core.keys() & set(layout.__all__)
    assert {name: core[name] for name in shared} == {name: getattr(layout, name) for name in shared}
    assert shared >= {
        "BASE_BLOCK_NBYTES",
        "CONTENT_LEAF_NBYTES",
        "FIXED_HEADER_NBYTES",
        "FLAG_BASE",
        "FLAG_SUM",
        "FRAME_ALIGNMENT",
        "FRAME_VERSION",
        "HEADER_CRC_OFFSET",
        "MAX_DIMS",
        "MAX_CHUNK_LOG",
        "MAX_CHUNK_NBYTES",
        "MAX_SIDE_NBYTES",
        "MIN_CHUNK_LOG",
        "STREAM_NBYTES_BITS",
        "STREAM_NBYTES_MASK",
        *SENTENCES,
    }


def test_the_core_has_the_same_splits_modes_and_sources() -> None:
    assert cpp_enum("Split") == {split.name: int(split) for split in Split}
    assert cpp_enum("Mode") == {mode.name: int(mode) for mode in Mode}
    sources = {source.name: int(source) for source in ClassSource}
    assert cpp_enum("ClassSource").items() >= sources.items()


def test_the_core_has_the_same_dtypes() -> None:
    rows = dict(enumerate(_core.dtype_rows()))
    for dtype in DTYPES:
        splits = sum(1 << split for split in dtype.splits)
        assert rows.pop(dtype.code) == (dtype.bits, dtype.unit_nbytes, splits)
    assert set(rows.values()) == {(0, 0, 0)}
    magic = cpp_constants()["FRAME_MAGIC_NUMBER"]
    assert magic.to_bytes(4, "little") == layout.FRAME_MAGIC


def test_the_core_has_the_same_statuses_and_faults() -> None:
    assert cpp_enum("Status") == {status.name: int(status) for status in Status}
    faults = {fault.name: int(fault) for fault in WeightFault}
    assert cpp_enum("WeightFault", CHECKS) == faults
    faults = {fault.name: int(fault) for fault in HeaderFault}
    assert cpp_enum("HeaderFault", HEADERS) == faults
    assert set(_HEADER_WORDS) == set(HeaderFault) - {HeaderFault.NONE}
    assert set(STATUS_WORDS) == set(Status) - {Status.OK}
    assert set(_FAULT_WORDS) == set(WeightFault) - {WeightFault.NONE}


@pytest.mark.parametrize("field", [PlaneField, PaletteField, StreamField, EscapedField])
def test_the_core_writes_the_same_columns_of_plans(field: type[IntEnum]) -> None:
    name = field.__name__.replace("Field", "Row")
    match = re.search(rf"struct {name} {{([^}}]*)}}", PLANS)
    assert match
    columns = []
    for column, number in re.findall(r"int64_t (\w+)(?:\[(\d+)\])?;", match[1]):
        columns += [column.upper()] * int(number or 1)
    assert len(columns) == layout.PLAN_FIELDS
    used = {name: i for i, name in enumerate(columns) if name != "UNUSED"}
    assert used == {member.name: int(member) for member in field}
    assert "kPlanRowNbytes = 64;" in PLANS


def test_the_core_has_the_same_sources_of_planes() -> None:
    assert cpp_enum("PlaneSource", PLANS) == {source.name: int(source) for source in PlaneSource}


# Where section 6 of the page states a number.
SENTENCES = {
    "MAX_PALETTE_RAW_BITS": r"`raw_bits` is at most {} for a palette",
    "MAX_RANS_RAW_BITS": r"\(then every symbol is 0\) and at most {} otherwise",
    "PROB_BITS": r"\| 1 \| 1 \| `prob_bits`: {}, otherwise",
    "PROB_SUM": r"The sum of the frequencies is {};",
    "NARROW_BUCKETS": r"`B` = {0} if `n_codes <= {0}`",
    "WIDE_BUCKETS": r"If `n_codes <= {0}`, the \*alias layout\*: .* and {0} otherwise",
    "MAX_CODE_BITS": r"`code_bits`: 0 to {};",
    "PALETTE_HEADER_NBYTES": r"\| {} \| `code_bits \* 8 \* ceil\(n / 64\)` \| bit planes",
    "MIN_LANES_LOG": r"`lanes_log`: {} to 7",
    "MAX_LANES_LOG": r"`lanes_log`: 2 to {};",
    "MODEL_OFFSET": r"\| {} \| \| the model \|",
    "CLASSED_MODELS_OFFSET": r"\| {} \| \| the models of class 0",
    "MAX_CLASSES": r"1 to {} for source 2",
    "PREDICTION_CLASSES": r"`n_classes`: {} for source 1",
    "PREDICTION_BIAS": r"\(yielded - {} \+ q div 4\)",
    "MAX_DELTA_CLASSES": r"`n_classes`: 1 to {} \|",
    "DELTA_MODELS_OFFSET": r"\| {} \| \| the models of class 0, 1, \.\.\. \(section 6\.2\)",
    "DELTA_TOKENS": r"`first \+ n_symbols` at most {} \|",
    "DELTA_DIRECT_TOKENS": r"the {0} tokens below {0} have no extra bits",
    "DELTA_FULL_TOKEN": r"Above 35 the token is {},",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_page_states_the_numbers_of_section_6(name: str) -> None:
    pattern = SENTENCES[name].format(getattr(layout, name))
    assert re.search(pattern, section(6)), pattern


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("MAX_DIMS", r"\| `n_dims` \| 0 to {} \|"),
        ("MIN_CHUNK_LOG", r"log2 of the units of a chunk; {} to 21"),
        ("MAX_CHUNK_LOG", r"log2 of the units of a chunk; 6 to {},"),
    ],
)
def test_the_page_states_the_numbers_of_section_2(name: str, sentence: str) -> None:
    assert re.search(sentence.format(getattr(layout, name)), section(2))
    assert "`n_rows + n_columns` is at most 2^21" in section(2)
    assert layout.MAX_SIDE_NBYTES == 1 << 21


def test_the_page_states_the_numbers_of_the_sources() -> None:
    words = ", ".join(f"{int(source)} {source.name.lower()}" for source in ClassSource)
    assert f"`source`: {words}; otherwise corruption" in section(6)


@pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))
def test_the_core_has_the_same_formats_of_weights(format: layout.WeightFormat) -> None:
    match = re.search(rf"struct {format.name} {{([^}}]*)}}", CORE)
    assert match
    core = {upper(key): int(value) for key, value in re.findall(r"k(\w+) = (\d+)", match[1])}
    names = ("bits", "code_bits", "n_slices", "first_code", "min_first", "max_first")
    expected = {name.removeprefix("n_").upper(): getattr(format, name) for name in names}
    assert core == expected


def test_the_page_states_the_fields_of_bounded_messages() -> None:
    cells = [row for row in table_cells(section(13)) if row[0].isdigit()]
    starts = [i for i, row in enumerate(cells) if row[0] == "0"]
    check_fields(cells[: starts[1]], layout.BOUNDED_HEADER)
    check_fields(cells[starts[1] : starts[2]], layout.BOUNDED_ENTRY)
    check_fields(cells[starts[2] :], layout.CODED_HEADER)
    crc = next(row for row in cells if row[2] == "CRC")
    assert int(crc[0]) == layout.BOUNDED_CRC_OFFSET
    page = section(13)
    assert f"`{layout.BOUNDED_MAGIC.hex(' ')}`" in page
    assert f"`bits` | of a code, 1 to {layout.MAX_BOUNDED_BITS} |" in page
    assert f"blocks of {layout.BOUNDED_BLOCK} elements" in page
    assert f"`R = ceil(m / {layout.BOUNDED_LANES})`" in page
    slots = f"min(n, {layout.BOUNDED_FREE_SLOTS} + n div {layout.BOUNDED_SLOT_SHARE})"
    assert slots in page
    for dtype in layout.BOUNDED_DTYPES:
        assert f"{dtype.code} ({dtype.name})" in page
    for fields in (("rounding", Rounding), ("form", BoundedForm)):
        words = ", ".join(f"{int(member)} {member.name.lower()}" for member in fields[1])
        assert re.search(rf"\| {fields[0]} \| {words}", page)


def test_the_core_has_the_same_numbers_of_bounded_codes() -> None:
    core = cpp_constants()
    assert core["BOUNDED_HEADER_NBYTES"] == layout.BOUNDED_HEADER.size
    assert f"kCodedHeaderNbytes = {layout.CODED_HEADER.size};" in BOUNDED
    assert core["BOUNDED_ENTRY_NBYTES"] == layout.BOUNDED_ENTRY.size
    for dtype in layout.BOUNDED_DTYPES:
        assert core[upper(f"{dtype.name}Code")] == dtype.code
    for name, enum in (("BoundedForm", BoundedForm), ("BoundedFault", BoundedFault)):
        text = re.sub(r"//.*", "", BOUNDED)
        assert cpp_enum(name, text) == {member.name: int(member) for member in enum}
    assert cpp_enum("Rounding", BOUNDED) == {member.name: int(member) for member in Rounding}
    magic = ", ".join(f"0x{byte:02X}" for byte in layout.BOUNDED_MAGIC)
    assert f"kBoundedMagic[4] = {{{magic}}}" in BOUNDED
    coded_magic = ", ".join(f"0x{byte:02X}" for byte in layout.CODED_MAGIC)
    assert f"kCodedMagic[4] = {{{coded_magic}}}" in BOUNDED
    assert layout.CODED_PIECE == 512 * layout.BOUNDED_BLOCK
    assert "kCodedPiece = 512 * kBoundedBlock;" in BOUNDED
    assert f"kMaxCodedBits = {layout.MAX_CODED_BITS};" in BOUNDED
    words = set(_MESSAGE_WORDS) | {BoundedFault.SHORT, BoundedFault.VERSION}
    assert words == {fault for fault in BoundedFault if fault >= BoundedFault.SHORT}
