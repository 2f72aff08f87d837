"""No kernel overwrites registers that one of Hopper's products may still read.

The kept table has all divisions with such products. `test_stream.py` compiles some of them anew,
and `test_sass.py` shows that Triton's kernels have no such products.
"""

import pytest

from benchmarks.gpu import hazards
from benchmarks.gpu.machine_code import parse_listing

RENEW = "renew it with `python benchmarks/gpu.py hazards --json`"
# A turn of the loop that Triton 3.6 made of a product that runs on, shortened: it waits until seven
# products are left, and the next turn decodes into registers of the first one.
LOOP = """
.text.a_loop:
.L_x_1:
    LDSM.16.M88.4 R68, [R105+UR19+0xc000]
    PRMT R84, R68, 0x5410, R69
    PRMT R64, R68, 0x7632, R69
    HGMMA.64x64x16.F32.BF16 R24, R84, gdesc[UR20], R24{mark}
    HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR20], R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, {left}
    @!P1 BRA `(.L_x_1)
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    F2FP.BF16.F32.PACK_AB R7, R26, R24
    EXIT
"""


def find(text: str) -> list[hazards.Hazard]:
    """The hazards of a listing without addresses and encodings."""
    lines, address = [], 0
    for line in text.strip().splitlines():
        if line.startswith("."):
            lines.append(line)
            continue
        lines += [f" /*{address:04x}*/ {line.strip()} ; /* 0x{0:016x} */", f" /* 0x{0:016x} */"]
        address += 16
    return hazards.find_hazards(parse_listing("\n".join(lines))["a_loop"])


@pytest.mark.parametrize("mark", [", gsb0", ""])
def test_products_that_run_on_are_noticed(mark: str) -> None:
    found = find(LOOP.format(mark=mark, left="0x7"))
    written = {(hazard.address, hazard.kind, hazard.registers) for hazard in found}
    assert (16, "operand A is written", ("R84",)) in written
    assert (32, "operand A is written", ("R64",)) in written
    assert str(found[0]).startswith("0x0010: operand A is written (R84) while the product at 0x00")


def test_only_a_wait_for_all_products_helps() -> None:
    assert not find(LOOP.format(mark=", gsb0", left="0x0"))
    assert {h.product for h in find(LOOP.format(mark=", gsb0", left="0x1"))} == {0x40}
    # Products without a mark belong to the group of the next one: both are still running.
    assert {h.product for h in find(LOOP.format(mark="", left="0x1"))} == {0x30, 0x40}


def test_sums_that_are_read_too_early_are_noticed() -> None:
    text = LOOP.format(mark="", left="0x0").replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP")
    kinds = {hazard.kind for hazard in find(text)}
    assert kinds == {"operand A is written", "sums are read"}
    text = LOOP.format(mark="", left="0x1").replace("PRMT R84", "PRMT R24")
    assert "sums are written" in {hazard.kind for hazard in find(text)}


def test_the_kept_table_has_all_kernels_as_they_are() -> None:
    rows = hazards.read_rows()
    cases = list(hazards.cases())
    assert list(rows) == [case.name for case in cases], RENEW
    assert {case.config.block_tokens for case in cases} == {64, 128, 256}
    for case in cases:
        row = rows[case.name]
        assert row.source == hazards.source_hash(case), f"{case.name} has changed since; {RENEW}"
        assert row.hazards == 0, row
        assert row.from_registers == row.products > 0, row
        assert row.without_waits > row.products, f"{row}: the check would miss what it is for"


def test_comments_do_not_change_the_hash_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = hazards.cases()
    source, before = hazards.stream_source(), hazards.source_hash(first)
    assert hazards.source_hash(second) != before
    for changed, is_same in (
        (source + "// a comment\n", True),
        (source.replace("wait_for_products<0>", "wait_for_products<1>"), False),
    ):
        assert changed != source
        monkeypatch.setattr(hazards, "stream_source", lambda changed=changed: changed)
        assert (hazards.source_hash(first) == before) == is_same
