"""Collectives beside PyTorch's own, in real processes over gloo: every bit must be the same."""

from pathlib import Path

import pytest
import torch
import wire_jobs as jobs
from wire_ranks import run_ranks, values


@pytest.mark.parametrize(
    ("size", "choice"),
    [(1, "auto"), (2, "packed"), (2, "raw"), (2, "auto"), (4, "packed"), (4, "auto")],
)
def test_values_arrive_as_with_pytorch(size: int, choice: str, tmp_path: Path) -> None:
    sizes = [0, 1, 63, 5000]
    found = values(run_ranks(size, jobs.moves, choice, sizes, "weights", store=tmp_path / "store"))
    assert found == [[]] * size


@pytest.mark.parametrize("fill", ["weights", "noise"])
def test_long_tensors_travel_in_pieces(fill: str, tmp_path: Path) -> None:
    sizes = [1 << 20, 1_500_001]
    found = values(run_ranks(2, jobs.moves, "packed", sizes, fill, store=tmp_path / "store"))
    assert found == [[]] * 2


@pytest.mark.parametrize(
    ("size", "choice"), [(1, "packed"), (2, "packed"), (2, "raw"), (4, "packed"), (3, "raw")]
)
def test_reductions_have_the_bits_of_a_plain_one(size: int, choice: str, tmp_path: Path) -> None:
    sizes = [1, 999] if size <= 2 else [999]  # each dtype, with as few elements as can be
    found = values(run_ranks(size, jobs.reductions, choice, sizes, store=tmp_path / "store"))
    assert found == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_any_layout_will_do(size: int, tmp_path: Path) -> None:
    for found in values(run_ranks(size, jobs.layouts, store=tmp_path / "store")):
        assert found == [True] * len(found)


def test_collectives_go_on_in_the_background(tmp_path: Path) -> None:
    for found in values(run_ranks(3, jobs.in_background, 700_000, store=tmp_path / "store")):
        assert found == [True] * len(found)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.bfloat16, 1.48), (torch.float16, 1.16), (torch.float32, 1.19)],
)
def test_real_weights_take_fewer_bytes(dtype: torch.dtype, least: float, tmp_path: Path) -> None:
    for good, ratio in values(run_ranks(2, jobs.real_weights, dtype, store=tmp_path / "store")):
        assert good == [True] * 3
        assert ratio > least


@pytest.mark.parametrize(
    ("size", "dtype", "width"), [(2, torch.float32, 64), (3, torch.bfloat16, 36)]
)
def test_rows_that_repeat_are_sent_once(
    size: int, dtype: torch.dtype, width: int, tmp_path: Path
) -> None:
    for good, ratios in values(
        run_ranks(size, jobs.repeated_rows, dtype, width, store=tmp_path / "store")
    ):
        assert good == [True] * 5
        assert min(ratios) > 2.5  # without rows, of which many repeat, 1.2 and 1.5


@pytest.mark.parametrize(("link", "arm"), [(0.1, "PACKED"), (10.0, "TORCH")])
def test_given_rates_choose_the_way(link: float, arm: str, tmp_path: Path) -> None:
    found = values(run_ranks(2, jobs.chosen, link, store=tmp_path / "store"))
    assert found == [[arm, "TORCH", arm]] * 2


def test_ranks_choose_alike_by_what_they_measure(tmp_path: Path) -> None:
    found = values(run_ranks(3, jobs.measured, 30, store=tmp_path / "store"))
    for good, rows in found:
        assert good == [True] * 30
        assert rows == found[0][1]
        assert [n_calls for _, n_calls, _ in rows] == [30, 30]
        # Once each way uncounted; a hopeless way once more, and close ones eight times in all.
        assert all(6 <= n_timed <= 30 for _, _, n_timed in rows)


def test_one_rank_on_a_device_takes_pytorchs_own_way(tmp_path: Path) -> None:
    (rows,) = values(run_ranks(1, jobs.on_a_device, store=tmp_path / "store"))
    assert rows == [("TORCH", "there is one rank, so nothing is sent")] * 5
