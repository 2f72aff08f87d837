"""Exchanging bytes among real processes, and what happens when one of them misbehaves."""

from pathlib import Path

import pytest
import wire_exchange_jobs as jobs
from wire_ranks import run_ranks, values


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_of_any_length_arrive(size: int, tmp_path: Path) -> None:
    found = values(run_ranks(size, jobs.exchange_all, 6, store=tmp_path / "store"))
    assert found == [[True] * 6] * size


def test_a_call_like_those_before_it_takes_one_transfer(tmp_path: Path) -> None:
    piece = 1 << 20  # of a round, and the most for which a message has room
    sizes = [0, 100, 100, 3, 101, 101, 0, 3 * piece, 3 * piece, piece]
    found = values(run_ranks(3, jobs.count_transfers, sizes, store=tmp_path / "store"))
    assert found == [[1, 2, 1, 1, 2, 1, 1, 4, 3, 1]] * 3


def test_damaged_bytes_behind_a_statement_are_refused(tmp_path: Path) -> None:
    for error in values(run_ranks(3, jobs.flip_a_bit, store=tmp_path / "store")):
        assert error.startswith("the 100 bytes that rank 1 sent to rank ")


def test_objects_and_groups_do_not_mix(tmp_path: Path) -> None:
    found = values(run_ranks(4, jobs.two_on_subgroups, store=tmp_path / "store"))
    for rank, parts in enumerate(found):
        expected = [bytes([i, rank, n]) for n in (2, 1) for i in range(4)]
        expected += [bytes([i, rank // 2, 3]) for i in (1, 3)] if rank % 2 else []
        assert parts == expected


@pytest.mark.parametrize(
    ("how", "culprit", "words"),
    [
        ("dies", 1, "PeerError: rank 1 closed the connection during exchange (operation 3)"),
        ("leaves", 1, "PeerError: rank 1 closed the connection during exchange (operation 3)"),
        ("sleeps", 1, "PeerError: rank 1 did not take part in exchange (operation 3) within 2 s"),
        ("too much", 1, "CorruptionError: rank 1 announces 9437184 bytes to rank "),
    ],
)
def test_all_ranks_hear_of_a_failure(how: str, culprit: int, words: str, tmp_path: Path) -> None:
    outcomes = run_ranks(4, jobs.fail_in_exchange, how, 2, store=tmp_path / "store")
    others = [one for rank, one in enumerate(outcomes) if rank != culprit or how == "sleeps"]
    assert {one.error for one in others} == {""}
    errors = {error for one in others for error in one.value}
    assert len(errors) == 1, errors
    assert errors.pop().startswith(words)
    assert all(len(one.value) == 2 for one in others)
    assert max(one.seconds for one in others) < 10
