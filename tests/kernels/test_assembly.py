"""The inline PTX of the kernels computes the same as the versions in plain Triton.

An emulator runs the few instructions that occur, because CI has no GPU; Triton's interpreter runs
the twins.
"""

import re

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from triton import language as tl

from packhorse.kernels import weights
from packhorse.layout import W11, W12, WeightFormat

Words = NDArray[np.uint32]
SLICES = [(W12, i) for i in range(W12.n_slices)] + [(W11, i) for i in range(W11.n_slices)]


def emulate(assembly: str, inputs: list[Words], n_outputs: int) -> list[Words]:
    """Runs a block of PTX on words. Operands are numbered as by the compiler, outputs first."""
    values: dict[str, Words] = {f"${n_outputs + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> Words:
        return values[name] if name in values else np.full_like(inputs[0], int(name, 0))

    for step in assembly.strip(" {}").split(";"):
        if not step.strip() or step.split()[0] == ".reg":
            continue
        operation, names = step.split(maxsplit=1)
        target, *sources = (name.strip() for name in names.split(","))
        values[target] = RUN[operation](*map(value, sources))
    return [values[f"${i}"] for i in range(n_outputs)]


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Applies any function of three bits: bit 4a + 2b + c of the table."""
    result = np.zeros_like(a)
    for case in range(8):
        if table[0] >> case & 1:
            terms = [
                word if case >> shift & 1 else ~word for word, shift in ((a, 2), (b, 1), (c, 0))
            ]
            result |= terms[0] & terms[1] & terms[2]
    return result


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Picks four bytes of eight; the selector's nibbles name them, the lowest first."""
    bytes_in = [word >> 8 * i & 255 for word in (a, b) for i in range(4)]
    picks = [int(selector[0]) >> 4 * i & 7 for i in range(4)]
    return sum(
        (bytes_in[pick] << np.uint32(8 * i) for i, pick in enumerate(picks)), np.zeros_like(a)
    )


RUN = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
}


@triton.jit
def twin_kernel(low_ptr, high_ptr, rest_ptr, out_ptr, SLICE: tl.constexpr, BITS: tl.constexpr):
    offsets = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    low, high = tl.load(low_ptr + offsets), tl.load(high_ptr + offsets)
    rest = tl.load(rest_ptr + offsets)
    elements = weights.window_elements(low, high, rest, SLICE, BITS, False)
    tl.store(out_ptr + offsets, elements.to(tl.int16, bitcast=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.py compares them as they run")
@pytest.mark.parametrize(("format", "part"), SLICES, ids=[f"{f.name}-{i}" for f, i in SLICES])
def test_assembly_and_twin_agree_on_all_bytes(format: WeightFormat, part: int) -> None:
    n = 1 << 16
    rng = np.random.default_rng(part)
    low, high = np.arange(n, dtype=np.uint16).view(np.uint8).reshape(n, 2).T.copy()
    rest = rng.integers(0, 256, n, np.uint8)
    out = torch.empty(n, dtype=torch.int16)
    tensors = [torch.from_numpy(array) for array in (low, high, rest)]
    twin_kernel[(n // 1024,)](*tensors, out, SLICE=part, BITS=format.bits)

    words = [array.view(np.uint32) for array in (high, rest, low)]
    if format is W12:
        del words[1]
    table = weights._W12_ASSEMBLY if format is W12 else weights._W11_ASSEMBLY
    assembly = table.value[part]
    first, second = emulate(assembly, words, 2)
    pairs = np.stack([first, second], axis=1).view(np.uint16).reshape(-1)
    np.testing.assert_array_equal(pairs, out.numpy().view(np.uint16))
    assert re.fullmatch(r"[^@%]*", assembly)  # no predicate and no special register


def test_elements_have_the_code_in_place_of_the_exponent() -> None:
    """The result of the twin by arithmetic: sign, code, mantissa."""
    packed = np.arange(1 << 12, dtype=np.uint16)
    low, high = (packed & 255).astype(np.uint8), (packed >> 8).astype(np.uint8)
    out = torch.empty(1 << 12, dtype=torch.int16)
    tensors = [torch.from_numpy(array) for array in (low, high | 0xF0, low)]
    twin_kernel[(4,)](*tensors, out, SLICE=0, BITS=12)
    expected = (packed >> 11) << 15 | (packed & 0x7FF)
    np.testing.assert_array_equal(out.numpy().view(np.uint16), expected)
