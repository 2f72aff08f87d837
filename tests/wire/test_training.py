"""Data parallel training, packed beside plain: losses and weights must have the same bits."""

from pathlib import Path

import pytest
import wire_training as jobs
from wire_ranks import run_ranks, values

STEPS = 5


@pytest.mark.parametrize(("choice", "optimizer"), [("packed", "adamw"), ("auto", "muon")])
def test_ddp_on_two_ranks_trains_to_the_same_bits(
    choice: str, optimizer: str, tmp_path: Path
) -> None:
    found = values(run_ranks(2, jobs.ddp, optimizer, choice, STEPS, store=tmp_path / "store"))
    for one in found:
        assert one["plain"] == one["packed"]
        assert one["plain"][0][-1] < one["plain"][0][0]
        assert sum(n for _, _, n in one["rows"]) > 3 * STEPS  # several buckets
    assert found[0]["packed"][1] == found[1]["packed"][1]


@pytest.mark.parametrize(
    ("optimizer", "is_mixed", "choice"),
    [("adamw", True, "packed"), ("adamw", False, "auto"), ("muon", False, "packed")],
)
def test_fsdp2_on_two_ranks_trains_to_the_same_bits(
    optimizer: str, is_mixed: bool, choice: str, tmp_path: Path
) -> None:
    job = (optimizer, choice, STEPS, is_mixed)
    found = values(run_ranks(2, jobs.fsdp, *job, store=tmp_path / "store"))
    for one in found:
        assert one["n_modules"] == 3
        assert one["plain"] == one["packed"]
        assert one["plain"][0][-1] < one["plain"][0][0]
        assert {key.split()[0] for key, _, _ in one["rows"]} == {"all_gather", "reduce_scatter"}
    assert found[0]["packed"][1] == found[1]["packed"][1]


@pytest.mark.slow
def test_four_ranks_have_the_same_weights(tmp_path: Path) -> None:
    for job in ((jobs.ddp, "adamw", "packed", 3), (jobs.fsdp, "adamw", "packed", 3, True)):
        found = values(run_ranks(4, *job, store=tmp_path / job[0].__name__))
        assert len({one["packed"][1] for one in found}) == 1
        for one in found:
            assert one["packed"][0] == pytest.approx(one["plain"][0], rel=2e-3)


def test_models_that_are_not_sharded_or_elsewhere_are_refused(tmp_path: Path) -> None:
    for plain, foreign in values(run_ranks(2, jobs.refusals, store=tmp_path / "store")):
        assert plain.startswith("no part of Model is sharded; call fully_shard")
        assert " of 2 ranks, and the collectives have " in foreign


@pytest.mark.parametrize("choice", ["packed", "raw"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_flow_through_collectives(size: int, choice: str, tmp_path: Path) -> None:
    found = values(run_ranks(size, jobs.gradients, choice, store=tmp_path / "store"))
    assert found == [[]] * size
