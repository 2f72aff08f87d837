"""Series of checkpoints: against a real store of the same states, and all that can be wrong."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import each
from cli_samples import flip_bytes, result
from fine_tunes import FineTune
from safetensors.numpy import save_file

import packhorse
from packhorse.disk import SnapshotStore, pack_file
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reference.delta import order
from packhorse.reports.movement import step_sizes, unchanged_share
from packhorse.reports.results import Problem, Series
from packhorse.reports.sampling import whole_sample
from packhorse.reports.series import describe_series
from packhorse.reports.sources import Source, find_sources

STEPS = (8, 16, 24, 32)


@pytest.fixture(scope="module")
def states() -> dict[int, dict[str, np.ndarray]]:
    run = FineTune()
    return {step: run.train(step).state() for step in STEPS}


@pytest.fixture(scope="module")
def folder(states: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and plain files of the same states."""
    folder = tmp_path_factory.mktemp("run")
    with SnapshotStore(folder / "store", max_chain=2) as store:
        for step, state in states.items():
            store.take(f"step-{step}", state)
            save_file(state, folder / f"step-{step}.safetensors")
    return folder


def described(
    source: Path | list[Source], *, nbytes: int = 1 << 30, full: bool = False, **options: Any
) -> tuple[Series, list[Problem]]:
    sources = source if isinstance(source, list) else find_sources([source])
    return describe_series(sources, sample_nbytes=nbytes, full=full, threads=2, **options)


def small(step: int, **others: np.ndarray) -> dict[str, np.ndarray]:
    """A little checkpoint."""
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    return {"a.weight": weight * np.float32(1 + step * 1e-5), "b.bias": weight[0] + step, **others}


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Four little checkpoints, packed."""
    for step in (100, 200, 300, 400):
        save_file(small(step), tmp_path / "plain.safetensors")
        pack_file(tmp_path / "plain.safetensors", tmp_path / f"step-{step}.ph.safetensors")
    (tmp_path / "plain.safetensors").unlink()
    return tmp_path


def found_in(folder: Path) -> list[Source]:
    return find_sources([str(folder / "step-*")])


@each("full", [False, True])
def test_bytes_are_those_of_a_real_store(folder: Path, full: bool) -> None:
    """The store of a chain of two has every delta but the third, which it keeps in full, except for
    tensors that it kept in full before because their differences were as long."""
    stored, _ = described(folder / "store", full=full)
    files, problems = described(found_in(folder), full=full)
    assert not problems
    with SnapshotStore(folder / "store") as store:
        added = [each.new_nbytes for each in store.overview().snapshots]
    assert [row.stored_nbytes for row in stored.steps] == added
    assert stored.steps[0].full.nbytes == added[0]
    assert [row.delta.nbytes for row in stored.steps[1:3]] == added[1:3]  # type: ignore[union-attr]
    frozen = stored.steps[0].full.nbytes - sum(
        row.full.nbytes for row in stored.steps[0].kinds if row.kind != "embedding"
    )
    in_full = stored.steps[3].full.nbytes - frozen
    assert 0.9 * in_full < added[3] <= in_full
    for a, b in zip(stored.steps, files.steps, strict=True):
        assert (a.full, a.delta, a.unchanged) == (b.full, b.delta, pytest.approx(b.unchanged))
        assert set(a.kinds) == set(b.kinds)
        assert b.stored_nbytes is b.max_deltas is b.needed_nbytes is None
    assert stored.gaps == files.gaps
    assert set(stored.step_sizes) == set(files.step_sizes)


def test_figures_of_a_store_are_those_of_the_command(folder: Path, run: Any) -> None:
    rows = described(folder / "store", nbytes=1 << 20)[0].steps
    for row in rows:
        shown = result(run("snapshot", "show", folder / "store", row.name, "--json"))
        assert row.stored_nbytes == shown["snapshot"]["stored_nbytes"]
        assert row.max_deltas == shown["snapshot"]["max_deltas"]
        assert row.needed_nbytes == shown["needed_nbytes"]
        assert row.nbytes == shown["snapshot"]["nbytes"]
    # A rounded copy counts as one. The last is in full, but for tensors that were in full before.
    assert [row.max_deltas for row in rows][:3] == [1, 2, 3]
    assert rows[3].max_deltas <= 2


def test_gaps_are_the_bytes_of_a_store_with_that_base(
    folder: Path, states: Any, tmp_path: Path
) -> None:
    """A store that has only the base and the newest."""
    gaps = described(found_in(folder))[0].gaps
    assert [gap for gap, _ in gaps] == [8, 16, 24]
    for gap, nbytes in gaps:
        with SnapshotStore(tmp_path / str(gap)) as store:
            store.take("old", states[32 - gap])
            store.take("new", states[32])
            assert nbytes.nbytes == store.overview().snapshots[-1].new_nbytes


def test_rounded_copies_frozen_and_tied_tensors(folder: Path, states: Any) -> None:
    kinds = {
        (row.role, row.kind, row.dtype): row
        for row in described(found_in(folder))[0].steps[-1].kinds
    }
    copies = kinds["weights", "attention", "BF16"]
    assert copies.full == copies.delta
    assert copies.full.nbytes < 0.01 * copies.nbytes
    embedding, tied = kinds["weights", "embedding", "BF16"], kinds["weights", "output", "BF16"]
    assert (embedding.delta.nbytes, embedding.unchanged) == (0, 1.0)  # type: ignore[union-attr]
    assert 0.6 < embedding.full.nbytes / embedding.nbytes < 0.7
    assert tied.full.nbytes == 0
    name = "layers.0.attention.q_proj.weight"
    same = np.mean(states[24][name].view(np.uint16) == states[32][name].view(np.uint16))
    assert copies.unchanged == pytest.approx(float(same))


@each("nbytes, bias", [(1 << 20, 0.01), (1 << 22, 0.005)])
def test_samples_tell_sizes_within_their_error(folder: Path, nbytes: int, bias: float) -> None:
    """What little is left of the cost of short runs is allowed for."""
    whole, sampled = described(found_in(folder))[0], described(found_in(folder), nbytes=nbytes)[0]
    for a, b in zip(whole.steps, sampled.steps, strict=True):
        for exact, guess in ((a.full, b.full), (a.delta, b.delta)):
            if exact is not None and guess is not None:
                assert 0 < guess.error < 0.02 * guess.nbytes
                assert abs(exact.nbytes - guess.nbytes) < guess.error + bias * exact.nbytes
        assert b.unchanged == (a.unchanged and pytest.approx(a.unchanged, abs=0.01))
    copies = [
        row for row in sampled.steps[-1].kinds if row.kind == "attention" and row.dtype == "BF16"
    ]
    assert copies[0].full.nbytes < 0.02 * copies[0].nbytes


def test_a_step_crosses_half_as_many_values_with_each_exponent(folder: Path, states: Any) -> None:
    name = "master.layers.0.mlp.up_proj.weight"
    samples = [
        whole_sample(name, "F32", state.shape, state)
        for state in (states[24][name], states[32][name])
    ]
    medians = [row.median for row in step_sizes(*samples) if row.share > 0.02]
    assert len(medians) >= 5
    assert medians == sorted(medians, reverse=True)
    ratio = (medians[0] / medians[-1]) ** (1 / (len(medians) - 1))
    assert 1.5 < ratio < 2.2  # Adam's steps are not quite alike
    found = described(found_in(folder))[0].step_sizes
    assert {row.role for row in found} == {"weights", "masters", "first moments", "second moments"}
    shares = [row.share for row in found if row.role == "masters"]
    assert sum(shares) == pytest.approx(1, abs=0.01)


@each("dtype, kind", [
    ("F16", np.float16), ("BF16", ml_dtypes.bfloat16), ("F32", np.float32), ("F64", np.float64),
    ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2), ("C64", np.complex64),
])  # fmt: skip
def test_distances_are_those_of_the_format(dtype: str, kind: Any) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(4000)
    old, new = (v.astype(kind) for v in (values, values * 1.01 + rng.standard_normal(4000) * 1e-3))
    row = DTYPE_BY_NAME[dtype]
    a, b = (v.view(f"u{row.unit_nbytes}").tolist() for v in (old, new))
    moved = [abs(order(x, row) - order(y, row)) for x, y in zip(a, b, strict=True)]
    parts = old.view(np.float32) if dtype == "C64" else old.astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(np.abs(parts.astype(np.float64))))
    samples = [whole_sample("w", dtype, (4000,), each.view(np.uint8)) for each in (old, new)]
    found = {each.exponent: each for each in step_sizes(*samples)}
    assert {-2, -1, 0} <= found.keys()
    for exponent in (-2, -1, 0):
        own = np.sort(np.array(moved, np.float64)[exponents == exponent])
        for share, value in ((0.5, found[exponent].median), (0.9, found[exponent].high)):
            expected = own[int(np.ceil(share * own.size)) - 1]
            assert value == pytest.approx(expected, rel=0.03)
        assert found[exponent].share == pytest.approx(own.size / len(moved))
    assert unchanged_share(*samples) == pytest.approx(np.mean(old == new))


def test_samples_of_different_places_are_refused() -> None:
    old, new = (whole_sample("w", "F32", (n,), np.zeros(n, np.float32)) for n in (4, 5))
    with pytest.raises(ValueError, match="different places"):
        unchanged_share(old, new)


@each("full", [False, True])
def test_progress_adds_up_to_the_checkpoints(series: Path, full: bool) -> None:
    done: list[int] = []
    found, _ = described(found_in(series), full=full, progress=done.append)
    assert sum(done) == sum(row.nbytes for row in found.steps)


def test_one_checkpoint_and_none(series: Path) -> None:
    found, problems = described(found_in(series)[:1])
    assert (len(found.steps), found.gaps, found.step_sizes, problems) == (1, (), (), [])
    assert found.steps[0].delta is found.steps[0].unchanged is None
    assert described([]) == (Series((), (), ()), [])


def test_long_series_have_some_gaps(tmp_path: Path) -> None:
    for step in range(40):
        save_file({"a": np.full(4, step, np.float32)}, tmp_path / f"step-{step}.safetensors")
    gaps = [gap for gap, _ in described(found_in(tmp_path))[0].gaps]
    assert gaps[:5] == [1, 2, 3, 4, 5]
    assert 12 < len(gaps) < 20
    assert gaps == sorted(gaps)


# What can be wrong: one problem each, and the series goes on.


def the_problem(found: tuple[Series, list[Problem]], *words: str) -> tuple[Problem, list[int]]:
    series, problems = found
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0].message
    return problems[0], [row.step for row in series.steps]


@each("full", [False, True])
@each("at", [100, 300, 400])
def test_a_checkpoint_that_is_gone(tmp_path: Path, at: int, full: bool) -> None:
    folder = tmp_path / f"{at}-{full}"
    folder.mkdir()
    for step in (100, 200, 300, 400):
        save_file(small(step), folder / f"step-{step}.safetensors")
    sources = found_in(folder)
    (folder / f"step-{at}.safetensors").unlink()
    found = described(sources, full=full)
    problem, steps = the_problem(found, f"step-{at}.safetensors: no such file", "goes on without")
    assert problem.source == f"step-{at}.safetensors"
    assert steps == [step for step in (100, 200, 300, 400) if step != at]
    assert found[0].steps[0].delta is None
    assert None not in [row.delta for row in found[0].steps[1:]]
    assert len(found[0].gaps) == 2


@each("full", [False, True])
def test_a_checkpoint_that_changes_meanwhile(tmp_path: Path, full: bool) -> None:
    """The second is replaced while the third is compared with it; samples do not need it then."""
    folder = tmp_path / str(full)
    folder.mkdir()
    for step in (100, 200, 300, 400):
        save_file(small(step), folder / f"step-{step}.safetensors")
    sizes = sum(tensor.nbytes for tensor in small(1).values())
    done = [0]

    def progress(n: int) -> None:
        done[0] += n
        if done[0] == 3 * sizes:
            save_file(small(7), folder / "new")
            (folder / "new").replace(folder / "step-200.safetensors")

    found = described(found_in(folder), full=full, progress=progress)
    if full:
        _, steps = the_problem(found, "step-200.safetensors", "goes on without")
        assert steps == [100, 300, 400]
        assert [gap for gap, _ in found[0].gaps] == [100, 300]
    else:
        assert not found[1]


def test_unreadable_checkpoints(series: Path) -> None:
    whole = (series / "step-200.ph.safetensors").read_bytes()
    for content, words in ((whole[:400], "step-200"), (b"", "step-200"), (b"x" * 64, "step-200")):
        (series / "step-200.ph.safetensors").write_bytes(content)
        problem, steps = the_problem(described(found_in(series)), words, "goes on without")
        assert steps == [100, 300, 400]
        assert problem.tensor is None
    (series / "step-200.ph.safetensors").unlink()
    (series / "step-200.ph.safetensors").mkdir()
    _, steps = the_problem(described(found_in(series)), "no .safetensors file in this folder")
    assert steps == [100, 300, 400]


@each("full", [False, True])
def test_damage_in_the_middle(tmp_path: Path, full: bool) -> None:
    for step in (100, 200, 300, 400):
        save_file(small(step), tmp_path / "plain.safetensors")
        path = tmp_path / f"step-{step}.ph.safetensors"
        pack_file(tmp_path / "plain.safetensors", path, force=True)
        if step == 200:
            with packhorse.open_file(path) as file:
                frame = dict(file.outlines())["a.weight"]
            flip_bytes(path, path.stat().st_size - frame.nbytes // 2)
    sources = found_in(tmp_path)
    problem, steps = the_problem(
        described(sources, full=full), "step-200", "left out of this checkpoint and of the comp"
    )
    assert steps == [100, 200, 300, 400]
    assert problem.source == "step-200.ph.safetensors"
    rows = described(sources, full=full)[0].steps
    damaged = rows[0].nbytes - rows[1].nbytes
    assert damaged == small(0)[problem.tensor or ""].nbytes
    assert rows[2].nbytes == rows[1].nbytes
    assert rows[3].nbytes == rows[0].nbytes


def test_a_foreign_checkpoint(series: Path) -> None:
    save_file({"x": np.zeros(9, np.float32)}, series / "step-400.ph.safetensors")
    problem, steps = the_problem(described(found_in(series)), "another model", "0% of its tensors")
    assert problem.source == "step-400.ph.safetensors"
    assert steps == [100, 200, 300]


def test_shapes_and_dtypes_that_changed(series: Path) -> None:
    new = small(400)
    new["b.bias"] = new["b.bias"].astype(np.float16)
    save_file(new, series / "step-400.ph.safetensors")
    found = described(found_in(series))
    problem, steps = the_problem(found, "is F16 [64], but F32 [64] in step-300", "counted in full")
    assert (problem.source, problem.tensor) == ("step-400.ph.safetensors", "b.bias")
    assert steps == [100, 200, 300, 400]
    last = {row.kind: row for row in found[0].steps[-1].kinds}
    assert last["bias"].delta == last["bias"].full
    assert last["bias"].unchanged is None


def test_moments_that_begin_later_are_no_problem(series: Path) -> None:
    state = small(400, **{"a.exp_avg": np.ones((64, 64), np.float32), "a.exp_avg_sq": np.ones(1)})
    save_file(state, series / "step-400.ph.safetensors")
    found, problems = described(found_in(series))
    assert not problems
    last = {row.role: row for row in found.steps[-1].kinds}
    assert last["first moments"].delta == last["first moments"].full


@each("steps, words", [
    ((100, 200, 400), "the others are 100 apart, but 300 is missing before step-400"),
    ((10, 20, 30, 60, 70), "but 40, 50 are missing before step-60.safetensors; its delta spans 30"),
    ((1, 2, 4, 8, 16), ""), ((100, 200, 300, 350), ""), ((5, 6, 7), ""),
])  # fmt: skip
def test_missing_numbers(tmp_path: Path, steps: tuple[int, ...], words: str) -> None:
    folder = tmp_path / "-".join(map(str, steps))
    folder.mkdir()
    for step in steps:
        save_file({"a": np.zeros(4, np.float32)}, folder / f"step-{step}.safetensors")
    problems = described(found_in(folder))[1]
    assert len(problems) == bool(words)
    assert all(words in problem.message for problem in problems)


def test_a_snapshot_whose_pack_is_lost(tmp_path: Path) -> None:
    packs = tmp_path / "store" / "packs"
    with SnapshotStore(tmp_path / "store", max_chain=0) as store:
        for step in (100, 200, 300):
            known = set(packs.iterdir()) if packs.exists() else set()
            store.take(f"step-{step}", small(step))
            if step == 200:
                lost = set(packs.iterdir()) - known
        for pack in lost:
            pack.unlink()
    for full in (False, True):
        found = described(tmp_path / "store", full=full)
        problem, steps = the_problem(found, "the pack does not exist", "goes on without this")
        assert (problem.source, problem.tensor, steps) == ("step-200", None, [100, 300])


def test_a_store_that_is_written_to(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path / "store") as store:
        for step in (100, 200, 300):
            store.take(f"step-{step}", small(step))
        sources = find_sources([tmp_path / "store"])
        store.delete("step-200")
        found = described(sources)
        _, steps = the_problem(found, "no snapshot is named 'step-200'", "goes on without")
        assert steps == [100, 300]
        assert found[0].steps[0].stored_nbytes is not None

        def progress(n: int) -> None:
            if "step-400" not in store.names():
                store.take("step-400", small(400))

        found = described(find_sources([tmp_path / "store"]), progress=progress)
        _, steps = the_problem(found, "got a snapshot while", "step-400", "make the report again")
        assert steps == [100, 300]
