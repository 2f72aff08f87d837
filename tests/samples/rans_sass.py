"""Compiles the kernels that decode frames, offline, and counts their instructions: JSON to stdout.

This is a separate program, because Triton's interpreter is on in the tests' process.
"""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.machine_code import read_kernel
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


def main() -> None:
    rows = []
    for architecture, cases in ((90, CASES), (80, CASES[:2])):
        for name, kernel, n_warps, constants, out in cases:
            compiled = compile_for(architecture, kernel, n_warps, constants, out)
            code = read_kernel(compiled.asm["cubin"])
            rows.append(
                {
                    "kernel": name,
                    "architecture": architecture,
                    "n_buckets": constants.get("BUCKETS"),
                    "n_planes": constants.get("N_PLANES"),
                    "spills": code.count(("LDL", "STL")),
                    "shared_nbytes": compiled.metadata.shared,
                    "instructions": len(code.instructions),
                    "loops": [end - start for start, end in code.loops],
                }
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
