"""How products reach the kernels in CUDA C++: launches, the check before the first product, what
happens where they do not run. The GPU is the emulator of PTX."""

import ctypes
import warnings
from pathlib import Path

import pytest
import torch
from device_samples import model_matrix
from tests.ptx.driver import install

from packhorse.device import choices, stream
from packhorse.device.cost import predict_plain
from packhorse.device.packed_arrays import pack_arrays
from packhorse.device.strategy import BUCKETS, Strategy
from packhorse.device.stream import is_ready, multiply_stream
from packhorse.device.stream_cost import predict_stream, stream_candidates
from packhorse.errors import MissingBackendError
from packhorse.gpu import cuda_driver, nvrtc
from packhorse.gpu.cuda_driver import DriverError
from packhorse.gpu.models import PRESETS
from packhorse.kernels.stream_product import (
    MAX_STREAM_TOKENS,
    StreamConfig,
    default_stream_config,
    stream_shared_nbytes,
)
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat

HOST = torch.device("cpu")
FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))
SIZES = [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (300, 17), (1, 1)]


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_KERNELS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def needs_compiler() -> None:
    try:
        nvrtc.compiler()
    except MissingBackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("format", "launches"), [(W12, ["multiply"]), (W11, ["arrange_tokens", "multiply"])]
)
def test_launches_start_early(
    format: WeightFormat, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W11 has dozens of exceptions in a row, and needs the tokens by columns."""
    needs_compiler()
    driver = install(monkeypatch)
    monkeypatch.setattr(stream, "_CHECKED_TOKENS", (8,))
    plain, bias = model_matrix(40, 300), torch.randn(40).bfloat16()
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = pack_arrays(plain, format)
    assert is_ready(HOST)
    driver.launches.clear()
    config = StreamConfig(16, 8, 4, 2, cluster=2)
    y = multiply_stream(x, weights, format, 300, bias=bias, config=config)
    expected = x.double() @ plain.double().T + bias
    assert (y - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert [(name, early) for name, _, early in driver.launches] == [
        (name, True) for name in launches
    ]


@pytest.mark.parametrize(
    ("n_tokens", "config"),
    [(3, StreamConfig(16, 8, 4, 2, cluster=2)), (40, StreamConfig(64, 64, 2, 3, n_splits=2))],
)
def test_tokens_at_any_address(
    n_tokens: int, config: StreamConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes the place of rows that are no multiples of 16 bytes, or not aligned so."""
    needs_compiler()
    install(monkeypatch)
    monkeypatch.setattr(stream, "_CHECKED_TOKENS", (8,))
    for n_columns, offset in ((33, 0), (40, 1)):
        plain = model_matrix(20, n_columns)
        x = torch.randn(n_tokens * n_columns + offset).bfloat16()[offset:]
        x = x.view(n_tokens, n_columns)
        weights = pack_arrays(plain, W12)
        y = multiply_stream(x, weights, W12, n_columns, config=config)
        expected = x.double() @ plain.double().T
        assert (y - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_more_tokens_than_the_kernels_take_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Kernels:
        def run(self, x: torch.Tensor, *others: object) -> None:
            sizes.append(len(x))
            others[3].copy_(x[:, :20])  # type: ignore[attr-defined]

    monkeypatch.setattr(stream, "_KERNELS", {HOST: Kernels()})
    config = StreamConfig(64, 256, 2, 3)
    weights = pack_arrays(model_matrix(20, 40), W12)
    x = torch.arange(600 * 40).view(600, 40).bfloat16()
    y = multiply_stream(x, weights, W12, 40, config=config)
    assert sizes == [256, 256, 88]
    assert torch.equal(y, x[:, :20])


def test_a_wrong_product_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_is_offered", lambda device: True)
    monkeypatch.setattr(stream.StreamKernels, "run", lambda *arguments: None)
    with pytest.warns(RuntimeWarning, match="8 tokens in W12 is wrong.*PACKHORSE_STREAM=0"):
        assert not is_ready(HOST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_ready(HOST)  # and says so once
    weights = pack_arrays(model_matrix(8, 40), W12)
    with pytest.raises(MissingBackendError, match="do not run"):
        multiply_stream(torch.ones(1, 40).bfloat16(), weights, W12, 40)


@pytest.mark.parametrize(
    "error", [MissingBackendError("no compiler"), DriverError("no image"), ValueError("an error")]
)
def test_a_missing_part_turns_the_kernels_off(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(stream, "_is_offered", lambda device: True)
    monkeypatch.setattr(stream.StreamKernels, "load", fail)
    with pytest.warns(RuntimeWarning, match=str(error)):
        assert not is_ready(HOST)


def test_nothing_is_tried_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_is_offered", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_ready(HOST)
    assert stream.waits_for_capture(HOST)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(stream, "_is_right", lambda *arguments: True)
    assert is_ready(HOST)


def test_other_devices_are_left_alone() -> None:
    assert not is_ready(HOST)
    assert not stream.waits_for_capture(HOST)


@FORMATS
def test_small_batches_all_take_these_kernels_and_one_order(
    format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_EXPECTED", {})
    for name in ("is_ready", "prepare"):
        monkeypatch.setattr(choices, name, lambda *arguments: True)
    for n_rows, n_columns in SIZES[:4]:
        found = [choices.choose(n_rows, n_columns, n, format, HOST) for n in BUCKETS if n <= 32]
        assert {choice.strategy for choice in found} == {Strategy.STREAM}
        assert len({choice.config.n_splits for choice in found}) == 1  # type: ignore[union-attr]
    assert choices.choose(4096, 4096, 1024, format, HOST).strategy is not Strategy.STREAM


def test_a_division_that_cannot_be_loaded_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_EXPECTED", {})
    monkeypatch.setattr(choices, "is_ready", lambda *arguments: True)
    monkeypatch.setattr(choices, "prepare", lambda *arguments: False)
    assert choices.choose(4096, 4096, 8, W12, HOST).strategy is Strategy.FUSED


@FORMATS
def test_all_candidates_fit(format: WeightFormat) -> None:
    for n_rows, n_columns in SIZES:
        for n_tokens in (1, 8, 9, 32, 33, 200, MAX_STREAM_TOKENS):
            found = list(stream_candidates(n_rows, n_columns, n_tokens, format, 132))
            assert found[0] == default_stream_config(n_rows, n_columns, n_tokens, format)
            assert len(found) == len(set(found))
            assert all(stream_shared_nbytes(config, format) <= 227 << 10 for config in found)
            if n_tokens <= 32:
                assert len({config.n_splits for config in found}) == 1
    assert not list(stream_candidates(8, 8, MAX_STREAM_TOKENS + 1, format, 132))


def test_predictions_are_in_reason() -> None:
    """No product is faster than the memory, and W12 with 8 tokens is faster than BF16."""
    gpu = next(model for model in PRESETS if model.name == "H200")
    for n_rows, n_columns in SIZES[:4]:
        for format in WEIGHT_FORMATS.values():
            config = default_stream_config(n_rows, n_columns, 8, format)
            seconds = predict_stream(n_rows, n_columns, 8, format, config, gpu)
            assert seconds > n_rows * n_columns * format.bits / 8 / gpu.bandwidth
    config = default_stream_config(28672, 4096, 8, W12)
    packed = predict_stream(28672, 4096, 8, W12, config, gpu)
    assert 1 < predict_plain(28672, 4096, 8, gpu) / packed < 16 / 12
    many = default_stream_config(28672, 4096, 256, W11)
    assert predict_stream(28672, 4096, 256, W11, many, gpu) > packed


# What the machine lacks.


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", load)
    with pytest.raises(MissingBackendError, match=r"libcuda\.so\.1.*CUDA 12"):
        cuda_driver.driver.__wrapped__()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvrtc, "_folders", list)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    with pytest.raises(MissingBackendError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compiler.__wrapped__()


def test_an_old_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def nvrtcVersion(self, major: object, minor: object) -> int:
            return 0

    monkeypatch.setattr(nvrtc, "find_library", lambda: "libnvrtc.so")
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: Old())
    with pytest.raises(MissingBackendError, match=r"kernels need 12\.3"):
        nvrtc.compiler.__wrapped__()


def test_errors_of_a_program_are_shown() -> None:
    needs_compiler()
    with pytest.raises(ValueError, match="nonsense"):
        nvrtc.compiler().compile("nonsense", ("--gpu-architecture=sm_90a",))


def test_machine_code_is_kept_for_later_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    monkeypatch.setenv("PACKHORSE_CACHE_DIR", str(tmp_path))
    source, options = 'extern "C" __global__ void f() {}', ("--gpu-architecture=sm_90a",)
    code = nvrtc.compiler().compile_once(source, options)
    assert code == nvrtc.compiler().compile(source, options)
    (kept,) = (tmp_path / "kernels").iterdir()
    with monkeypatch.context() as patch:  # nothing is compiled again
        patch.setattr(nvrtc.Compiler, "compile", None)
        assert nvrtc.compiler().compile_once(source, options) == code
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40] + b"x" + whole[41:]):
        kept.write_bytes(damaged)
        assert nvrtc.compiler().compile_once(source, options) == code
        assert kept.read_bytes() == whole
    nvrtc.compiler().compile_once(source, (*options, "-DA=1"))
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PACKHORSE_CACHE_DIR", str(tmp_path / "file"))
    source, options = 'extern "C" __global__ void f() {}', ("--gpu-architecture=sm_90a",)
    assert nvrtc.compiler().compile_once(source, options)


class _Library:
    """Notes what the driver is given."""

    def __init__(self, result: int = 0) -> None:
        self.result, self.calls = result, {}  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls[name] = arguments
            return self.result if name != "cuGetErrorString" else 0

        return call


def test_a_launch_is_laid_out_as_the_driver_expects() -> None:
    """The sizes and offsets are those of cuda.h, on 64 bits."""
    launch, attribute = cuda_driver._Launch, cuda_driver._Attribute
    assert ctypes.sizeof(launch) == 56
    assert ctypes.sizeof(attribute) == 72
    assert (launch.stream.offset, launch.attributes.offset, launch.n_attributes.offset) == (
        32,
        40,
        48,
    )
    library = _Library()
    kernel = cuda_driver.Driver(library).kernel(ctypes.c_void_p(1), "multiply", 384, 99)
    arguments = [ctypes.c_uint32(5), cuda_driver.TensorMap()]
    kernel(12, 7, arguments, early=True)
    given = library.calls["cuLaunchKernelEx"][0]._obj
    assert [*given.grid, *given.block, given.shared_nbytes] == [12, 1, 1, 384, 1, 1, 99]
    assert (given.stream, given.n_attributes) == (7, 1)
    assert (given.attributes[0].id, given.attributes[0].value.flag) == (6, 1)
    places = library.calls["cuLaunchKernelEx"][2]
    assert ctypes.c_uint32.from_address(places[0]).value == 5
    assert places[1] % 64 == 0
    assert library.calls["cuFuncSetAttribute"][1:] == (8, 99)


def test_a_tensor_map_is_described_in_the_drivers_order() -> None:
    library = _Library()
    cuda_driver.Driver(library).describe(
        1 << 40, (512, 300, 2), (1024, 512), (128, 32, 2), swizzle=True
    )
    given = library.calls["cuTensorMapEncodeTiled"]
    assert given[0].value % 64 == 0
    assert (given[1], given[2], given[3].value) == (0, 3, 1 << 40)
    assert [list(each) for each in given[4:8]] == [
        [512, 300, 2],
        [1024, 512],
        [128, 32, 2],
        [1, 1, 1],
    ]
    assert given[8:] == (0, 3, 3, 0)


def test_what_the_driver_refuses_is_an_error() -> None:
    with pytest.raises(DriverError, match="209"):
        cuda_driver.Driver(_Library(209)).load(b"")
