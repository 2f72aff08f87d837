"""How many tokens read weights in host memory where they are: measured, kept, and read again."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packhorse.device import calibrate_offload, crossover
from packhorse.device.crossover import (
    CROSSOVER_CACHE,
    crossover_of,
    kept_crossover,
    measure_crossover,
)
from packhorse.errors import MissingBackendError
from packhorse.gpu import detect
from packhorse.gpu.figure_cache import Identity

GPU = torch.device("cuda", 0)


def test_views_are_taken_as_long_as_they_save_time() -> None:
    assert crossover_of({1: (1.0, 2.0), 8: (2.0, 2.0), 16: (3.0, 2.0), 32: (4.0, 2.0)}) == 8
    assert crossover_of({1: (3.0, 2.0), 8: (3.0, 2.0)}) == 0
    assert crossover_of({}) == 0


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_move_the_crossover(seed: int) -> None:
    """Views as fast as the ring up to 16 tokens, then slower; one time is far off."""
    choose = random.Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * choose.uniform(0.98, 1.02)

    figures = {
        n: (noisy(1.0 if n <= 16 else 1.5), noisy(1.0)) for n in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    assert crossover_of(figures) == 16
    faster = {n: (views / (2.0 if n <= 16 else 1.0), ring) for n, (views, ring) in figures.items()}
    faster[choose.choice([1, 2, 4])] = (1.5, 1.0)
    assert crossover_of(faster) == 16


def test_both_ways_are_timed() -> None:
    found = measure_crossover(torch.device("cpu"), 64, 96, (1, 3))
    assert list(found) == [1, 3]
    assert all(seconds > 0 for pair in found.values() for seconds in pair)


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Identity("A card", 7, "3", "0")
    monkeypatch.setattr(detect, "identify", lambda device: identity)
    monkeypatch.setattr(crossover, "runtime_of", lambda device: SimpleNamespace())
    monkeypatch.setattr(
        crossover, "measure_crossover", lambda *_: {1: (1.0, 2.0), 4: (1.5, 2.0), 8: (3.0, 2.0)}
    )
    assert kept_crossover(GPU, tmp_path) == 16
    assert calibrate_offload("cuda", folder=tmp_path) == 4
    assert kept_crossover(GPU, tmp_path) == 4
    assert kept_crossover(torch.device("cpu"), tmp_path) == 16
    path = CROSSOVER_CACHE.path("A card", tmp_path)
    path.write_text(path.read_text().replace("1.5", "-1.5"))
    with pytest.warns(RuntimeWarning, match=r"a time is not a positive number; the default is"):
        assert kept_crossover(GPU, tmp_path) == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_only_a_gpu_can_be_measured() -> None:
    with pytest.raises(MissingBackendError, match="PyTorch finds no NVIDIA GPU"):
        calibrate_offload()
    with pytest.raises(ValueError, match="the device is cpu; only a GPU can be measured"):
        calibrate_offload("cpu")
    for wrong in ((), (4, 0)):
        with pytest.raises(ValueError, match="give one number of tokens or more, each at least 1"):
            calibrate_offload("cpu", tokens=wrong)
