"""Starts a product while the kernel before it still runs (programmatic dependent launch, compute
capability 9.0 and later).

A program that has started early asks for its first weights to be brought to L2. Then it waits until
the kernel before has ended and all that it wrote is visible, and only then does it load anything.
So a product is right whatever the kernel before writes: the tokens, and even the weights, because
writes arrive in L2. Every program of a kernel that is launched in this way must wait, or a kernel
after it could begin before the one before it has ended.

Not yet measured on a GPU. The environment variable `PACKHORSE_EARLY_LAUNCH=0` turns it off.
"""

import os

import triton
from triton import language as tl
from triton.language.extra import cuda

__all__ = ["is_offered", "launch_options", "prefetch_weights", "wait_for_others"]

_MIN_CAPABILITY = (9, 0)
_VARIABLE = "PACKHORSE_EARLY_LAUNCH"
_LINE = tl.constexpr(128)  # bytes of a line of L2
# Bulk copies to L2 would need one instruction a row, but the compiler makes a loop over the threads
# of them, of some 2000 cycles.
_PREFETCH = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
)


def is_offered(capability: tuple[int, int]) -> bool:
    """Whether kernels are to start early on a GPU of a compute capability, such as (9, 0).

    They are not if this version of Triton has no such launch, or if the environment variable
    `PACKHORSE_EARLY_LAUNCH` is 0.
    """
    is_known = hasattr(cuda, "gdc_wait") and hasattr(cuda, "gdc_launch_dependents")
    return capability >= _MIN_CAPABILITY and is_known and os.environ.get(_VARIABLE) != "0"


def launch_options(early: bool) -> dict[str, bool]:
    """Triton's options for a launch; only these versions and GPUs know the option."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def prefetch_weights(
    low_ptr,
    high_ptr,
    first_row,
    n_rows,
    n_steps,
    begin,  # the first step
    end,  # of the steps of this program
    BITS: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,  # how many steps at most
    THREADS: tl.constexpr,
):
    """Asks for the first bytes of some rows to be brought to L2, each thread for some lines."""
    N_HIGH: tl.constexpr = SLICES * (BITS - 8) // 8
    N_LINES: tl.constexpr = (STEPS + _LINE - 1) // _LINE  # of a slice of a row
    N_ALL: tl.constexpr = ROWS * (SLICES + N_HIGH) * N_LINES
    for i in tl.static_range((N_ALL + THREADS - 1) // THREADS):
        number = i * THREADS + tl.arange(0, THREADS)
        step = begin + number % N_LINES * _LINE
        run = number // N_LINES
        row = tl.minimum(first_row + run % ROWS, n_rows - 1).to(tl.int64)
        plane = run // ROWS
        low = low_ptr + (row * SLICES + plane) * n_steps
        high = high_ptr + (row * N_HIGH + (plane - SLICES)) * n_steps
        line = tl.where(plane < SLICES, low, high) + step
        is_wanted = ((number < N_ALL) & (step < end)).to(tl.int32)
        tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [line, is_wanted], tl.int32, False, 1)


@triton.jit
def wait_for_others():
    """Waits until the kernel before has ended, and lets the kernel after start early, too."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
