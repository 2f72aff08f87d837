"""No kernel overwrites registers that one of Hopper's products may still read.

The kept tables have all divisions, for two versions of Triton. A few kernels are compiled here too,
in another process, because Triton's interpreter is on in this one; PACKHORSE_TRITON may name the
folder of another Triton for them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import hazards
from benchmarks.gpu.machine_code import parse_listing

TOOL = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
VERSIONS = ("3.6.0", "3.9.0")
RENEW = "renew it with `python benchmarks/gpu.py hazards --json`, with this Triton"
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


@pytest.mark.parametrize("version", VERSIONS)
def test_kept_tables_have_all_kernels_as_they_are(version: str) -> None:
    path = hazards.kept_path(version)
    rows = hazards.read_rows(path)
    assert list(rows) == [case.name for case in hazards.cases()], f"{path.name}: {RENEW}"
    for case in hazards.cases():
        row = rows[case.name]
        changed = row.source != hazards.source_hash(case.kernel)
        assert not changed, f"{path.name}: {case.kernel} has changed since; {RENEW}"
        assert row.hazards == 0, row
        # Only the products of many tokens use Hopper's own instruction.
        assert (row.products > 0) == ("many" in case.name), row
        assert row.from_registers <= row.products, row


def test_comments_do_not_change_the_hash_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hazards.source_hash("multiply_many_kernel")
    name = "window_elements"
    assert name in hazards._parts()
    changed = {key: part for key, part in hazards._parts().items() if key != name}
    monkeypatch.setattr(hazards, "_parts", lambda: changed)
    assert hazards.source_hash("multiply_many_kernel") != before


def test_kernels_that_are_compiled_now(tmp_path: Path) -> None:
    folders = [os.environ.get("PACKHORSE_TRITON"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
    }
    command = [sys.executable, str(TOOL), "hazards", "--fresh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"(.*): (\d+) hazards; without its waits: (\d+)", done.stdout)
    assert len(lines) == 3, done.stdout
    for name, n_hazards, n_without_waits in lines:
        assert int(n_hazards) == 0, name
        assert (int(n_without_waits) > 0) == ("many" in name), name
    (overlapping,) = re.findall(r"not waiting \(Triton (.*)\): (\d+) hazards", done.stdout)
    assert (int(overlapping[1]) > 0) == (overlapping[0] < "3.9"), done.stdout
