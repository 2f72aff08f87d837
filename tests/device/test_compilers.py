"""GPUs for which Triton cannot compile kernels: one warning, and then plain PyTorch."""

import subprocess
import warnings
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F
from device_samples import inputs, model_matrix, same_bits
from triton.runtime.errors import OutOfResources, PTXASError

from packhorse.device import PackedWeight, operators, pack_weight, products
from packhorse.gpu.compiler_faults import compiler_fault
from packhorse.kernels import weights

OLD_PTXAS = PTXASError(
    "Internal Triton PTX codegen error\n`ptxas` stderr:\n"
    "ptxas fatal   : Value 'sm_150a' is not defined for option 'gpu-name'\n\nRepro command: ptxas"
)


class HasKernels:
    """Takes the host for a GPU with kernels, as long as Triton can compile."""

    def __call__(self, device: torch.device) -> bool:
        return device not in operators._NO_COMPILER

    def cache_clear(self) -> None:
        pass


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> PackedWeight:
    """A weight on what seems to be a GPU."""
    weight = pack_weight(model_matrix(70, 96))
    monkeypatch.setattr(operators, "_has_kernels", HasKernels())
    monkeypatch.setattr(operators, "_NO_COMPILER", set())
    return weight


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(products, "multiply", fail)
    monkeypatch.setattr(weights, "decode_weights", fail)
    monkeypatch.setattr(weights, "decode_rows", fail)


@pytest.mark.parametrize("first", ["multiply", "unpack", "look up"])
def test_plain_pytorch_takes_over_with_one_warning(
    first: str, packed: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x, rows = model_matrix(70, 96), inputs(3, 96), torch.tensor([3, 69, 3])
    fail_with(OLD_PTXAS, monkeypatch)
    calls = {
        "multiply": (lambda: F.linear(x, packed), F.linear(x, plain)),
        "unpack": (packed.unpack, plain),
        "look up": (lambda: packed.gather_rows(rows), plain[rows]),
    }
    run, expected = calls[first]
    message = r"for cpu \(ptxas fatal : Value 'sm_150a' is not defined.*\): plain PyTorch"
    with pytest.warns(RuntimeWarning, match=message) as told:
        assert same_bits(run(), expected)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run, expected in calls.values():
            assert same_bits(run(), expected)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("a wrong shape")]
)
def test_other_errors_are_raised(
    error: Exception, packed: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(error, monkeypatch)
    for run in (packed.unpack, lambda: F.linear(inputs(3, 96), packed)):
        with pytest.raises(type(error), match=str(error)):
            run()
    assert not operators._NO_COMPILER


def test_faults_of_compilers_are_one_line() -> None:
    said = "Failed to find C compiler. Please specify via CC environment variable"
    assert compiler_fault(RuntimeError(said)) == "Failed to find C compiler"
    assert compiler_fault(RuntimeError("Cannot find ptxas")) == "Cannot find ptxas"
    gcc = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])
    assert compiler_fault(gcc) == "gcc ended with status 1"
    assert (
        compiler_fault(PTXASError("`ptxas` raised SIGSEGV\nmore"))
        == "PTXAS error: `ptxas` raised SIGSEGV"
    )
    assert compiler_fault(OutOfResources(1, 0, "shared memory")) is None
    assert compiler_fault(RuntimeError("CUDA error: an illegal access")) is None
