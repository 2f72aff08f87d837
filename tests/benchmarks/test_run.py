"""The benchmarks: their data, the errors that they raise, and the documents made from their
figures."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from benchmark_modules import import_afresh

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    *("run", "common.machine", "common.process", "data.sets", "layers.weights"),
    *(
        "codecs.measure",
        "codecs.peers",
        "codecs.page",
        "codecs.plot",
        "codecs.report",
        "codecs.targets",
    ),
    *("snapshots.delta_peers", "snapshots.measure", "snapshots.pairs", "snapshots.report"),
)
RIVALS = (
    *("zipnn", "openzl", "openzl-fse", "pcodec", "pcodec-12", "zstandard-1", "zstandard-3"),
    *("planes+zstandard-1", "planes+zstandard-3", "planes+bz2", "dcp-zstd"),
    *("blosc2-bitshuffle-lz4", "blosc2-bitshuffle-zstd", "nvcomp-bitcomp", "nvcomp-gdeflate"),
    "lz4",
)
OURS = ("packhorse-fast", "packhorse", "packhorse-max")
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
# A package that zipnn imports uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    """The modules of `benchmarks` that these tests use."""
    with import_afresh(*MODULES) as modules:
        yield modules


def test_page_is_what_the_kept_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    """It has at most two screens, of 50 lines each."""
    written = (ROOT / "docs" / "benchmarks.md").read_text()
    assert written == benchmarks["codecs.page"].page(ROOT / "benchmarks" / "results")
    assert len(written.splitlines()) <= 100


def test_document_is_what_the_kept_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    written = (ROOT / "docs" / "benchmarks_codecs.md").read_text()
    assert written == benchmarks["codecs.report"].document(ROOT / "benchmarks" / "results")


def test_readme_is_what_the_kept_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    written = (ROOT / "README.md").read_text()
    assert written == benchmarks["codecs.report"].readme(written, ROOT / "benchmarks" / "results")


def test_picture_is_what_the_kept_figures_give(benchmarks: dict[str, ModuleType]) -> None:
    written = (ROOT / "docs" / "benchmarks.svg").read_text()
    assert written == benchmarks["codecs.report"].picture(ROOT / "benchmarks" / "results")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_cast_model_file_equals_the_cast_of_torch(
    benchmarks: dict[str, ModuleType], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "cast.safetensors"
    benchmarks["data.sets"].write_model_file(kind, path)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    original = safetensors_torch.load_file(benchmarks["data.sets"].model_path())
    cast = safetensors_torch.load_file(path)
    assert original.keys() == cast.keys()
    for name, tensor in original.items():
        wanted = tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
        assert cast[name].dtype == wanted.dtype
        assert torch.equal(cast[name], wanted)


def test_data_with_another_hash_is_refused(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benchmarks["data.sets"].PINNED, "fp8_e4m3", "0" * 64)
    with pytest.raises(ValueError, match="fp8_e4m3 has sha256"):
        benchmarks["data.sets"].make("fp8_e4m3")


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
    dataset = benchmarks["data.sets"].make(name)
    assert {key: tensor.shape for key, tensor in dataset.tensors} == shapes
    address = dataset.array.ctypes.data
    for _, tensor in dataset.tensors:
        assert tensor.ctypes.data == address
        address += tensor.nbytes
    assert address == dataset.array.ctypes.data + dataset.array.nbytes


def test_model_set_has_the_tensors_of_the_file(benchmarks: dict[str, ModuleType]) -> None:
    published = safetensors_torch.load_file(benchmarks["data.sets"].model_path())
    wanted = {name: t for name, t in published.items() if t.dtype == torch.float32}
    tensors = dict(benchmarks["data.sets"].make("model_fp32").tensors)
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
    whole = benchmarks["data.sets"].make("emb_fp32")
    first = benchmarks["data.sets"].make("emb_fp32", limit_nbytes=limit)
    assert [(name, tensor.shape) for name, tensor in first.tensors] == shapes
    assert np.array_equal(first.array, whole.array[: first.array.size])
    assert first.sha256 != whole.sha256


def test_limit_cuts_a_model_after_whole_tensors(benchmarks: dict[str, ModuleType]) -> None:
    whole = benchmarks["data.sets"].make("model_bf16")
    nbytes = [tensor.nbytes for _, tensor in whole.tensors]
    first = benchmarks["data.sets"].make("model_bf16", limit_nbytes=sum(nbytes[:7]) + 1)
    assert first.array.nbytes == sum(nbytes[:7])
    assert [name for name, _ in first.tensors] == [name for name, _ in whole.tensors[:7]]


def _weights(benchmarks: dict[str, ModuleType], dtype: str, size: int = 6000) -> Any:
    """A data set of some numbers."""
    values = np.random.default_rng(7).normal(0, 40, size).astype(np.float32)
    array = (values > 0) if dtype == "BOOL" else values.astype(np.int8).astype(DTYPES[dtype])
    if dtype in ("BF16", "F16", "F32", "F64"):
        array = (values / 1000).astype(DTYPES[dtype])
    return benchmarks["data.sets"].DataSet(f"some_{dtype}", dtype, array, "", "some numbers")


def _enter(benchmarks: dict[str, ModuleType], codec: str, dataset: Any, **setup: Any) -> Any:
    """The result of `enter`; skips the test if the codec is not installed."""
    chosen = benchmarks["codecs.peers"].Setup(**setup)
    try:
        benchmarks["codecs.peers"].build(codec, dataset, chosen)
    except ImportError as reason:
        pytest.skip(f"{codec}: {reason}")
    except benchmarks["codecs.peers"].UnsupportedError:
        pass
    return benchmarks["codecs.measure"].enter(codec, dataset, chosen)


def test_all_codecs_are_listed(benchmarks: dict[str, ModuleType]) -> None:
    assert set(benchmarks["codecs.peers"].CODECS) == {"np.copyto", *OURS, *RIVALS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["np.copyto", *OURS, *RIVALS])
def test_codec_gives_back_every_dtype(
    benchmarks: dict[str, ModuleType], codec: str, dtype: str
) -> None:
    dataset = _weights(benchmarks, dtype)
    for fresh in (False, True):
        contender = _enter(benchmarks, codec, dataset, fresh=fresh)
        assert isinstance(contender, benchmarks["codecs.measure"].Contender), contender
        assert contender.ratio > 0.9


@pytest.mark.parametrize("codec", ["np.copyto", *OURS, *RIVALS])
def test_codec_gives_back_with_two_threads_or_says_why_not(
    benchmarks: dict[str, ModuleType], codec: str
) -> None:
    entered = _enter(benchmarks, codec, _weights(benchmarks, "BF16", 200_000), threads=2)
    if isinstance(entered, str):
        assert entered.endswith("one thread")
        assert codec not in (*OURS, "zipnn", "zstandard-3", "blosc2-bitshuffle-lz4")


@pytest.mark.parametrize("fresh", [False, True])
def test_packhorse_packs_each_tensor_in_its_shape(
    benchmarks: dict[str, ModuleType], fresh: bool
) -> None:
    shapes = (("a", (40, 100)), ("b", (1999,)), ("c", ()))
    dataset = replace(_weights(benchmarks, "BF16"), shapes=shapes)
    setup = benchmarks["codecs.peers"].Setup(fresh=fresh)
    codec = benchmarks["codecs.peers"].build("packhorse", dataset, setup)
    packed = codec.encode(codec.prepare(dataset))
    from packhorse.numpy import decompress

    assert [decompress(frame).shape for frame in packed] == [shape for _, shape in shapes]
    entered = benchmarks["codecs.measure"].enter("packhorse", dataset, setup)
    assert entered.ratio == dataset.array.nbytes / sum(len(frame) for frame in packed)


def test_slow_codec_is_timed_on_the_middle(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks["codecs.measure"], "SLICE_NBYTES", 4000)
    dataset = _weights(benchmarks, "F32")
    slow = _enter(benchmarks, "planes+bz2", dataset)
    quick = _enter(benchmarks, "packhorse", dataset)
    assert np.array_equal(slow.timed.array, dataset.array[2500:3500])
    rows = benchmarks["codecs.measure"].compete([slow, quick], dataset, 4)
    assert [(row.timed_nbytes, row.rounds) for row in rows] == [(4000, 2), (24000, 4)]
    whole = slow.codec.encode(dataset.array.view(np.uint32)[2500:3500])
    assert dataset.array.nbytes / slow.ratio > sum(len(part) for part in whole)


class _Forgetful:
    """A codec that loses the last byte."""

    def __init__(self, data: Any, setup: Any) -> None:
        self.nbytes = data.array.nbytes

    def prepare(self, data: Any) -> np.ndarray:
        return data.array.view(np.uint8)

    def encode(self, source: np.ndarray) -> bytes:
        return source[:-1].tobytes()

    def decode(self, payload: bytes) -> bytes:
        return payload.ljust(self.nbytes, b"\0")


class _Vandal(_Forgetful):
    """A codec that is exact, but writes to its input afterwards."""

    def encode(self, source: np.ndarray) -> bytes:
        payload = source.tobytes()
        source[:] = 0
        return payload


@pytest.mark.parametrize("codec", [_Forgetful, _Vandal])
def test_codec_that_is_not_lossless_is_never_timed(
    benchmarks: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, codec: type
) -> None:
    peers = benchmarks["codecs.peers"]
    monkeypatch.setitem(peers.CODECS, "bad", peers.Entry(codec, ""))
    array = np.arange(1, 1001, dtype=np.uint8)
    dataset = benchmarks["data.sets"].DataSet("bytes", "U8", array, "", "")
    with pytest.raises(RuntimeError, match="bad does not restore bytes bit for bit"):
        benchmarks["codecs.measure"].enter("bad", dataset, benchmarks["codecs.peers"].Setup())


@pytest.mark.parametrize("codec", ["np.copyto", *OURS])
def test_own_codecs_are_measured(benchmarks: dict[str, ModuleType], codec: str) -> None:
    array = np.arange(5000, dtype=np.float32)
    dataset = benchmarks["data.sets"].DataSet("ramp", "F32", array, "", "")
    contender = _enter(benchmarks, codec, dataset)
    (row,) = benchmarks["codecs.measure"].compete([contender], dataset, 3)
    assert row.ratio == contender.ratio
    assert row.rounds == 3
    assert 0 < row.encode[1] <= row.encode[0] <= row.encode[2]
    assert 0 < row.decode[1] <= row.decode[0] <= row.decode[2]


@pytest.mark.parametrize(
    "options", [[], ["--full", "--rounds", "1"], ["--full", "--data", "zeros_bf16"]]
)
def test_main_table_needs_a_whole_run(
    benchmarks: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmarks["run"].main(["--write", *options])
    assert "needs a whole run" in capsys.readouterr().err


@cache
def _small_run() -> str:
    """The figures of the first MB of the model, as run.py keeps them."""
    codecs = ["np.copyto", *OURS, "zstandard-1", "zstandard-3", "planes+bz2", "dcp-zstd"]
    options = ["--data", "model_bf16", "--first-mb", "1", "--rounds", "2", "--codec", *codecs]
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *options]
    done = subprocess.run(
        [*command, "--json", "/dev/stderr"], capture_output=True, text=True, check=True
    )
    assert "### model_bf16 (1.0 MB" in done.stdout
    return done.stderr


@pytest.fixture
def small_run() -> dict[str, Any]:
    """A run of some codecs on little data, which a test may change."""
    return json.loads(_small_run())


def test_section_has_a_line_for_every_codec(
    benchmarks: dict[str, ModuleType], small_run: dict[str, Any]
) -> None:
    (dataset,) = small_run["data"]
    section = benchmarks["codecs.report"].section(dataset, small_run["rows"])
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(table) == len(small_run["rows"]) == 8 + 5
    for line, row in zip(table, small_run["rows"], strict=True):
        assert row["codec"] in line
        assert f"| {row['threads']} | {row['ratio']:.4f} | {row['encode'][0]:.2f}"[:16] in line
    assert "†" not in section  # a set of 1 MB is timed whole
    dataset["nbytes"] += 1
    assert "† Slow, so timed in 2 rounds" in benchmarks["codecs.report"].section(
        dataset, small_run["rows"]
    )


def test_document_names_codecs_machine_and_losses(
    benchmarks: dict[str, ModuleType], small_run: dict[str, Any], tmp_path: Path
) -> None:
    rival = next(row for row in small_run["rows"] if row["codec"] == "zstandard-3")
    rival["ratio"] = 99.0
    (tmp_path / "cpu-auto.json").write_text(json.dumps(small_run))
    for name, changed in (("fresh", {"fresh_memory": True}), ("avx2", {"simd": "avx2"})):
        (tmp_path / f"cpu-{name}.json").write_text(json.dumps(small_run | changed))
    document = benchmarks["codecs.report"].document(tmp_path)
    for part in (small_run["machine"]["cpu"], "fresh memory", "forced to the avx2 path"):
        assert part in document
    for name, entry in benchmarks["codecs.peers"].CODECS.items():
        assert (f"- `{name}`: {entry.how}." in document) == (name in small_run["codecs"])
    assert "| model_bf16 | 1 | zstandard-3 | ratio | 99.0000 |" in document


def _box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """The approximate edges of a label: left, right, top, bottom."""
    x, y = float(text.attrib["x"]), float(text.attrib["y"])
    width = 7.7 * len(text.text or "")
    left = x - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
    return left, left + width, y - 11, y + 1


def test_picture_has_a_mark_and_a_free_label_for_every_codec(
    benchmarks: dict[str, ModuleType], small_run: dict[str, Any], tmp_path: Path
) -> None:
    slow = next(row for row in small_run["rows"] if row["codec"] == "planes+bz2")
    slow["decode"] = [0.01, 0.01, 0.01]
    (tmp_path / "cpu-auto.json").write_text(json.dumps(small_run))
    root = ElementTree.fromstring(benchmarks["codecs.report"].picture(tmp_path))
    codecs = {row["codec"] for row in small_run["rows"]}
    labels = [e for e in root.iter(f"{SVG}text") if "text-anchor" in e.attrib]
    assert len(labels) == len(codecs)
    arrows = [e for e in root.iter(f"{SVG}path") if "fill" in e.attrib]
    assert len([*root.iter(f"{SVG}circle"), *arrows]) == len(codecs)
    assert len(arrows) == 1
    assert any(e.text == "planes + bz2, 0.01 GB/s" for e in labels)
    for one, other in combinations([_box(label) for label in labels], 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart, (one, other)


def _row(codec: str, ratio: float, speed: float, **changes: Any) -> dict[str, Any]:
    speeds = {"encode": [speed] * 3, "decode": [speed] * 3}
    walls = {"encode_wall": speed, "decode_wall": speed}
    return {"data": "model_bf16", "codec": codec, "threads": 1, "ratio": ratio} | (
        speeds | walls | changes
    )


def _met(benchmarks: dict[str, ModuleType], rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Whether each demand on the default level is met, by the demand's text."""
    verdicts = benchmarks["codecs.targets"].judge(rows, forced=False)
    return {
        f"{v.figure} {v.bar}": v.met
        for v in verdicts
        if (v.target, v.data) == ("bf16 weights", "model_bf16")
    }


def test_targets_are_met_exactly_from_their_bars(benchmarks: dict[str, ModuleType]) -> None:
    rivals = [_row("np.copyto", 1.0, 6.0), _row("zipnn", 1.5, 1.0), _row("pcodec", 1.509, 0.1)]
    rivals.append(_row("openzl-fse", 1.507, 0.5))
    two = _row("packhorse", 1.508, 5.6, threads=2)
    met = _met(benchmarks, [*rivals, _row("packhorse", 1.508, 3.0), two])
    assert len(met) == 10
    assert [words for words, verdict in met.items() if not verdict] == [
        "decode at least 0.6 times np.copyto's"
    ]
    missed = _met(benchmarks, [*rivals, _row("packhorse", 1.499, 0.9), two])
    assert [words for words, verdict in missed.items() if verdict] == [
        "encode, two threads at least 1.85 times one thread's",
        "decode, two threads at least 1.85 times one thread's",
    ]


def test_target_without_a_figure_is_neither_met_nor_missed(
    benchmarks: dict[str, ModuleType],
) -> None:
    met = _met(benchmarks, [_row("packhorse", 1.508, 3.0)])
    assert met.pop("ratio at least 1.507") is True
    assert set(met.values()) == {None}
    absent = [v for v in benchmarks["codecs.targets"].judge([], forced=False) if v.met is not None]
    assert not absent


def test_forced_paths_have_a_demand_of_their_own(benchmarks: dict[str, ModuleType]) -> None:
    rows = [_row("packhorse", 1.508, 3.0), _row("zipnn", 1.5, 3.1)]
    judge = benchmarks["codecs.targets"].judge
    extra = set(judge(rows, forced=True)) - set(judge(rows, forced=False))
    measured = [v for v in extra if v.met is not None]
    assert [(v.data, v.figure, v.met) for v in measured] == [("model_bf16", "decode", False)]


def test_every_target_has_data_and_rivals_that_exist(benchmarks: dict[str, ModuleType]) -> None:
    targets, codecs = benchmarks["codecs.targets"], benchmarks["codecs.peers"].CODECS
    assert set(targets.RIVALS) <= set(codecs)
    sets = benchmarks["data.sets"]
    known = {*benchmarks["run"].NAMES, *sets.TRAINING_NAMES, *sets.FETCHED_NAMES}
    assert set(targets.DATA) <= known
    for target in targets.TARGETS:
        assert target.codec in OURS
        for check in target.checks:
            rivals = {getattr(check, name, "zipnn") for name in ("rival", "dense", "exempt")}
            assert rivals <= set(codecs)


def test_demo_shows_what_comes_back(tmp_path: Path) -> None:
    weights = (torch.randn(300, 400, generator=torch.manual_seed(0)) * 0.02).bfloat16()
    safetensors_torch.save_file({"w": weights}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "demo.py", tmp_path / "model.safetensors"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if "model.safetensors" in line)
    assert "yes" in row
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.slow
def test_many_tiny_tensors_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Uses only a few tensors, so times mean nothing, but more than the number of files that may be
    open."""
    tiny = import_module("benchmarks.tiny_tensors")
    assert tiny.main(["--tensors", "100", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("100 tensors of 256 bytes: ")
    assert [line.partition(":")[0] for line in lines] == list(tiny.VERBS)


@pytest.mark.slow
def test_two_installations_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    calls = import_module("benchmarks.calls")
    options = ["--rounds", "1", "--elements", "5000"]
    assert calls.main([sys.executable, sys.executable, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 8
    assert all(" GB/s, " in line and line.endswith("%") for line in lines)
