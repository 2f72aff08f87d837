"""Compiles the kernels that decode frames, offline, and counts their instructions: JSON to stdout.

This is a separate program, because Triton's interpreter is on in the tests' process.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from packhorse.kernels.palette import decode_palettes_kernel
from packhorse.kernels.planes import merge_planes_kernel
from packhorse.kernels.rans import decode_rans_kernel, resolve_escapes_kernel

POINTERS = {
    "payload_ptr": "*u8",
    "streams_ptr": "*i64",
    "states_ptr": "*u32",
    "tables_ptr": "*u32",
    "scratch_ptr": "*u8",
    "status_ptr": "*i32",
    "planes_ptr": "*i64",
    "palettes_ptr": "*i64",
    "entries_ptr": "*u8",
}
CASES = [
    *(("decode_rans", decode_rans_kernel, 1, {"BUCKETS": n}, "*u8") for n in (32, 64, 4096)),
    ("resolve_escapes", resolve_escapes_kernel, 4, {"BLOCK": 1024}, "*u8"),
    ("decode_palettes", decode_palettes_kernel, 4, {"BLOCK": 1024}, "*u8"),
    *(
        (
            "merge_planes",
            merge_planes_kernel,
            4,
            {"CHUNK_LOG": 17, "N_PLANES": n, "ROTATION": 1, "BLOCK": 1024},
            out,
        )
        for n, out in ((2, "*i16"), (4, "*i32"))
    ),
]


def compile_for(architecture: int, kernel: object, n_warps: int, constants: dict, out: str):
    types = {**POINTERS, "out_ptr": out, "n_units": "i64"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    pointers = [i for i, name in enumerate(names) if name.endswith("_ptr")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": n_warps})


def instructions(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """All instructions, and the places of labels among them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [str(tool), "-c", file.name]
        listing = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    labels = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(instruction[1])
    return found, labels


def loops(found: list[str], labels: dict[str, int]) -> Iterator[int]:
    """Lengths of the runs that end with a branch to their beginning."""
    for i, text in enumerate(found):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if target and labels[target[1]] < i:
            yield i + 1 - labels[target[1]]


def main() -> None:
    rows = []
    for architecture, cases in ((90, CASES), (80, CASES[:2])):
        for name, kernel, n_warps, constants, out in cases:
            compiled = compile_for(architecture, kernel, n_warps, constants, out)
            found, labels = instructions(compiled.asm["cubin"])
            rows.append(
                {
                    "kernel": name,
                    "architecture": architecture,
                    "n_buckets": constants.get("BUCKETS"),
                    "n_planes": constants.get("N_PLANES"),
                    "spills": sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in found),
                    "shared_nbytes": compiled.metadata.shared,
                    "instructions": len(found),
                    "loops": list(loops(found, labels)),
                }
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
