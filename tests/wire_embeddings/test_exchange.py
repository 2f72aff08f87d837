"""The exchange of embeddings on real ranks: the bits are those of PyTorch on one rank."""

from pathlib import Path
from typing import Any

import embedding_jobs as jobs
import pytest
import torch
from wire_ranks import run_ranks, values

from packhorse.wire.embeddings import Bags, Sending, Shard, Table, by_columns, by_rows, on_rank
from packhorse.wire.embeddings.routes import Layout, route

FEATURES = [0, 1, 2, 3, 2]  # the third table serves two


def _run(world: int, job: Any, *args: Any, tmp_path: Path) -> list[Any]:
    return values(run_ranks(world, job, *args, store=tmp_path / "store", limit=120))


@pytest.mark.parametrize(
    ("world", "sharding"),
    [(2, "mixed"), (4, "mixed"), (4, "table-wise"), (4, "row-wise"), (4, "column-wise")],
)
def test_bags_gradients_and_steps_have_the_bits_of_one_rank(
    world: int, sharding: str, tmp_path: Path
) -> None:
    kinds = ("one-hot", "few", "many", "weighted")
    for found in _run(world, jobs.check_all, sharding, kinds, FEATURES, 3, tmp_path=tmp_path):
        assert found == {kind: [] for kind in kinds}


def test_one_rank_alone_sends_nothing(tmp_path: Path) -> None:
    ((wrong, _, nbytes),) = _run(1, jobs.check, "table-wise", "few", FEATURES, 2, tmp_path=tmp_path)
    assert wrong == []
    assert nbytes == 0


def test_choices_follow_the_bytes_and_say_why(tmp_path: Path) -> None:
    found = _run(2, jobs.check, "table-wise", "many", FEATURES, 1, tmp_path=tmp_path)
    for _, choices, _ in found:
        assert choices[0].startswith("t0: 3 distinct of ")  # three rows, however many bags
        assert " sums (" in choices[3].partition(", not ")[0]  # bags of many rows of a large table
        assert " distinct of " in choices[3].partition(", not ")[2]


def test_distinct_rows_are_fewer_bytes_than_bags(tmp_path: Path) -> None:
    for bags, distinct in _run(2, jobs.count_bytes, tmp_path=tmp_path):
        assert distinct < bags / 2


@pytest.mark.parametrize("how", ["bad id", "other tables", "dies"])
def test_a_failure_of_one_rank_reaches_all(how: str, tmp_path: Path) -> None:
    outcomes = run_ranks(3, jobs.fail, how, store=tmp_path / "store", limit=60)
    errors = [one.value or one.error for one in outcomes]
    if how == "bad id":
        assert errors[1].startswith("ValueError: feature 0 (table t0): ids are 1 to 3")
        assert all(
            errors[i].startswith("PeerError: rank 1 failed") and "ids are 1 to 3" in errors[i]
            for i in (0, 2)
        )
    elif how == "other tables":
        assert all(one.startswith("CompatibilityError: tables and features") for one in errors)
    else:
        assert outcomes[1].exit_code == -9
        assert all(errors[i].startswith("PeerError: rank 1") for i in (0, 2))


@pytest.mark.parametrize("sending", Sending)
@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_outside_of_its_table_names_the_feature(sending: Sending, wrong: int) -> None:
    tables = [on_rank("a", 20, 4, 0), by_rows("b", 10, 4, 2), by_columns("c", 10, 12, [0, 1])]
    layout = Layout(tables, ["a", "b", "a", "c"], 2)
    good = Bags(torch.tensor([1, 2, 0]), torch.tensor([0, 1, 3]))
    bad = Bags(torch.tensor([1, 9, wrong]), torch.tensor([0, 1, 3]))
    for feature in (1, 3):
        batch = [bad if i == feature else good for i in range(4)]
        with pytest.raises(
            ValueError, match=rf"feature {feature} \(table [bc]\): ids are .* 0 to 9"
        ):
            route(layout, batch, [4.0] * 3, sending)


def test_tables_that_are_not_covered_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover its rows"):
        Table("t", 10, 4, (Shard(0, (0, 5), (0, 4)),))
    with pytest.raises(ValueError, match="do not cover its columns"):
        Table("t", 10, 4, (Shard(0, (0, 10), (0, 2)), Shard(1, (0, 10), (3, 4))))
    with pytest.raises(ValueError, match="do not cover its rows"):
        Table("t", 10, 4, (*on_rank("t", 10, 4, 0).shards, *on_rank("t", 10, 4, 1).shards))
    with pytest.raises(ValueError, match="cannot be shared"):
        by_columns("t", 10, 4, [0, 1, 2])
