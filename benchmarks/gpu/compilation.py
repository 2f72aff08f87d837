"""Compiles the kernels of packed weights for an architecture, without a GPU.

The assembler that Triton includes compiles them as launches on a GPU do: with the same constants,
and with the same facts about arguments. A process that imports this module cannot interpret
kernels.
"""

import os
from collections.abc import Collection, Mapping

os.environ["TRITON_INTERPRET"] = "0"  # an interpreted kernel has no instructions
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or 3.9 warns that 3.10 will change it

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from packhorse.kernels.matmul import SHARING_REGISTERS, MatmulConfig, multiply_weights_kernel
from packhorse.kernels.weights import decode_weights_kernel
from packhorse.layout import WeightFormat

TRITON_VERSION: str = triton.__version__
WARP = 32
POINTERS = {
    "low_ptr": "*u8",
    "high_ptr": "*u8",
    "first_ptr": "*u8",
    "starts_ptr": "*i32",
    "exceptions_ptr": "*i32",
    "x_ptr": "*bf16",
    "by_column_ptr": "*bf16",
    "bias_ptr": "*bf16",
    "y_ptr": "*bf16",
    "out_ptr": "*bf16",
    "rows_ptr": "*i64",
}
LOOSE = frozenset({"n_rows", "n_tokens", "rows_ptr"})  # may be any number, or begin anywhere


def compile_kernel(
    kernel: "triton.runtime.JITFunction[object]",
    constants: Mapping[str, object],
    architecture: int,
    n_warps: int,
    n_stages: int,
    *,
    fuse: bool = True,
    registers: int | None = None,
    types: Mapping[str, str] | None = None,
    loose: Collection[str] = LOOSE,
) -> "triton.compiler.CompiledKernel":
    """Compile a kernel.

    Args:
        kernel: the kernel.
        constants: its `tl.constexpr` arguments.
        architecture: 90 for Hopper, 80 for Ampere.
        n_warps: warps of a program.
        n_stages: stages of its loops.
        fuse: whether a product and a sum may be one instruction.
        registers: of a thread at most; None for as many as there are.
        types: types of arguments, where they are not the usual ones.
        loose: arguments that are not multiples of 16.
    """
    names = kernel.arg_names
    optional = (p for p in kernel.params if p.is_constexpr and p.has_default)
    constants = {p.name: p.default for p in optional} | dict(constants)
    known = {**POINTERS, **(types or {})}
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and name not in loose
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": n_warps,
        "num_stages": n_stages,
        "enable_fp_fusion": fuse,
        "maxnreg": registers,
    }
    return triton.compile(source, target=GPUTarget("cuda", architecture, WARP), options=options)


def compile_matmul(
    format: WeightFormat,
    config: MatmulConfig,
    architecture: int,
    *,
    even: bool = True,
    bias: bool = False,
    early: bool = False,
    by_column: bool = False,
    loose: Collection[str] = LOOSE,
) -> "triton.compiler.CompiledKernel":
    """Compile the product.

    Args:
        format: of the weight.
        config: the division.
        architecture: 90 or 80.
        even: whether no turn reaches beyond a slice, and no column is padding.
        bias: whether there is a bias.
        early: whether the kernel starts before the one before it ends.
        by_column: whether exceptions gather tokens that lie by columns.
        loose: as for `compile_kernel`.
    """
    constants = {
        "BITS": format.bits,
        "SLICES": format.n_slices,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_TOKENS": config.block_tokens,
        "BLOCK_STEPS": config.block_steps,
        "WARPS": config.n_warps,
        "TILES": config.n_tiles,
        "SPLITS": config.n_splits,
        "EVEN": even,
        "HAS_BIAS": bias,
        "ASSEMBLY": True,
        "UPCAST": False,
        "EARLY": max(config.n_stages - 1, 1) if early else 0,
        **({"BY_COLUMN": True} if by_column else {"by_column_ptr": None}),
    }
    return compile_kernel(
        multiply_weights_kernel,
        constants,
        architecture,
        config.n_warps,
        config.n_stages,
        registers=SHARING_REGISTERS if config.shares else None,
        types={"y_ptr": "*fp32"} if config.n_splits > 1 else None,
        loose=loose,
    )


def compile_decode(
    format: WeightFormat,
    architecture: int,
    *,
    block_steps: int = 512,
    gather: bool = False,
    fuse: bool = True,
    loose: Collection[str] = LOOSE,
) -> "triton.compiler.CompiledKernel":
    """Compile the kernel that decodes a weight to memory.

    Args:
        format: of the weight.
        architecture: 90 or 80.
        block_steps: columns of a slice for a turn: 2048 by the rows of a program.
        gather: whether the rows have numbers.
        fuse: whether a product and a sum may be one instruction.
        loose: as for `compile_kernel`.
    """
    constants = {
        "BITS": format.bits,
        "SLICES": format.n_slices,
        "BLOCK_ROWS": 2048 // block_steps,
        "BLOCK_STEPS": block_steps,
        "BLOCK_EXCEPTIONS": 8,
        "ASSEMBLY": True,
        "GATHER": gather,
        "UPCAST": False,
    }
    return compile_kernel(
        decode_weights_kernel,
        constants,
        architecture,
        4,
        3,
        fuse=fuse,
        types=None if gather else {"rows_ptr": "*i32"},
        loose=loose,
    )
