"""What launches depend on: no kernel is compiled anew for another batch, no result of the inline
assembly takes an operand's register, and arrays and GPUs that kernels do not suit are told."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from weight_samples import model_rows

from packhorse.device import operators, pack_weight
from packhorse.device.matrix_tuning import find_gpu
from packhorse.device.packed_weight import PackedWeight
from packhorse.kernels import launch, matmul, weights
from packhorse.kernels.arrays import ALIGNMENT, WeightTensors
from packhorse.kernels.matmul import (
    MatmulConfig,
    add_splits_kernel,
    multiply_weights,
    multiply_weights_kernel,
)
from packhorse.kernels.vendor import has_waiting_products
from packhorse.kernels.weights import decode_weights_kernel
from packhorse.layout import W12, WEIGHT_FORMATS
from packhorse.reference.weights import encode_weights

KERNELS = {
    "add_splits": (add_splits_kernel, {"n"}, set()),
    "matmul": (multiply_weights_kernel, {"n_tokens"}, set()),
    "decode": (decode_weights_kernel, {"n_rows"}, {"rows_ptr"}),
}
NUMBERS = (1, 8, 15, 16, 4096, 1 << 20)


def code_of(kernel: Any, **changed: Any) -> list[Any]:
    """What the machine code of a launch depends on, as Triton finds it out before it compiles."""
    if not isinstance(kernel, JITFunction):  # an interpreted kernel keeps what it was declared with
        names = ("do_not_specialize", "do_not_specialize_on_alignment")
        kernel = JITFunction(kernel.fn, **{name: kernel.kwargs[name] for name in names})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    whole = torch.zeros(64, dtype=torch.int64)
    values = {p.name: whole if p.name.endswith("_ptr") else 16 for p in kernel.params} | changed
    return list(bind(**values)[1])


@pytest.mark.parametrize("name", KERNELS)
def test_other_batches_use_the_same_machine_code(name: str) -> None:
    """Otherwise a kernel might be compiled while a CUDA graph is captured, which ends it."""
    kernel, numbers, pointers = KERNELS[name]
    usual = code_of(kernel)
    for number in numbers:
        for n in NUMBERS:
            assert code_of(kernel, **{number: n}) == usual, (number, n)
    for pointer in pointers:
        assert code_of(kernel, **{pointer: torch.zeros(65, dtype=torch.int64)[1:]}) == usual
    assert (
        code_of(kernel, **{next(p for p in kernel.arg_names if "ptr" in p): torch.ones(1)}) != usual
    )


def test_tokens_by_column_are_another_kernel_only_where_they_are_used() -> None:
    usual = code_of(multiply_weights_kernel, by_column_ptr=None)
    used = code_of(multiply_weights_kernel, BY_COLUMN=True)
    assert usual[-1] == ("constexpr", None)
    assert used != usual
    assert code_of(multiply_weights_kernel, BY_COLUMN=True, n_tokens=7) == used


def test_sums_of_any_size_use_the_same_machine_code() -> None:
    assert code_of(add_splits_kernel, n=1 << 33) == code_of(add_splits_kernel)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_no_result_of_the_assembly_takes_the_register_of_an_operand(format: str) -> None:
    """A result that is written before the last operand is read needs "&" (early clobber)."""
    table = {"W12": weights._W12_ASSEMBLY, "W11": weights._W11_ASSEMBLY}[format].value
    found = {"W12": weights._W12_CONSTRAINTS, "W11": weights._W11_CONSTRAINTS}[format].value
    constraints = found.split(",")
    n_results = sum("=" in each for each in constraints)
    n_early = 0
    for assembly in table:
        steps = [re.findall(r"\$(\d)", step) for step in assembly.split(";")]
        steps = [[int(number) for number in numbers] for numbers in steps if numbers]
        last_read = max(i for i, step in enumerate(steps) if max(step) >= n_results)
        for i, step in enumerate(steps):
            if step[0] < n_results and i < last_read:
                n_early += 1
                assert "&" in constraints[step[0]], assembly
    assert n_early > 0


def views_of_a_buffer(arrays: WeightTensors, first: int) -> WeightTensors:
    """Copies of arrays in one buffer, one after the other, as some loaders keep them."""
    room = sum(array.nbytes + 4 for array in arrays) + first
    buffer = torch.zeros(room + ALIGNMENT, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % ALIGNMENT :]
    views, at = [], first
    for array in arrays:
        at += -at % array.element_size()
        view = buffer[at : at + array.nbytes].view(array.dtype).view(array.shape)
        views.append(view.copy_(array))
        at += array.nbytes
    return WeightTensors(*views)


def packed() -> tuple[WeightTensors, torch.Tensor]:
    elements = model_rows(33, 200)
    arrays = WeightTensors(*map(torch.from_numpy, encode_weights(elements, W12)))
    return arrays, torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16)


def test_arrays_at_odd_addresses_are_copied_once_where_they_are_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays, plain = packed()
    odd = views_of_a_buffer(arrays, 4)
    assert "low_bytes" in odd.misaligned()
    on_host = PackedWeight(odd, W12, 200)
    assert on_host.low_bytes is odd.low_bytes  # the host needs no alignment
    monkeypatch.setattr(operators, "_has_kernels", lambda _: True)
    weight = PackedWeight(odd, W12, 200)
    assert weight.arrays.misaligned() == []
    assert torch.equal(weight.unpack().view(torch.int16), plain.view(torch.int16))
    even = PackedWeight(weight.arrays, W12, 200)
    assert even.low_bytes is weight.low_bytes
    assert weight.detach().low_bytes is weight.low_bytes


def test_warps_share_columns_only_where_they_wait_for_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper and data-center Blackwell, Triton would let such a product run on."""
    found = [n for n in (75, 80, 86, 89, 90, 100, 103, 110, 120, 121) if has_waiting_products(n)]
    assert found == [80, 86, 89, 120, 121]
    hopper = launch.Dialect(assembly=False, upcast=True)
    monkeypatch.setattr(matmul, "choose_dialect", lambda _: hopper)
    arrays, _ = packed()
    x, config = torch.ones(40, 200).bfloat16(), MatmulConfig(64, 64, 32, 4, 1, 3)
    with pytest.raises(ValueError, match="not for this GPU"):
        multiply_weights(x, arrays, W12, 200, config=config)
    monkeypatch.setattr(matmul, "_MAX_SHARED_ROWS", 32)  # offsets of more might not fit 32 bits
    expected = multiply_weights(x, arrays, W12, 200, config=replace(config, block_tokens=32))
    assert torch.equal(multiply_weights(x, arrays, W12, 200, config=config), expected)


def test_a_product_with_arrays_at_odd_addresses_is_right_and_warns_once() -> None:
    weights._warn_of_alignment.cache_clear()
    arrays, _ = packed()
    x = torch.ones(2, 200, dtype=torch.bfloat16)
    expected = multiply_weights(x, arrays, W12, 200)
    odd = [views_of_a_buffer(arrays, 4) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match=r"low_bytes.*clone\(\)") as told:
        found = [multiply_weights(x, each, W12, 200) for each in odd]
    assert len(told) == 1
    assert all(torch.equal(y, expected) for y in found)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))


def test_a_gpu_of_another_vendor_gets_the_plain_way(
    rocm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    has_kernels = operators._has_kernels.__wrapped__  # it warns once for a device
    with pytest.warns(RuntimeWarning, match=r"NVIDIA.*ROCm.*unpack_model_"):
        assert not has_kernels(gpu)
    with pytest.raises(OSError, match="ROCm"):
        find_gpu()
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    assert not launch.runs_on(gpu)
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_kernels(gpu)
    assert launch.runs_on(gpu)


def test_a_gpu_without_bf16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    with pytest.warns(RuntimeWarning, match=r"8\.0, and cuda has 7\.5 \(Tesla T4\)"):
        assert not operators._has_kernels.__wrapped__(torch.device("cuda"))


def test_the_plain_way_is_exact_where_kernels_do_not_run() -> None:
    """Other devices decode with PyTorch's own operations, here tried on the host."""
    _, plain = packed()
    weight = pack_weight(plain, "W12")
    most = int(weight.exception_starts.diff().max())
    rows = torch.tensor([0, 32, 5])
    found = operators.gather_rows(weight.arrays, W12, 200, rows, most)
    assert torch.equal(found.view(torch.int16), plain[rows].view(torch.int16))
