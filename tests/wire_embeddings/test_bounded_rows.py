"""Rows within bounds: the bound holds, rounding is right on average, nothing is lost for ever."""

from pathlib import Path

import embedding_jobs as jobs
import numpy as np
import pytest
import torch
from wire_ranks import run_ranks, values

from packhorse.codecs.bounded import Rounding
from packhorse.errors import CorruptionError
from packhorse.wire.bounds import Schedule, Shape, TableBounds
from packhorse.wire.embeddings import BoundedRows, Piece, on_rank
from packhorse.wire.embeddings.routes import Layout

CONSTANT = Schedule(Shape.CONSTANT)
LAYOUT = Layout(
    [on_rank("small", 40, 8, 0), on_rank("large", 5000, 16, 0)], ["small", "large"], world=2
)


def codec(rounding: Rounding = Rounding.NEAREST, **options: int) -> BoundedRows:
    made = BoundedRows(TableBounds(schedule=CONSTANT, rounding=rounding), **options)
    made.attach(LAYOUT, rank=1)
    return made


def pieces(seed: int, scale: float = 1.0) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shard, (n, of, width) in enumerate([(10, 40, 8), (300, 5000, 16)]):
        ids = torch.randperm(of, generator=generator)[:n].sort().values
        rows = scale * torch.randn(n, width, generator=generator)
        found.append(Piece(shard, rows, ids.numpy()))
    return found


def sent(one: BoundedRows, parts: list[Piece]) -> list[torch.Tensor]:
    """What arrives at rank 0."""
    message, nothing = one.encode([parts, []])
    assert len(nothing) == 0
    got = [torch.empty_like(part.rows) for part in parts]
    one.decode(message, got)
    return got


@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_table_keeps_its_bound(rounding: Rounding) -> None:
    one = codec(rounding)
    for seed in range(5):
        parts = pieces(seed)
        parts[1].rows[7, 3] = float("nan")
        parts[1].rows[8, 3] = float("inf")
        for part, got in zip(parts, sent(one, parts), strict=True):
            bound = one.bounds._states[part.shard].last.bound
            finite = part.rows.isfinite()
            assert (got - part.rows)[finite].abs().max() <= bound
            assert torch.equal(got[~finite].isnan(), part.rows[~finite].isnan())


def test_stochastic_rounding_is_right_on_average() -> None:
    one = codec(Rounding.STOCHASTIC)
    (small, _) = pieces(3)
    total = torch.zeros_like(small.rows)
    for _ in range(400):
        total += sent(one, [small])[0]
    bound = one.bounds._states[0].last.bound
    assert (total / 400 - small.rows).abs().max() < bound / 4
    again = codec(Rounding.STOCHASTIC)
    assert torch.equal(sent(again, [small])[0], sent(codec(Rounding.STOCHASTIC), [small])[0])
    assert not torch.equal(sent(again, [small])[0], sent(codec(Rounding.STOCHASTIC), [small])[0])


def test_error_feedback_sends_later_what_was_lost() -> None:
    """Rows of a few % of the bound vanish without feedback; with it, their sum arrives."""
    lossy, fed = codec(), codec(feedback_rows=5000)
    sums = {"sent": torch.zeros(10, 8), "lossy": torch.zeros(10, 8), "fed": torch.zeros(10, 8)}
    (first, _) = pieces(0)
    rows = first.rows.clone()
    rows[1:] *= 4e-3
    for _ in range(50):
        part = first._replace(rows=rows)
        sums["sent"] += rows
        sums["lossy"] += sent(lossy, [part])[0]
        sums["fed"] += sent(fed, [part])[0]
    bound = fed.bounds._states[0].last.bound
    assert (sums["fed"] - sums["sent"]).abs().max() <= 1.01 * bound
    assert (sums["lossy"] - sums["sent"]).abs().max() > 2 * bound


def test_feedback_is_for_tables_that_are_small_enough() -> None:
    one = codec(feedback_rows=100)
    sent(one, pieces(0))
    assert set(one.state_dict()["lost"]) == {0}


def test_resuming_sends_the_same_bits() -> None:
    def messages(one: BoundedRows, seeds: range) -> list[bytes]:
        return [bytes(one.encode([pieces(seed), []])[0]) for seed in seeds]

    def make() -> BoundedRows:
        return codec(Rounding.STOCHASTIC, feedback_rows=100)

    first, second = make(), make()
    begun = messages(first, range(4))
    second.load_state_dict(first.state_dict())
    assert begun + messages(second, range(4, 8)) == messages(make(), range(8))


def test_damaged_and_foreign_messages_are_refused() -> None:
    one = codec()
    parts = pieces(0)
    message, _ = one.encode([parts, []])
    got = [torch.empty_like(part.rows) for part in parts]
    for length in (0, 1, 40, len(message) // 2, len(message) - 1):
        with pytest.raises(CorruptionError):
            one.decode(message[:length], got)
    with pytest.raises(CorruptionError, match="rows were asked for that did not come"):
        one.decode(message, got[:1])
    with pytest.raises(CorruptionError, match="none were asked for"):
        one.decode(np.zeros(3, np.uint8), [])


def test_an_object_serves_one_exchange() -> None:
    one = codec()
    with pytest.raises(ValueError, match="serve another exchange"):
        one.attach(Layout([on_rank("t", 4, 4, 0)], ["t"], world=2), rank=0)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_get_bags_within_the_bounds_in_fewer_bytes(world: int, tmp_path: Path) -> None:
    for found in values(run_ranks(world, jobs.bounded, store=tmp_path / "store", limit=60)):
        assert found["excess"] <= 0
        assert found["is_repeated"]
        assert found["nbytes"] < found["raw_nbytes"] / 2
