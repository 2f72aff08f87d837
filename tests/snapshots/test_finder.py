"""Finding contents in a store: in which order manifests are read, and how often each is counted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from packhorse.disk.snapshots import finder


class CountedHits(dict[str, Any]):
    """The contents that manifests seem to have, and how often they were looked up."""

    n_reads = 0

    def __getitem__(self, path: str) -> Any:
        self.n_reads += 1
        return super().__getitem__(path)


def hits_of(rows: dict[str, list[tuple[int, int]]]) -> CountedHits:
    """For each path, the numbers of its contents, and how many deltas each has."""
    return CountedHits(
        {
            path: finder._Hits(np.array([k for k, _ in row]), np.array([n for _, n in row], "u1"))
            for path, row in rows.items()
        }
    )


def turns_of(hits: CountedHits, n_wanted: int, lies: Sequence[str] = ()) -> list[str]:
    """The manifests in the order of their turns; some have nothing of what they seem to have."""
    turns, found = finder._Turns(hits, sorted(hits), n_wanted), []
    while (turn := turns.next()) is not None:
        path, numbers = turn
        found.append(path)
        turns.close([] if path in lies else numbers)
    return found


def test_the_manifest_that_has_most_with_the_fewest_deltas_is_read_first() -> None:
    rows = {"a": [(0, 1), (1, 0), (2, 0)], "b": [(3, 0)], "c": [(0, 0), (1, 0)], "d": [(4, 2)]}
    assert turns_of(hits_of(rows), 5) == ["c", "d", "b", "a"]
    assert turns_of(hits_of(rows), 5, lies=["c"]) == ["c", "a", "d", "b"]
    assert turns_of(hits_of(rows), 5, lies="abcd") == ["c", "a", "d", "b"]
    assert turns_of(hits_of({"a": [(0, 3)], "b": [(0, 5)]}), 1, lies="ab") == ["a", "b"]
    assert turns_of(hits_of({}), 3) == []


@pytest.mark.parametrize("n_lies", [0, 500, 2000])
def test_contents_that_lie_in_a_snapshot_each_are_found_in_one_pass(n_lies: int) -> None:
    n = 2000
    hits = hits_of({f"{i:05d}": [(i, i % 65)] for i in range(n)})
    order = turns_of(hits, n, lies=[f"{i:05d}" for i in range(n_lies)])
    assert order == sorted(set(order), reverse=True)
    assert len(set(order)) == n
    assert hits.n_reads <= 4 * n


def test_what_all_seem_to_have_and_none_has_is_looked_for_once_in_each() -> None:
    n = 1000
    hits = hits_of({f"{i:05d}": [(0, i % 65)] for i in range(n)})
    assert len(turns_of(hits, 1, lies=list(hits))) == n
    assert hits.n_reads <= 65 * 2 * n
