"""Samples of tensors: where they lie, and how near they come to the whole tensor."""

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from cases import each
from real_model import model_path, real_tensors
from safetensors.numpy import save_file

from packhorse.layout import CHUNK_NBYTES, DTYPE_BY_NAME
from packhorse.reports.bits import packed_estimate
from packhorse.reports.results import Estimate, total
from packhorse.reports.sampling import (
    RUN_NBYTES,
    Places,
    Sample,
    budget,
    choose_places,
    estimate,
    take_sample,
    whole_places,
)
from packhorse.reports.sources import Entry, Opened, Source, opened


def entry_of(dtype: str, *shape: int, name: str = "a.weight") -> Entry:
    nbytes = math.prod(shape) * DTYPE_BY_NAME[dtype].bits // 8
    return Entry(name, dtype, shape, nbytes, None)


@each("dtype", [*DTYPE_BY_NAME])
def test_runs_are_whole_elements_in_order_and_of_one_length(dtype: str) -> None:
    shapes = [(3_000_001 * 8,), (40_000, 512), (40_000, 5, 24), (2, 16_000_000), (9, 7, 800_000)]
    for shape in [*shapes, (24_000_000 // 5, 5), (1, 1 << 24), (5, 1 << 20, 8)]:
        entry = entry_of(dtype, *shape)
        bits = DTYPE_BY_NAME[dtype].bits
        places = choose_places(entry, 0.1)
        assert not places.is_whole
        most = max(0.15 * entry.nbytes, 8 * RUN_NBYTES)
        assert 0.05 * entry.nbytes < places.sampled_nbytes <= most
        end = 0
        for (start, stop), part in zip(places.runs, places.shapes, strict=True):
            assert end <= start < stop <= entry.nbytes
            assert start * 8 % bits == 0
            assert 8 * (stop - start) == math.prod(part) * bits
            assert RUN_NBYTES / 2 < stop - start <= RUN_NBYTES
            assert len(part) == 1 or part[1:] == entry.shape[1:]
            end = stop


@each("dtype, shape", [
    ("F32", ()), ("BF16", (0, 5)), ("F4", (2,)), ("BOOL", (300_000,)), ("F64", (1, 90_000)),
])  # fmt: skip
def test_small_tensors_are_taken_whole(dtype: str, shape: tuple[int, ...]) -> None:
    entry = entry_of(dtype, *shape)
    assert choose_places(entry, 0.0) == whole_places(entry) == choose_places(entry, 1.0)


def test_long_rows_make_long_runs_and_those_of_more_than_a_chunk_are_cut() -> None:
    row = CHUNK_NBYTES // 4
    places = choose_places(entry_of("F32", 40, row - 64), 0.0)
    assert set(places.shapes) == {(1, row - 64)}
    assert len(places.runs) == 2
    assert choose_places(entry_of("F32", 3, row), 1.0).is_whole
    assert choose_places(entry_of("F32", 2, row), 0.0).is_whole
    places = choose_places(entry_of("F32", 40, row + 1), 0.0)
    assert places.shapes[0] == ((places.runs[0][1] - places.runs[0][0]) // 4,)


def test_places_follow_from_name_and_size() -> None:
    places = [choose_places(entry_of("F32", 9000, 999, name=name), 0.1) for name in "aab"]
    assert places[0] == places[1] != places[2]


def test_the_budget_goes_to_large_tensors_in_proportion() -> None:
    entries = [entry_of("F32", 100) for _ in range(50)]
    entries += [entry_of("F32", n << 20) for n in (1, 2, 40)]
    share = budget(entries, 20 << 20)
    sizes = [choose_places(entry, share).sampled_nbytes for entry in entries]
    assert sum(sizes) == pytest.approx(20 << 20, rel=0.05)
    assert sizes[:50] == [400] * 50
    assert budget(entries, 1 << 40) >= 1
    assert budget([], 1 << 20) == budget(entries[:50], 1) == 1
    assert budget(entries, 1) == 0
    assert all(choose_places(entry, 0.0).sampled_nbytes for entry in entries)


def test_the_error_is_that_of_random_parts() -> None:
    """Numbers of Cochran's simple case: two standard errors, less what was sampled."""
    places = Places(((0, 10), (50, 60), (80, 90)), ((10,),) * 3, 100)
    found = estimate(places, [4, 5, 6], 7)
    assert found == Estimate(57, round(2 * 0.1 / math.sqrt(3) * math.sqrt(0.7) * 100))
    assert estimate(Places(((0, 10),), ((10,),), 10), [4], 3) == Estimate(7)
    assert total([Estimate(1, 3), Estimate(2, 4)]) == Estimate(3, 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Opened]]:
    """The real model in F32; its last layer and embeddings as BF16, and the same after a step of
    about one length for all values, as a step of Adam is."""
    folder = tmp_path_factory.mktemp("models")
    base = {n: t for n, t in real_tensors(6).items() if "layer" not in n or "r.5" in n}
    rng = np.random.default_rng(0)
    tuned = {
        name: (t.astype(np.float32) + rng.normal(0, 1e-4, t.shape)).astype(ml_dtypes.bfloat16)
        for name, t in base.items()
    }
    save_file(base, folder / "base")
    save_file(tuned, folder / "tuned")
    paths = {"plain": model_path(), "base": folder / "base", "tuned": folder / "tuned"}
    with (
        opened(Source("plain", str(paths["plain"]))) as plain,
        opened(Source("base", str(paths["base"]))) as old,
        opened(Source("tuned", str(paths["tuned"]))) as new,
    ):
        yield {"plain": plain, "base": old, "tuned": new}


def sampled(file: Opened, name: str, places: Places) -> Sample:
    entry = file.entry(name)
    assert entry is not None
    return take_sample(file, entry, places)


@each("source, base, level, allowed", [
    ("plain", None, "fast", 0.0005), ("plain", None, "default", 0.0005),
    ("plain", None, "max", 0.001), ("tuned", None, "default", 0.002),
    ("tuned", "base", "default", 0.03),
])  # fmt: skip
def test_a_sample_tells_the_size_of_all_large_tensors(
    files: dict[str, Opened], source: str, base: str | None, level: str, allowed: float
) -> None:
    """Within the error and a small bias: tables are for the sample, not for the tensor."""
    new, old = files[source], files[base] if base else None
    whole, guess, n_near = [], [], 0
    step = 4 if source == "plain" else 1
    for entry in [entry for entry in new.entries if entry.nbytes > 3 * CHUNK_NBYTES][::step]:
        for places, found in ((whole_places(entry), whole), (choose_places(entry, 0.2), guess)):
            before = sampled(old, entry.name, places) if old else None
            found.append(packed_estimate(sampled(new, entry.name, places), level, before)[0])
        assert whole[-1].error == 0
        distance = abs(whole[-1].nbytes - guess[-1].nbytes)
        n_near += distance <= guess[-1].error + allowed * whole[-1].nbytes
    assert len(whole) >= 2
    assert n_near >= 0.8 * len(whole), (whole, guess)
    sums = total(whole), total(guess)
    assert abs(sums[0].nbytes - sums[1].nbytes) <= sums[1].error + allowed * sums[0].nbytes
