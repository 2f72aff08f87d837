"""The parser of machine code: registers, control codes and loops of disassemblers' listings."""

import pytest

from benchmarks.gpu.machine_code import Instruction, parse_listing

# Lines that nvdisasm printed for our kernels: instruction, lower and upper half of its encoding.
LINES = {
    "HGMMA.64x64x16.F32.BF16 R24, R84, gdesc[UR20], R24, gsb0": "0x000fe20008001818",
    "HMMA.16816.F32.BF16 R16, R20, R36, R16": "0x000fe20000041810",
    "LDGSTS.E.BYPASS.128 [R47+0xc000], desc[UR14][R22.64], !P6": "0x000fe2000f101c4e",
    "LDSM.16.M88.4 R68, [R105+UR19+0xc000]": "0x000e660008000200",
    "LDG.E.U8 R110, desc[UR14][R112.64]": "0x000ea8000c1e1100",
    "LDS.128 R4, [R54]": "0x000e660008000200",
    "STSM.16.M88.4 [R20], R28": "0x0007e20000000200",
    "STS.U16 [R101+UR6+0x200], R60": "0x0003e20008000406",
    "IADD3 R43, P0, P1, R11.reuse, UR8, -R8": "0x000fc6000f91e008",
    "IADD3.X R36, R14, UR9, R9, P0, P1": "0x000fe200087e2409",
    "IMAD.WIDE R8, R12, R15, R2": "0x000fe200078e02ff",
    "ISETP.LT.AND.EX P0, PT, R0, UR9, PT, P3": "0x000fe200087e2409",
    "PLOP3.LUT P4, PT, PT, PT, UP0, 0x80, 0x0": "0x000fc60003f8f008",
    "SHFL.BFLY PT, R10, R19, 0x2, 0x1f": "0x002e6800000e0000",
    "UIADD3.64 UR10, UR4, -UR8, URZ": "0x000fe2000fffe03f",
    "F2I.FTZ.U32.TRUNC.NTZ R3, R2": "0x0004e4000021f000",
    "@!P3 IMAD.MOV.U32 R2, RZ, RZ, UR4": "0x000fe200078e02ff",
}


def listing(*texts: str, label: int | None = None) -> str:
    """A kernel of these instructions, in the manner of nvdisasm; a label before one of them."""
    lines = [".text.a_kernel:"]
    for i, text in enumerate(texts):
        if i == label:
            lines.append(".L_x_1:")
        upper = LINES.get(text, "0x000fe20003800000")
        lines += [
            f"        /*{16 * i:04x}*/      {text} ;      /* 0x0000001400e00947 */",
            f"                              /* {upper} */",
        ]
    return "\n".join([*lines, ".L_x_9:"])


def read(text: str) -> Instruction:
    (instruction,) = parse_listing(listing(text))["a_kernel"].instructions
    return instruction


def names(kind: str, *numbers: int) -> set[str]:
    return {f"{kind}{n}" for n in numbers}


@pytest.mark.parametrize(
    ("operation", "writes", "reads"),
    [
        (
            "HGMMA",
            names("R", *range(24, 56)),
            names("R", *range(24, 56), *range(84, 88)) | names("UR", 20, 21, 22, 23),
        ),
        ("HMMA", names("R", 16, 17, 18, 19), names("R", *range(16, 24), 36, 37)),
        ("LDGSTS", set(), names("R", 47, 22, 23) | names("UR", 14, 15) | {"P6"}),
        ("LDSM", names("R", 68, 69, 70, 71), {"R105", "UR19"}),
        ("LDG.", {"R110"}, {"R112", "R113", "UR14", "UR15"}),
        ("LDS.", names("R", 4, 5, 6, 7), {"R54"}),
        ("STSM", set(), names("R", 20, 28, 29, 30, 31)),
        ("STS.", set(), {"R101", "UR6", "R60"}),
        ("IADD3 ", {"R43", "P0", "P1"}, {"R11", "UR8", "R8"}),
        ("IADD3.X", {"R36"}, {"R14", "UR9", "R9", "P0", "P1"}),
        ("IMAD.WIDE", {"R8", "R9"}, {"R12", "R15", "R2", "R3"}),
        ("ISETP", {"P0"}, {"R0", "UR9", "P3"}),
        ("PLOP3", {"P4"}, {"UP0"}),
        ("SHFL", {"R10"}, {"R19"}),
        ("UIADD3.64", {"UR10", "UR11"}, {"UR4", "UR5", "UR8", "UR9"}),
        ("F2I", {"R3"}, {"R2"}),
        ("@!P3", {"R2"}, {"UR4", "P3"}),
    ],
)
def test_registers_are_told_by_operands_and_suffixes(
    operation: str, writes: set[str], reads: set[str]
) -> None:
    (text,) = (text for text in LINES if text.startswith(operation))
    found = read(text)
    assert found.writes == writes
    assert found.reads == reads
    assert str(found) == text


def test_control_codes() -> None:
    found = read("SHFL.BFLY PT, R10, R19, 0x2, 0x1f").control
    assert (found.stall, found.yields, found.write_barrier, found.read_barrier) == (
        4,
        False,
        1,
        None,
    )
    assert found.waits == (1,)
    found = read("F2I.FTZ.U32.TRUNC.NTZ R3, R2").control
    assert (found.stall, found.write_barrier, found.read_barrier, found.waits) == (2, 3, 2, ())


@pytest.mark.parametrize("target", ["`(.L_x_1)", "0x10"])
def test_loops_and_what_follows(target: str) -> None:
    """Of nvdisasm, branches have labels; of cuobjdump, addresses."""
    text = listing("NOP", "NOP", "@P0 EXIT", f"@!P1 BRA {target}", "EXIT", label=1)
    code = parse_listing(text)["a_kernel"]
    assert code.loops == [(1, 4)]
    assert code.instructions[3].target == 16
    assert code.instructions[3].predicate == "!P1"
    assert [list(code.followers(i)) for i in range(5)] == [[1], [2], [3], [1, 4], []]


def test_several_kernels_are_told_apart() -> None:
    text = listing("NOP") + "\n" + listing("NOP", "EXIT").replace("a_kernel", "another")
    found = parse_listing(text)
    assert {name: len(code.instructions) for name, code in found.items()} == {
        "a_kernel": 1,
        "another": 2,
    }


def test_an_encoding_that_is_cut_off_is_told() -> None:
    with pytest.raises(ValueError, match="a_kernel: 'NOP' at 0x0000 has no upper half"):
        parse_listing("\n".join(listing("NOP").splitlines()[:2]))
    with pytest.raises(ValueError, match=r"'BRA `\(.L_x_7\)' at 0x0 goes to an unknown place"):
        parse_listing(listing("BRA `(.L_x_7)"))
