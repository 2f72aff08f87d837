"""What the card and its multiprocessors can do at most: part `ceilings` of gpu.py.

Compare all other figures with these. A kernel that only reads shows how much one multiprocessor
draws from memory: a product with fewer programs than multiprocessors cannot be faster than it.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import language as tl

from benchmarks.gpu.checks import WrongError
from packhorse.gpu.timing import time_chain

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["ceilings", "read_all", "read_kernel"]

_COPY_NBYTES = 4 << 30
_SIDE = 8192  # of the matrices that are multiplied
_N_PROGRAMS = (33, 66, 99, 132)
_BLOCK = 4096  # numbers of four bytes that a program reads at once: 16 KiB
_N_WARPS = 8


@triton.jit(do_not_specialize=["n_blocks"])
def read_kernel(src_ptr, sums_ptr, n_blocks, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Adds up int32 numbers, so that no load can be left out."""
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0)
    for first in range(tl.program_id(0), n_blocks, step * AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            block = (first + i * step).to(tl.int64)
            mask = tl.full((BLOCK,), 0, tl.int64) + block < n_blocks  # of all, so loads stay wide
            total += tl.load(src_ptr + block * BLOCK + tl.arange(0, BLOCK), mask=mask, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def read_all(src: torch.Tensor, n_programs: int, sums: torch.Tensor) -> None:
    """Read a tensor with a number of programs.

    Args:
        src: int32, a multiple of 4096 numbers.
        n_programs: programs; as they are large, a multiprocessor has one of them at most until all
            have one.
        sums: int32, n_programs; receives the sums that the programs have found, modulo 2^32.
    """
    n_blocks = src.numel() // _BLOCK
    read_kernel[(n_programs,)](src, sums, n_blocks, BLOCK=_BLOCK, AT_ONCE=4, num_warps=_N_WARPS)


def ceilings(run: "Run") -> list[dict[str, Any]]:
    """Bytes a second of a copy, read and written; BF16 operations a second of a product; bytes a
    second that a number of programs read.

    Raises:
        WrongError: the reading kernel has not read everything.
    """
    device = torch.device("cpu" if run.smoke else "cuda")
    rows = [] if run.smoke else _copy_and_product()
    numel = (8 if run.smoke else 1 << 18) * _BLOCK
    src = torch.randint(-(1 << 31), 1 << 31, (numel,), dtype=torch.int32, device=device)
    for n_programs in (3,) if run.smoke else _N_PROGRAMS:
        sums = torch.zeros(n_programs, dtype=torch.int32, device=device)
        read_all(src, n_programs, sums)
        if int(sums.sum(dtype=torch.int64) - src.sum(dtype=torch.int64)) % (1 << 32):
            raise WrongError(f"{n_programs} programs have not read everything")
        row: dict[str, Any] = {"ceiling": "reading", "programs": n_programs}
        if not run.smoke:
            row["per_s"] = src.nbytes / time_chain([partial(read_all, src, n_programs, sums)])
            each = row["per_s"] / n_programs / 1e9
            print(
                f"{n_programs} programs read {row['per_s'] / 1e12:.2f} TB/s, each {each:.1f} GB/s"
            )
        rows.append(row)
    return rows


def _copy_and_product() -> list[dict[str, Any]]:
    source = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device="cuda").random_()
    seconds = time_chain([partial(torch.empty_like(source).copy_, source)])
    bandwidth = 2 * _COPY_NBYTES / seconds
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    torch.nn.functional.linear(a, b)
    rate = 2 * _SIDE**3 / time_chain([partial(torch.nn.functional.linear, a, b)])
    print(f"ceilings: copies {bandwidth / 1e12:.2f} TB/s, BF16 {rate / 1e12:.0f} TFLOP/s")
    return [{"ceiling": "copy", "per_s": bandwidth}, {"ceiling": "BF16", "per_s": rate}]
