"""Cells that are cut: which leaf of a tree of cuts a point belongs to."""

import numpy as np
import pytest

from packhorse.learn.cells import Cuts, Router, cut_sample, leaves_of


def leaf_of(cuts: Cuts, point: np.ndarray) -> int:
    """The leaf that a point belongs to, plane by plane."""
    while "low" in cuts:
        is_low = point @ cuts["direction"] <= cuts["threshold"]
        cuts = cuts["low" if is_low else "high"]
    return int(cuts["leaf"])


@pytest.mark.parametrize("n_leaves", [2, 3, 40])
def test_points_go_to_the_leaf_that_the_planes_lead_to(n_leaves: int) -> None:
    rng = np.random.default_rng(n_leaves)
    sample = rng.standard_normal((500, 6))
    cuts = cut_sample(sample, n_leaves, 0.001, rng)
    assert [leaf["leaf"] for leaf in leaves_of(cuts)] == list(range(n_leaves))
    points = rng.standard_normal((300, 6))
    found = Router(cuts).route(points)
    assert found.tolist() == [leaf_of(cuts, point) for point in points]
    assert len(np.unique(found)) == n_leaves
    assert Router(cuts).route(points[:0]).shape == (0,)
