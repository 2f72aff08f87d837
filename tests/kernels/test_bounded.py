"""The kernels of bounded codes write the bytes of the C++ coder and read them, in Triton's
interpreter (or on a GPU, with TRITON_INTERPRET=0)."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
from bounded_samples import NUMPY, ROUNDINGS, raw
from numpy.typing import NDArray
from tests.samples.offline_kernels import compile_offline

from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    decode_bounded,
    encode_bounded,
    read_segments,
)
from packhorse.kernels.bounded import (
    Quantiser,
    collect_escapes,
    decode_codes,
    encode_codes,
    n_code_words,
)
from packhorse.layout import BOUNDED_BLOCK
from packhorse.reference.bounded import _key, _limits_of

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGERS = {2: torch.int16, 4: torch.int32}
SIZES = (1, 15, 100, 512, 1025, 3000)


def tensor_of(elements: NDArray[Any], dtype: str) -> torch.Tensor:
    integers = INTEGERS[elements.itemsize]
    bits = torch.from_numpy(elements.view(f"i{elements.itemsize}").copy())
    assert bits.dtype == integers
    return bits.view(TORCH[dtype]).to(DEVICE)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def sample(dtype: str, n: int, spread: float) -> NDArray[Any]:
    rng = np.random.default_rng(n)
    with np.errstate(over="ignore"):
        elements = (spread * rng.standard_normal(n)).astype(NUMPY[dtype])
    elements[rng.integers(0, n, n // 12)] = np.inf
    elements[rng.integers(0, n, n // 50)] = -np.nan
    elements[n // 2] = 0.0
    return elements


def parts_of(message: NDArray[np.uint8], n: int, bits: int, item: int) -> tuple[bytes, ...]:
    """Codes, counts and escapes of a message of one segment."""
    codes = message[128 : 128 + 4 * n_code_words(n, bits)]
    (entry,) = read_segments(message)
    escapes = message[message.size - entry.n_escapes * item :]
    n_blocks = -(-n // BOUNDED_BLOCK)
    counts = message[128 + codes.size :][: 2 * n_blocks] if entry.n_escapes else b"\0\0" * n_blocks
    return codes.tobytes(), bytes(counts), escapes.tobytes()


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", TORCH)
def test_kernels_write_and_read_the_bytes_of_the_core(dtype: str, rounding: Rounding) -> None:
    for n, bits, bound, center in [
        *((n, 4 + i, 0.02, 0.0) for i, n in enumerate(SIZES)),
        *((700, bits, 0.3, 0.25) for bits in (1, 2, 3, 11, 16)),
        *((600, 5, bound, 0.0) for bound in (1e-6, 1e4, 3e38)),
    ]:
        elements = sample(dtype, n, bound * 2 ** (bits - 2) if bound < 1e30 else 1.0)
        segments = [Segment(n, bound, bits, center)]
        message = encode_bounded(raw(elements), dtype, segments, rounding=rounding, seed=77)
        (entry,) = read_segments(message)
        by = Quantiser(
            bits,
            entry.step,
            entry.center,
            float(np.float32(min(1 / entry.step, float(np.finfo(np.float32).max)))),
            *_limits_of(bound, np.float32),
        )
        expected = parts_of(message, n, bits, elements.itemsize)
        x = tensor_of(elements, dtype)
        words = torch.full((n_code_words(n, bits),), -1, dtype=torch.int32, device=DEVICE)
        counts = torch.full((-(-n // BOUNDED_BLOCK),), -1, dtype=torch.int32, device=DEVICE)
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy
            encode_codes(x, by, words, counts, rounding=rounding, key=_key(77, 0))
        assert bytes_of(words) == expected[0], (n, bits, bound)
        assert bytes_of(counts.to(torch.int16)) == expected[1]
        escapes = torch.empty(int(counts.sum()), dtype=TORCH[dtype], device=DEVICE)
        ends = collect_escapes(x, bits, words, counts, escapes)
        assert int(ends[-1]) == entry.n_escapes
        assert bytes_of(escapes) == expected[2]
        decoded = np.empty_like(elements)
        decode_bounded(message, raw(decoded), dtype=dtype)
        out = torch.full((n,), 7.0, dtype=TORCH[dtype], device=DEVICE)
        with np.errstate(all="ignore"):
            decode_codes(words, by, out, counts, escapes)
        assert bytes_of(out) == raw(decoded).tobytes(), (n, bits, bound)


def test_lying_counts_do_not_leave_the_memory() -> None:
    """A place before or behind the escapes is not read."""
    words = torch.zeros(n_code_words(1024, 4), dtype=torch.int32, device=DEVICE)
    by = Quantiser(4, 0.5, 0.0)
    escapes = torch.full((3,), 2.0, device=DEVICE)
    for lie in ([5, 9], [2**31 - 1, 2**31 - 1], [-7, 4], [1, -1]):
        counts = torch.tensor(lie, dtype=torch.int32, device=DEVICE)
        out = torch.zeros(1024, device=DEVICE)
        decode_codes(words, by, out, counts, escapes)
        assert set(out.tolist()) <= {-4.0, 0.0, 2.0}


def test_escapes_beyond_the_capacity_are_not_written() -> None:
    elements = torch.full((600,), float("nan"), device=DEVICE)
    words = torch.empty(n_code_words(600, 4), dtype=torch.int32, device=DEVICE)
    counts = torch.empty(2, dtype=torch.int32, device=DEVICE)
    encode_codes(elements, Quantiser(4, 0.5, 0.0, 2.0, 0.25, 0.25), words, counts)
    memory = torch.zeros(10, device=DEVICE)
    ends = collect_escapes(elements, 4, words, counts, memory[:7])
    assert ends.tolist() == [512, 600]
    assert torch.isnan(memory).tolist() == [True] * 7 + [False] * 3


def test_an_empty_segment_is_no_launch() -> None:
    nothing = torch.empty(0, device=DEVICE)
    words = torch.empty(0, dtype=torch.int32, device=DEVICE)
    encode_codes(nothing, Quantiser(4, 0.5, 0.0, 2.0, 0.25, 0.25), words, words)
    decode_codes(words, Quantiser(4, 0.5, 0.0), nothing)
    assert collect_escapes(nothing, 4, words, words, nothing).numel() == 0


def test_other_tensors_are_refused() -> None:
    x = torch.zeros(100, device=DEVICE)
    words = torch.zeros(n_code_words(100, 4), dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    by = Quantiser(4, 0.5, 0.0, 2.0, 0.25, 0.25)
    with pytest.raises(TypeError, match=r"torch.float64; kernels take"):
        encode_codes(x.double(), by, words, counts)
    with pytest.raises(ValueError, match="codes have 17 bits"):
        encode_codes(x, by._replace(bits=17), words, counts)
    with pytest.raises(ValueError, match="words has shape"):
        encode_codes(x, by, words[1:], counts)
    with pytest.raises(ValueError, match="counts has shape"):
        encode_codes(x, by, words, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(TypeError, match="escapes has dtype"):
        decode_codes(words, by, x, counts, torch.zeros(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="elements must be contiguous"):
        encode_codes(torch.zeros(200, device=DEVICE)[::2], by, words, counts)


COMPILE = """
import json, sys
from benchmarks.gpu.compilation import compile_kernel
from benchmarks.gpu.machine_code import disassemble
from packhorse.kernels import bounded
rows = []
for dtype, name in (("*fp32", "F32"), ("*bf16", "BF16"), ("*fp16", "F16")):
    kinds = {"IS_BF16": name == "BF16", "UPCAST": False, "BITS": 6}
    types = {
        "elements_ptr": dtype, "escapes_ptr": dtype, "out_ptr": dtype, "words_ptr": "*i32",
        "counts_ptr": "*i32", "ends_ptr": "*i64", "center": "fp32", "step": "fp32",
        "inverse": "fp32", "inner": "fp32", "outer": "fp32",
    }
    loose = {
        "n", "n_words", "key", "n_escapes", "capacity",
        "center", "step", "inverse", "inner", "outer",
    }
    encoders = [
        (f"encode {word}", bounded.encode_codes_kernel, 1, {
            **kinds, "IS_F16": name == "F16", "STOCHASTIC": stochastic, "BLOCKS": 2,
        })
        for word, stochastic in (("nearest", False), ("stochastic", True))
    ]
    others = [
        ("collect", bounded.collect_escapes_kernel, 4, {"BITS": 6}),
        ("decode", bounded.decode_codes_kernel, 4, {**kinds, "HAS_ESCAPES": True}),
    ]
    kernels = encoders + others if name == "F32" else [encoders[1], others[1]]
    for what, kernel, warps, constants in kernels:
        for architecture in (90, 80) if what == "encode nearest" else (90,):
            compiled = compile_kernel(
                kernel, constants, architecture, warps, 1, fuse=False, types=types, loose=loose
            )
            text = disassemble(compiled.asm["cubin"])
            rows.append({
                "kernel": f"{name} {what}", "architecture": architecture,
                "fused": text.count(" FFMA"), "spills": text.count(" STL") + text.count(" LDL"),
                "flushes": text.count(".FTZ"), "instructions": text.count(";"),
            })
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_fused_arithmetic() -> None:
    rows = compile_offline(COMPILE)
    assert len(rows) == 9
    for row in rows:
        assert row["instructions"] > 50, row
        assert (row["fused"], row["flushes"], row["spills"]) == (0, 0, 0), row
