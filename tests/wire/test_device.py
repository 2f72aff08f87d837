"""Collectives by the ways of a device: each bit as PyTorch's own, or as the host's, have it.

There is no GPU here: Triton's interpreter runs the kernels, on tensors in host memory over gloo.
"""

import re
from pathlib import Path

import pytest
import wire_device_jobs as jobs
from wire_ranks import run_ranks, values


@pytest.mark.parametrize(
    ("size", "fill", "sizes"),
    [
        (1, "weights", [0, 63]),
        (2, "weights", [0, 1, 63, 5000]),
        (3, "weights", [1, 5000]),
        (2, "noise", [1, 63, 5000]),
    ],
)
def test_values_arrive_as_with_pytorch(
    size: int, fill: str, sizes: list[int], tmp_path: Path
) -> None:
    found = run_ranks(size, jobs.device_moves, "packed", sizes, fill, store=tmp_path / "store")
    assert values(found) == [[]] * size


def test_reductions_have_the_bits_of_the_host(tmp_path: Path) -> None:
    found = run_ranks(3, jobs.device_reductions, 700, store=tmp_path / "store")
    assert values(found) == [[]] * 3


def test_work_may_be_waited_for_later(tmp_path: Path) -> None:
    found = run_ranks(2, jobs.device_async, 3000, store=tmp_path / "store")
    assert values(found) == [[True, True]] * 2


def test_a_device_packs_what_it_can_if_it_is_told_to(tmp_path: Path) -> None:
    assert values(run_ranks(2, jobs.device_ways, store=tmp_path / "store")) == [[]] * 2


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    for outcome in run_ranks(2, jobs.device_disagreement, store=tmp_path / "store"):
        assert outcome.error.startswith("CompatibilityError: ")
        assert "dtype" in outcome.error
        assert "bfloat16" in outcome.error
        assert "float32" in outcome.error


def test_more_escapes_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    for outcome in run_ranks(2, jobs.device_lie, store=tmp_path / "store"):
        assert re.fullmatch(
            r"CorruptionError: rank 1 announces 513 escapes for 4096 elements to rank \d; there is "
            "room for 512",
            outcome.error,
        )
