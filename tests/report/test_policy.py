"""The policy of snapshots: predicted bytes against real stores, its rule, and what is not known."""

import tempfile
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from fine_tunes import FineTune
from safetensors.numpy import save_file

from packhorse.disk import SnapshotStore
from packhorse.reports.policy import CHAINS, Model, recommend, seconds_per_step
from packhorse.reports.rates import DiskRate, Rates, measure_disk, measure_rates
from packhorse.reports.results import Estimate, Policy, Series
from packhorse.reports.series import describe_series
from packhorse.reports.sources import Source, find_sources

STEPS = tuple(range(4, 36, 4))
DISK = DiskRate(1e9, 2e9, "")


@pytest.fixture(scope="module")
def states() -> dict[int, dict[str, np.ndarray]]:
    run = FineTune(rate=2e-5)
    return {step: run.train(step).state() for step in STEPS}


@pytest.fixture(scope="module")
def found(states: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Series, list[Source]]:
    """The series of the states' files, and the files."""
    folder = tmp_path_factory.mktemp("run")
    for step, state in states.items():
        save_file(state, folder / f"step-{step}.safetensors")
    sources = find_sources([str(folder / "step-*")])
    return describe_series(sources, sample_nbytes=1 << 23, full=False, threads=2)[0], sources


def policy(found: tuple[Series, list[Source]], **options: Any) -> Policy:
    made = recommend(*found, threads=2, disk=DISK, **options)
    assert made is not None
    return made


@each("every, chain", [(4, 0), (4, 1), (4, 2), (8, 1)])
def test_bytes_are_those_of_a_real_store(
    found: Any, states: Any, tmp_path: Path, every: int, chain: int
) -> None:
    """The first snapshot has what never changes, too; the cycle after the first counts."""
    row = next(r for r in policy(found).rows if (r.every, r.chain) == (every, chain))
    with SnapshotStore(tmp_path / f"{every}-{chain}", max_chain=chain) as store:
        for step in STEPS[-1 :: -every // 4][::-1][-2 * (chain + 1) :]:
            store.take(f"step-{step}", states[step])
        added = [each.new_nbytes for each in store.overview().snapshots][-(chain + 1) :]
    assert row.nbytes == pytest.approx(sum(added) / ((chain + 1) * every) * 1000, rel=0.05)


def test_rows_hold_together(found: Any) -> None:
    made = policy(found, step_seconds=1.0)
    rows = {(row.every, row.chain): row for row in made.rows}
    intervals = sorted({every for every, _ in rows})
    assert intervals == [4 << i for i in range(len(intervals))]
    assert {chain for _, chain in rows} == set(CHAINS)
    assert intervals[-1] <= 3600
    for (every, chain), row in rows.items():
        assert row.nbytes > 0
        assert row.lost_steps > every / 2
        assert row.stall_seconds > 0
        if chain:
            assert row.nbytes <= rows[every, 0].nbytes
            assert row.restore_seconds > rows[every, 0].restore_seconds
        if every > 4:
            assert row.nbytes < rows[every // 2, chain].nbytes
            assert row.write_seconds < rows[every // 2, chain].write_seconds


def test_the_rule(found: Any) -> None:
    made = policy(found, step_seconds=2.0, hours_between_failures=12)
    rows, best = made.rows, made.rows[made.recommended]

    def waste(row: Any) -> float:
        return row.stall_seconds / 2000 + (row.lost_steps * 2 + row.restore_seconds) / 43200

    plain = {row.every: row.restore_seconds for row in rows if row.chain == 0}
    least = min(map(waste, rows))
    allowed = [
        row
        for row in rows
        if waste(row) <= least + 0.005 and row.restore_seconds <= 2 * plain[row.every]
    ]
    assert best.nbytes == min(row.nbytes for row in allowed)
    assert f"A snapshot every {best.every} steps with chains of {best.chain} makes" in made.reason
    assert "0.5 % more of the job's time" in made.reason
    assert "one failure in 12 hours" in made.reason
    assert any("A step takes 2 s, as given" in words for words in made.assumptions)
    assert any("Young (1974) and Daly (2006)" in words for words in made.assumptions)
    assert any("gaps above 28 steps are extrapolated" in words for words in made.assumptions)


def test_more_failures_mean_more_snapshots(found: Any) -> None:
    made = [policy(found, step_seconds=1.0, hours_between_failures=h) for h in (0.5, 24)]
    few, many = (each.rows[each.recommended].every for each in made)
    assert few < many


def test_without_the_time_of_a_step_the_interval_stays(found: Any) -> None:
    made = policy(found)
    assert made.rows[made.recommended].every == 4
    assert made.reason.startswith(
        "How long a step takes is not known, so the interval stays near that of the newest"
    )
    assert "each stalls the job for" in made.reason
    assert any("How long a step takes is not known" in words for words in made.assumptions)
    assert all(row.lost_steps == row.every / 2 for row in made.rows)


def test_the_time_of_a_step_is_in_a_store(states: Any, tmp_path: Path) -> None:
    """The times are in the manifests; a step is the median, per step."""
    with SnapshotStore(tmp_path / "store") as store:
        for step in STEPS[:3]:
            store.take(f"step-{step}", states[step])
        times = [each.time for each in store.overview().snapshots]
    sources = find_sources([tmp_path / "store"])
    series = describe_series(sources, sample_nbytes=1 << 22, full=False, threads=2)[0]
    seconds = seconds_per_step(series, sources)
    gaps = [(b - a) / timedelta(seconds=4) for a, b in pairwise(times)]
    assert seconds == pytest.approx(np.median(gaps))
    made = policy((series, sources))
    assert any("by the times of the snapshots" in words for words in made.assumptions)
    assert seconds_per_step(series, [replace(each, snapshot=None) for each in sources]) is None


def test_snapshots_without_numbers(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path / "store") as store:
        for i, name in enumerate(("first", "second", "third")):
            store.take(name, {"w": np.full(4096, 1 + i / 1000, np.float32)})
    sources = find_sources([tmp_path / "store"])
    series = describe_series(sources, sample_nbytes=1 << 20, full=False, threads=1)[0]
    made = policy((series, sources), step_seconds=60.0)
    assert any("a step is one snapshot here" in words for words in made.assumptions)


def test_gaps_that_only_the_beginning_has(tmp_path: Path) -> None:
    """Of steps a factor of two apart, the shortest gaps are at the beginning."""
    rng = np.random.default_rng(0)
    weight, step = (rng.standard_normal(1 << 15).astype(np.float32) for _ in range(2))
    for n in (1, 2, 4, 8):
        save_file({"w": weight + np.float32(n * 1e-4) * step}, tmp_path / f"step-{n}.safetensors")
    sources = find_sources([str(tmp_path / "step-*")])
    series = describe_series(sources, sample_nbytes=1 << 20, full=True, threads=1)[0]
    assert [gap for gap, _ in series.gaps] == [4, 6, 7]
    made = policy((series, sources))
    assert any("gaps below 4 steps occur only earlier" in words for words in made.assumptions)
    row = next(row for row in made.rows if (row.every, row.chain) == (1, 1))
    second = series.steps[1]
    assert second.delta is not None
    delta = second.delta.nbytes / second.full.nbytes * series.steps[-1].full.nbytes
    expected = 1000 * (series.steps[-1].full.nbytes + delta) / 2
    assert row.nbytes == pytest.approx(expected, rel=1e-3)


RATES = Rates(1 << 20, 2, 2e-9, 3e-9, 1e-9, 5e-10, 5e-10, 1e-10, 0.9, 0.5)


def test_figures_of_a_model_by_hand() -> None:
    model = Model(10**9, 7 * 10**8, ((10, 10**8), (100, 4 * 10**8)), RATES, DISK, 0.1)
    assert model.delta(10) == pytest.approx(1e8)
    assert model.delta(32) == pytest.approx(2e8, rel=0.02)  # half way, in logarithms
    assert model.delta(1000) == pytest.approx(0.9 * 7e8)  # no longer than in full
    row = model.row(10, 3)
    assert row.nbytes == pytest.approx(100 * (0.9 * 7e8 + 3e8) / 4)
    packed = (2 + 3 * (3 + 0.5) + 3 * 0.5) / 4
    written = row.nbytes / 100 / 1e9
    assert row.write_seconds == pytest.approx(100 * (packed + written))
    late = packed + written - 10 * 0.1
    assert row.stall_seconds == pytest.approx(100 * (0.1 + late))
    assert row.restore_seconds == pytest.approx((7e8 + 1.5 * 0.5e8) / 2e9 + 1 + 1.5 * 0.5)
    assert row.lost_steps == pytest.approx(5 + (packed + written) / 0.1)
    assert Model(10**9, 7, ((10, 5),), RATES, DISK, None).delta(40) == 5


def test_rates_of_a_sample(found: Any, states: Any, tmp_path: Path) -> None:
    """Their shares are those of a real store."""
    series, sources = found
    rates = measure_rates(sources[-2], sources[-1], sample_nbytes=1 << 23, threads=2)
    assert 5 << 20 < rates.sampled_nbytes < 12 << 20
    with SnapshotStore(tmp_path) as store:
        for step in STEPS[-2:]:
            store.take(str(step), states[step])
        last = store.lineage(str(STEPS[-1]))
    new = [each for each in last.info.tensors if each.content_hash not in last.inherited]
    differing = [each.packed_nbytes for each in new if each.base_hash and each.dtype == "F32"]
    assert rates.differences == pytest.approx(sum(differing) / last.new_nbytes, abs=0.02)
    frozen = next(row for row in series.steps[-1].kinds if row.kind == "embedding")
    share = 1 - frozen.full.nbytes / series.steps[-1].full.nbytes
    assert rates.changed == pytest.approx(share, abs=0.01)
    for seconds in (rates.pack_full, rates.pack_delta, rates.unpack_full, rates.unpack_delta):
        assert rates.copy < seconds < 1e-6


def test_the_disk_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    for path, place in (
        (str(file), str(tmp_path)), (str(tmp_path), str(tmp_path)),
        ("s3://bucket/run", f"{tempfile.gettempdir()}, not where the checkpoints are"),
        (str(tmp_path / "no" / "such"), f"{tempfile.gettempdir()}, not where the checkpoints are"),
    ):  # fmt: skip
        rate = measure_disk(path, 1 << 20)
        assert rate.write > 0
        assert rate.read > 0
        assert rate.place == place
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_nothing_to_recommend(found: Any) -> None:
    series, sources = found
    assert recommend(Series((), (), ()), [], threads=1) is None
    assert recommend(Series(series.steps[:1], (), ()), sources, threads=1) is None
    same = Series(series.steps, tuple((gap, Estimate(0)) for gap, _ in series.gaps), ())
    assert recommend(same, sources, threads=1) is None


@each("options, words", [
    ({"step_seconds": 0.0}, "step_seconds is 0.0; it must be above 0"),
    ({"step_seconds": float("nan")}, "step_seconds is nan; it must be above 0"),
    ({"hours_between_failures": -1.0}, "hours_between_failures is -1.0; it must be above 0"),
])  # fmt: skip
def test_numbers_that_make_no_sense(found: Any, options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recommend(*found, threads=1, **options)


def test_a_checkpoint_that_is_gone_by_then(found: Any) -> None:
    series, sources = found
    gone = [replace(each, path=each.path + ".gone") for each in sources]
    with pytest.raises(FileNotFoundError, match="gone: no such file"):
        recommend(series, gone, threads=1)
