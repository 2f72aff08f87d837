"""The benchmarks: their data, what they refuse, and the document made from their figures."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("data", "machine", "measure", "peers", "report")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield {name: import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_document_is_what_the_kept_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    written = (ROOT / "docs" / "benchmarks.md").read_text()
    assert written == benchmarks["report"].document(ROOT / "benchmarks" / "results")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_cast_model_file_equals_the_cast_of_torch(
    benchmarks: dict[str, ModuleType], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "cast.safetensors"
    benchmarks["data"].write_model_file(kind, path)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    original = safetensors_torch.load_file(benchmarks["data"].model_path())
    cast = safetensors_torch.load_file(path)
    assert original.keys() == cast.keys()
    for name, tensor in original.items():
        wanted = tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
        assert cast[name].dtype == wanted.dtype
        assert torch.equal(cast[name], wanted)


def test_data_with_another_hash_is_refused(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benchmarks["data"].PINNED, "fp8_e4m3", "0" * 64)
    with pytest.raises(ValueError, match="fp8_e4m3 has sha256"):
        benchmarks["data"].make("fp8_e4m3")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("emb_fp32", {"embed_tokens.weight": (16384, 1024)}),
        ("llm_bf16", {"matrix_0": (4096, 4096), "matrix_1": (4096, 4096)}),
        ("zeros_bf16", {"zeros": (1 << 25,)}),
    ],
)
def test_tensors_are_views_that_cover_the_array(
    benchmarks: dict[str, ModuleType], name: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    dataset = benchmarks["data"].make(name)
    assert {key: tensor.shape for key, tensor in dataset.tensors} == shapes
    address = dataset.array.ctypes.data
    for _, tensor in dataset.tensors:
        assert tensor.ctypes.data == address
        address += tensor.nbytes
    assert address == dataset.array.ctypes.data + dataset.array.nbytes


def test_model_set_has_the_tensors_of_the_file(benchmarks: dict[str, ModuleType]) -> None:
    published = safetensors_torch.load_file(benchmarks["data"].model_path())
    wanted = {name: t for name, t in published.items() if t.dtype == torch.float32}
    tensors = dict(benchmarks["data"].make("model_fp32").tensors)
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, wanted[name].numpy())


@pytest.mark.parametrize(
    ("limit", "shapes"),
    [
        (5 * 4096 - 1, [("embed_tokens.weight", (4, 1024))]),
        (4095, [("embed_tokens.weight", (1023,))]),
    ],
)
def test_limit_keeps_whole_rows(
    benchmarks: dict[str, ModuleType], limit: int, shapes: list[tuple[str, tuple[int, ...]]]
) -> None:
    whole = benchmarks["data"].make("emb_fp32")
    first = benchmarks["data"].make("emb_fp32", limit_nbytes=limit)
    assert [(name, tensor.shape) for name, tensor in first.tensors] == shapes
    assert np.array_equal(first.array, whole.array[: first.array.size])
    assert first.sha256 != whole.sha256


def test_limit_cuts_a_model_after_whole_tensors(benchmarks: dict[str, ModuleType]) -> None:
    whole = benchmarks["data"].make("model_bf16")
    nbytes = [tensor.nbytes for _, tensor in whole.tensors]
    first = benchmarks["data"].make("model_bf16", limit_nbytes=sum(nbytes[:7]) + 1)
    assert first.array.nbytes == sum(nbytes[:7])
    assert [name for name, _ in first.tensors] == [name for name, _ in whole.tensors[:7]]


class _Forgetful:
    """A codec that loses the last byte."""

    def __init__(self, array: np.ndarray, threads: int) -> None:
        self.nbytes = array.nbytes

    def prepare(self, array: np.ndarray) -> np.ndarray:
        return array.view(np.uint8)

    def encode(self, source: np.ndarray) -> bytes:
        return source[:-1].tobytes()

    def decode(self, payload: bytes) -> bytes:
        return payload.ljust(self.nbytes, b"\0")


class _Vandal(_Forgetful):
    """A codec that is exact, and writes to its input afterwards."""

    def encode(self, source: np.ndarray) -> bytes:
        payload = source.tobytes()
        source[:] = 0
        return payload


@pytest.mark.parametrize("codec", [_Forgetful, _Vandal])
def test_codec_that_is_not_lossless_is_never_timed(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, codec: type
) -> None:
    monkeypatch.setitem(benchmarks["peers"].CODECS, "bad", codec)
    array = np.arange(1, 1001, dtype=np.uint8)
    dataset = benchmarks["data"].DataSet("bytes", "U8", array, "", "")
    with pytest.raises(RuntimeError, match="bad does not give back bytes bit for bit"):
        benchmarks["measure"].enter("bad", dataset, 1)


@pytest.mark.parametrize("codec", ["np.copyto", "packhorse-fast", "packhorse", "packhorse-max"])
def test_own_codecs_are_measured(benchmarks: dict[str, ModuleType], codec: str) -> None:
    dataset = benchmarks["data"].DataSet("ramp", "F32", np.arange(5000, dtype=np.float32), "", "")
    contender = benchmarks["measure"].enter(codec, dataset, 1)
    (row,) = benchmarks["measure"].compete([contender], dataset, 3)
    assert row.ratio == pytest.approx(20000 / contender.packed_nbytes)
    assert 0 < row.encode[1] <= row.encode[0] <= row.encode[2]
    assert 0 < row.decode[1] <= row.decode[0] <= row.decode[2]
