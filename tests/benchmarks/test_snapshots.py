"""The benchmarks of checkpoints: the pairs, the codecs with bases, the document of their figures.

The files have the names, types and manifest of those of a training run, but only a few thousand
values.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmark_modules import import_afresh

from benchmarks.common.process import RECYCLING_MALLOC

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = (
    *("run", "common.machine", "common.process", "data.sets"),
    *("codecs.measure", "codecs.peers", "codecs.plot", "codecs.report", "codecs.targets"),
    *("snapshots.delta_peers", "snapshots.measure", "snapshots.pairs", "snapshots.report"),
    *("snapshots.history", "snapshots.history_report", "snapshots.stores"),
)
LAST = 1152
HISTORY = range(LAST, LAST + 89, 8)
STORES = (
    *("safetensors", "dcp", "dcp-zstd", "zipnn-delta", "bitx-like"),
    *("packhorse", "packhorse-cache", "packhorse-dcp"),
)
SHAPES = {"embed.weight": (96, 50), "norm.weight": (50,), "proj.weight": (50, 70)}
PAIRS = ("bf16_1", "bf16_8", "bf16_128", "pure_bf16_1", "fp32_1", "bf16_sparse", "state_128")
# A package that zipnn imports uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def _state(step: int) -> dict[str, dict[str, Any]]:
    """Masters that go a little further with each step, and moments that stay about as large."""
    generator = torch.Generator().manual_seed(1)
    start = {n: torch.randn(s, generator=generator) * 0.03 for n, s in SHAPES.items()}
    way = {n: torch.randn(s, generator=generator) * 2e-5 for n, s in SHAPES.items()}
    masters = {n: start[n] + way[n] * step for n in SHAPES}
    first = {n: way[n] * (1 + torch.rand(way[n].shape, generator=generator)) for n in SHAPES}
    second = {n: first[n].square() for n in SHAPES}
    return {"w": masters, "m": first, "v": second}


def _write_run(folder: Path) -> None:
    """A folder as `benchmarks/training.py` leaves it."""
    folder.mkdir(parents=True)
    kinds = {"w32": "w", "w16": "w", "m32": "m", "v32": "v", "p16": "w"}
    steps = {kind: (LAST - 128, LAST - 8, LAST - 1, LAST) for kind in kinds}
    steps["p16"] = (LAST + 4, LAST + 5)
    later: dict[str, Any] = {"steps": [*HISTORY], "files": {}}
    files: dict[str, Any] = {}
    for kind, part in kinds.items():
        dtype = torch.bfloat16 if kind.endswith("16") else torch.float32
        for step in {*steps[kind], *(HISTORY if kind[0] != "p" else ())}:
            path = folder / f"{kind}_{step:06}.safetensors"
            tensors = {n: t.to(dtype) for n, t in _state(step)[part].items()}
            safetensors_torch.save_file(tensors, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            described = {"nbytes": path.stat().st_size, "sha256": digest}
            (files if step in steps[kind] else later["files"])[path.name] = described
    recipe = {"full_steps": LAST - 128, "cool_down": 128}
    manifest = {"recipe": recipe, "files": files, "history": later}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    _write_run(folder / "training")
    return folder


@pytest.fixture(scope="module")
def scripts(cache_folder: Path) -> Iterator[dict[str, ModuleType]]:
    """The modules of `benchmarks` that these tests use, with the small run as their data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKHORSE_BENCH_DATA", str(cache_folder))
        with import_afresh(*MODULES) as modules:
            yield modules


def test_document_is_what_the_kept_figures_give(scripts: dict[str, ModuleType]) -> None:
    written = (ROOT / "docs" / "benchmarks_snapshots.md").read_text()
    kept = json.loads((FOLDER / "results" / "snapshots.json").read_text())
    assert written == scripts["snapshots.report"].document(kept)
    if "history" in kept:
        picture = (ROOT / "docs" / scripts["snapshots.history_report"].PICTURE).read_text()
        assert picture == scripts["snapshots.history_report"].picture(kept)


def test_pairs_are_those_of_the_tables(scripts: dict[str, ModuleType]) -> None:
    assert scripts["snapshots.pairs"].NAMES == PAIRS


@pytest.mark.parametrize("name", PAIRS)
def test_base_is_as_large_and_another(scripts: dict[str, ModuleType], name: str) -> None:
    pair = scripts["snapshots.pairs"].make(name)
    assert pair.base.dtype == pair.array.dtype
    assert pair.base.shape == pair.array.shape
    assert pair.sha256 == hashlib.sha256(pair.array.view(np.uint8)).hexdigest() != pair.base_sha256
    assert pair.base_sha256 == hashlib.sha256(pair.base.view(np.uint8)).hexdigest()
    for part in pair.parts or (pair,):
        assert sorted(shape for _, shape in part.shapes) == sorted(SHAPES.values())
        assert [base.shape for base in part.bases] == [shape for _, shape in part.shapes]


def test_one_step_is_between_the_last_two(scripts: dict[str, ModuleType]) -> None:
    pair = scripts["snapshots.pairs"].make("bf16_1")
    for step, tensors in (
        (LAST, dict(pair.tensors)),
        (LAST - 1, dict(zip((n for n, _ in pair.shapes), pair.bases, strict=True))),
    ):
        for name, tensor in _state(step)["w"].items():
            wanted = tensor.bfloat16().view(torch.uint16).numpy()
            assert np.array_equal(tensors[name].view(np.uint16), wanted)


def test_sparse_changes_one_percent_to_the_next_step(scripts: dict[str, ModuleType]) -> None:
    pair, whole = (scripts["snapshots.pairs"].make(name) for name in ("bf16_sparse", "bf16_1"))
    new, old, next_step = (a.view(np.uint16) for a in (pair.array, pair.base, whole.array))
    changed = np.flatnonzero(new != old)
    assert changed.size == round(new.size / 100)
    assert np.array_equal(new[changed], next_step[changed])


def test_state_is_its_parts_and_the_copy_is_rounded_masters(
    scripts: dict[str, ModuleType],
) -> None:
    state = scripts["snapshots.pairs"].make("state_128")
    joined = b"".join(part.array.tobytes() for part in state.parts)
    assert joined == state.array.tobytes()
    assert all(np.shares_memory(part.array, state.array) for part in state.parts)
    (copy,) = [part for part in state.parts if part.cast_of is not None]
    masters = state.parts[copy.cast_of].array
    assert np.array_equal(
        masters.astype(copy.array.dtype).view(np.uint16), copy.array.view(np.uint16)
    )


@pytest.mark.parametrize("name", PAIRS)
def test_every_codec_gives_back_every_pair(scripts: dict[str, ModuleType], name: str) -> None:
    pair = scripts["snapshots.pairs"].make(name)
    entries, setup = scripts["snapshots.delta_peers"].CODECS, scripts["codecs.peers"].Setup()
    entered = [
        scripts["codecs.measure"].enter(codec, pair, setup, entries)
        for codec in scripts["snapshots.delta_peers"].available(name)
    ]
    contenders = [c for c in entered if not isinstance(c, str)]  # those that are installed
    ratios = {c.name: c.ratio for c in contenders}
    assert {"np.copyto", "packhorse", "packhorse-full"} <= set(ratios)
    assert ratios["packhorse"] > ratios["packhorse-full"]
    rows = scripts["codecs.measure"].compete(contenders, pair, rounds=1)
    assert [row.codec for row in rows] == list(ratios)


def test_each_pair_has_the_codecs_that_say_something(scripts: dict[str, ModuleType]) -> None:
    available = {name: scripts["snapshots.delta_peers"].available(name) for name in PAIRS}
    assert set().union(*available.values()) == set(scripts["snapshots.delta_peers"].CODECS)
    assert [n for n, codecs in available.items() if "index+value" in codecs] == ["bf16_sparse"]
    assert [n for n, codecs in available.items() if "dcp-zstd" in codecs] == ["state_128"]
    assert "xor+planes+bz2" not in available["state_128"]


def test_index_and_value_cost_six_bytes_a_change(scripts: dict[str, ModuleType]) -> None:
    pair = scripts["snapshots.pairs"].make("bf16_sparse")
    codec = scripts["snapshots.delta_peers"].IndexValueCodec(pair, scripts["codecs.peers"].Setup())
    packed = codec.encode(codec.prepare(pair))
    assert sum(part.nbytes for part in packed) == 6 * round(pair.array.size / 100)


@pytest.mark.parametrize("codec", ["packhorse", "packhorse-full", "dcp-zstd"])
def test_parts_of_a_state_are_counted_apart(scripts: dict[str, ModuleType], codec: str) -> None:
    pair = scripts["snapshots.pairs"].make("state_128")
    setup, entries = scripts["codecs.peers"].Setup(), scripts["snapshots.delta_peers"].CODECS
    contender = scripts["codecs.measure"].enter(codec, pair, setup, entries)
    costs = contender.codec.part_nbytes
    assert len(costs) == len(pair.parts)
    assert contender.ratio == pair.array.nbytes / sum(costs)


def test_rival_does_without_the_base_of_a_part_where_that_is_shorter(
    scripts: dict[str, ModuleType],
) -> None:
    peers, delta_peers = scripts["codecs.peers"], scripts["snapshots.delta_peers"]
    pair, setup = scripts["snapshots.pairs"].make("state_128"), peers.Setup()
    entry = delta_peers.CODECS["xor+zstandard-1"]
    both = scripts["codecs.measure"].enter("xor+zstandard-1", pair, setup, delta_peers.CODECS)
    for part, cost in zip(pair.parts, both.codec.part_nbytes, strict=True):
        for make in (peers.CODECS["zstandard-1"].make, entry.make):
            codec = make(part, setup)
            packed = codec.encode(codec.prepare(part))
            assert cost <= sum(piece.nbytes for piece in peers.parts(packed))


def test_slow_codec_is_timed_on_the_middle_of_both(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["codecs.measure"], "SLICE_NBYTES", 4000)
    pair = scripts["snapshots.pairs"].make("fp32_1")
    setup, entries = scripts["codecs.peers"].Setup(), scripts["snapshots.delta_peers"].CODECS
    slow = scripts["codecs.measure"].enter("xor+planes+bz2", pair, setup, entries)
    first = (pair.array.size - 1000) // 2
    assert np.array_equal(slow.timed.array, pair.array[first : first + 1000])
    assert np.array_equal(slow.timed.base, pair.base[first : first + 1000])


class _Vandal:
    """A codec that is exact, but writes to its base in the rounds that are timed."""

    def __init__(self, data: Any, setup: Any) -> None:
        self.base, self.calls = data.base.view(np.uint8), 0

    def prepare(self, data: Any) -> np.ndarray:
        return data.array.view(np.uint8)

    def encode(self, source: np.ndarray) -> bytes:
        self.calls += 1
        self.base[0] ^= self.calls > 1
        return source.tobytes()

    def decode(self, packed: bytes) -> bytes:
        return packed


def test_codec_that_changes_its_base_is_found_out(scripts: dict[str, ModuleType]) -> None:
    entries = {"bad": scripts["codecs.peers"].Entry(_Vandal, "")}
    pair = scripts["snapshots.pairs"].make("bf16_1")
    setup = scripts["codecs.peers"].Setup()
    contender = scripts["codecs.measure"].enter("bad", pair, setup, entries)
    with pytest.raises(RuntimeError, match="a codec changed its input"):
        scripts["codecs.measure"].compete([contender], pair, 1)


def test_every_target_has_a_pair_and_rivals_that_exist(scripts: dict[str, ModuleType]) -> None:
    targets = scripts["codecs.targets"].SNAPSHOT_TARGETS
    codecs = scripts["snapshots.delta_peers"].CODECS
    assert [name for target in targets for name in target.data] == list(PAIRS)
    for target in targets:
        for check in target.checks:
            named = (*getattr(check, "rivals", ()), getattr(check, "rival", "zipnn"))
            assert set(named) <= set(codecs)
            for rival in named[:-1]:
                assert rival in scripts["snapshots.delta_peers"].available(target.data[0])


def _row(codec: str, ratio: float, speed: float) -> dict[str, Any]:
    row = {"data": "state_128", "codec": codec, "threads": 1, "ratio": ratio}
    return row | {"encode": [speed] * 3, "decode": [speed] * 3}


def test_smaller_counts_from_its_bar_and_needs_all_its_rivals(
    scripts: dict[str, ModuleType],
) -> None:
    check = scripts["codecs.targets"].Smaller(1.5, ("zipnn", "dcp-zstd"))
    rivals = [_row("zipnn", 2.0, 1.0), _row("dcp-zstd", 1.0, 1.0), _row("bitx-like", 9.0, 1.0)]
    ours = _row("packhorse", 3.0, 1.0)
    have, need, words = check.compare(ours, [*rivals, ours])
    assert have == need == 1.5
    assert words == "1.500 times: 3.0000; zipnn 2.0000"
    assert check.compare(ours, [rivals[0], ours]) is None


def test_minimum_speed_counts_from_its_bar(scripts: dict[str, ModuleType]) -> None:
    check = scripts["codecs.targets"].MinimumSpeed("decode", 2.1)
    assert check.compare(_row("packhorse", 1.0, 2.1), []) == (2.1, 2.1, "2.10 GB/s")


@pytest.fixture(scope="module")
def run(
    scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Run the command in this process: what it prints, and the figures that it keeps."""

    def call(*options: str) -> tuple[str, dict[str, Any]]:
        kept, printed = tmp_path_factory.mktemp("run") / "kept.json", io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            # With these of malloc it need not start itself again; those of `test_run.py` do.
            for name, value in RECYCLING_MALLOC.items():
                patch.setenv(name, value)
            assert scripts["run"].main(["snapshots", *options, "--json", str(kept)]) == 0
        return printed.getvalue(), json.loads(kept.read_text())

    return call


@pytest.fixture(scope="module")
def small_run(run: Callable[..., tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    codecs = ["np.copyto", "packhorse", "packhorse-full", "xor+zstandard-3", "bitx-like"]
    printed, result = run("--rounds", "1", "--codec", *codecs)
    assert "### state_128 (0.1 MB" in printed
    return result


def test_document_has_every_pair_codec_target_and_loss(
    scripts: dict[str, ModuleType], small_run: dict[str, Any]
) -> None:
    result = deepcopy(small_run)
    rival = next(row for row in result["rows"] if row["codec"] == "bitx-like")
    rival["ratio"] = 99.0
    document = scripts["snapshots.report"].document(result)
    for name in PAIRS:
        assert f"### {name} (" in document
        assert f"| {name} | " in document
    for name in result["codecs"]:
        assert f"- `{name}`: " in document
    assert "| bf16_1 | 1 | bitx-like | ratio | 99.0000 |" in document
    assert "whole state, 128 steps apart" in document
    assert "| packhorse | " in document.partition("## What each part")[2]
    assert result["machine"]["cpu"] in document


def test_without_a_training_run_it_says_how_to_make_one(
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    environment = {**RECYCLING_MALLOC, "PACKHORSE_BENCH_DATA": str(tmp_path)}
    for name, value in environment.items():  # those of malloc do nothing here, but are asked for
        monkeypatch.setenv(name, value)
    assert scripts["run"].main(["snapshots", "--rounds", "1"]) == 1
    assert "make training" in capsys.readouterr().err


def test_figures_are_kept_of_a_whole_run_only(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scripts["run"].main(["snapshots", "--write", "--rounds", "1"])
    assert "needs a whole run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_history(run: Callable[..., tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    printed, result = run("--part", "history")
    assert "12 checkpoints, 8 steps apart" in printed
    return result


def test_every_store_takes_and_restores_a_history(small_history: dict[str, Any]) -> None:
    result, history = small_history, small_history["history"]
    assert result["rows"] == []
    assert history["steps"] == [*HISTORY]
    assert tuple(row["store"] for row in history["rows"]) == STORES
    for row in history["rows"]:
        assert row["sizes"] == sorted(row["sizes"])
        assert len(row["sizes"]) == len(row["take"]) == len(HISTORY)
        assert {what: len(times) for what, times in row["restore"].items()} == {
            "newest": 3, "oldest": 3, "long chain": 3,
        }  # fmt: skip
    sizes = {row["store"]: row["sizes"] for row in history["rows"]}
    raw = history["nbytes"]
    assert sizes["safetensors"][-1] >= 12 * raw
    for name in ("zipnn-delta", "bitx-like", "packhorse", "packhorse-cache", "packhorse-dcp"):
        grown = np.diff([0, *sizes[name]])
        assert grown[0] < raw
        # A full checkpoint, and another after eight differences; see the notes of the table.
        second = 8 if name == "packhorse-dcp" else 9
        assert {0, second} == set(np.argsort(grown)[-2:].tolist())
    assert sizes["packhorse"][-1] < sizes["zipnn-delta"][-1]
    assert list(history["ratios"]) == ["w32", "w16", "m32", "v32"]
    assert min(history["ratios"].values()) > 1


def test_document_and_picture_have_the_history(
    scripts: dict[str, ModuleType], small_run: dict[str, Any], small_history: dict[str, Any]
) -> None:
    result = deepcopy(small_run)
    assert "Not in this run." in scripts["snapshots.report"].document(result)
    result["history"] = deepcopy(small_history["history"])
    result["history"]["absent"] = {"other": "No module named 'other'"}
    document = scripts["snapshots.report"].document(result)
    for name in STORES:
        assert f"- `{name}`: " in document
        assert document.count(f"| **{name}** |" if name[:9] == "packhorse" else f"| {name} |") > 0
    assert "- `other` was not measured: No module named 'other'." in document
    assert "ends with the 8th checkpoint" in " ".join(document.split())
    picture = ElementTree.fromstring(scripts["snapshots.history_report"].picture(result))
    texts = [element.text or "" for element in picture.iter() if element.tag.endswith("}text")]
    for label in scripts["snapshots.history_report"].LABELS.values():
        assert [text for text in texts if text.startswith(f"{label}, ")]


def test_labels_are_a_line_apart_and_near_their_ends(scripts: dict[str, ModuleType]) -> None:
    report = scripts["snapshots.history_report"]
    ends = [442.0, 441.0, 100.0, 101.0, 300.0]
    places = report.label_places(ends, report.BOTTOM, report.LINE_HEIGHT)
    assert np.diff(sorted(places)).min() >= report.LINE_HEIGHT
    assert max(places) <= report.BOTTOM
    assert np.argsort(places).tolist() == np.argsort(ends).tolist()
    assert places[4] == 300.0


@pytest.mark.parametrize("way", ["take", "restore"])
def test_store_that_changes_a_bit_is_found_out(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    stores = scripts["snapshots.stores"]

    class Vandal(stores.SafetensorsStore):  # type: ignore[misc]
        def __init__(self, folder: Path, live: Any) -> None:
            super().__init__(folder, live)
            self._victim = live.parts[2].array.view(np.uint8)

        def take(self, i: int) -> None:
            super().take(i)
            self._victim[-1] ^= way == "take" and i == 5

        def restore(self, i: int) -> None:
            super().restore(i)
            self._victim[-1] ^= way == "restore"

    entries = {"vandal": stores.Entry(Vandal, "")}
    monkeypatch.setattr(scripts["snapshots.history"], "STORES", entries)
    who = "vandal" if way == "restore" else "a store has changed the state"
    with pytest.raises(RuntimeError, match=rf"{who}: the tensors m32 are not as they were"):
        scripts["snapshots.history"].measure_history()


def test_difference_that_does_not_pay_is_not_packed(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    stores = scripts["snapshots.stores"]
    live = stores.Live(LAST)
    store = stores.STORES["zipnn-delta"].make(tmp_path, live)
    store.look()  # at the same values as before: nothing is shorter than no difference
    assert [kind.links(5) for kind in store._kinds] == [range(6)] * 4
    for part in live.parts:
        noise = np.random.default_rng(1).integers(0, 256, part.array.nbytes, np.uint8)
        part.array.view(np.uint8)[:] = noise
    store.look()
    assert store._kinds[0].links(5) == range(5, 6)


def test_without_a_history_it_says_how_to_make_one(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACKHORSE_BENCH_DATA", str(tmp_path))
    (tmp_path / "training").mkdir()
    for text in (None, '{"recipe": {}, "files": {}}'):
        if text:
            (tmp_path / "training" / "manifest.json").write_text(text)
        with pytest.raises(FileNotFoundError, match="make training ARGS=--resume"):
            scripts["snapshots.history"].measure_history()


@pytest.mark.parametrize(
    "options", [("--write", "--part", "history"), ("--part", "history", "--pair", "bf16_1")]
)
def test_parts_that_do_not_go_together_are_refused(
    scripts: dict[str, ModuleType], options: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        scripts["run"].main(["snapshots", *options])


@pytest.mark.slow
def test_the_growth_of_a_store_is_measured(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a tiny store, so times mean nothing."""
    growth = import_module("benchmarks.growth")
    url = str(tmp_path / "store")
    options = ["--snapshots", "4", "--tensors", "6", "--rounds", "1", "--store", url]
    assert growth.main(options) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    told = [line.partition(":")[0] for line in lines if " of the processor, " in line]
    last = ["prune to three", "list without a catalogue", "take from all"]
    assert told == [*growth.VERBS, *last]
    assert len(list((tmp_path / "store" / "snapshots").iterdir())) == 4  # as it was made
