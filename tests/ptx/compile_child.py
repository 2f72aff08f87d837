"""Compiles the kernels of cases: `python -m tests.ptx.compile_child CASES.json`.

This is a separate program, because Triton's interpreter is on in the tests' process.
"""

import json
import sys
from pathlib import Path

from tests.ptx.kernels import ARCHITECTURES, Case

from benchmarks.gpu.compilation import (
    compile_decode,
    compile_matmul,
)
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import WEIGHT_FORMATS


def compile_case(case: Case) -> object:
    """The compiled kernel."""
    format = WEIGHT_FORMATS[case.format]
    if case.kind == "decode":
        return compile_decode(
            format,
            ARCHITECTURES[case.kind],
            block_steps=case.block_steps,
            gather=case.n_tokens > 0,
            loose=case.loose,
        )
    return compile_matmul(
        format,
        MatmulConfig(*case.division),
        ARCHITECTURES[case.kind],
        even=case.is_even,
        bias=case.bias,
        early=case.early,
        by_column=case.by_column,
        loose=case.loose,
    )


def main() -> None:
    path = Path(sys.argv[1])
    found = {}
    for fields in json.loads(path.read_text()):
        case = Case(**fields | {"division": tuple(fields["division"])})
        if case.key() not in found:
            n_warps = case.division[3] if case.division else 4
            found[case.key()] = _entry(compile_case(case), n_warps)
    (path.parent / "compiled.json").write_text(json.dumps(found))


def _entry(compiled: object, n_warps: int) -> dict[str, object]:
    return {"ptx": compiled.asm["ptx"], "shared": compiled.metadata.shared, "n_warps": n_warps}


if __name__ == "__main__":
    main()
