"""GMRA in memory: the theory's promises, scikit-learn's conventions, and wrong input."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pages import run_page
from scipy import sparse
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from packhorse.learn import GMRA
from packhorse.learn.coding import LeafCodes
from packhorse.learn.tensors import checked_rows

Array = NDArray[Any]


def in_100_dimensions(points: Array) -> Array:
    """The same shape, turned at random in a space of 100 dimensions, and off its origin."""
    rng = np.random.default_rng(5)
    turn = np.linalg.qr(rng.standard_normal((100, points.shape[1])))[0]
    return points @ turn.T + rng.standard_normal(100)


def sphere(n: int) -> Array:
    points = np.random.default_rng(1).standard_normal((n, 3))
    return in_100_dimensions(points / np.linalg.norm(points, axis=1, keepdims=True))


def swiss_roll(n: int) -> Array:
    rng = np.random.default_rng(2)
    angle, height = rng.uniform(1.5 * np.pi, 4.5 * np.pi, n), rng.uniform(0, 21, n)
    roll = np.column_stack([angle * np.cos(angle), height, angle * np.sin(angle)])
    return in_100_dimensions(roll / 10)


def cloud(n: int = 300, width: int = 20, dtype: Any = np.float64) -> Array:
    rng = np.random.default_rng(3)
    points = rng.standard_normal((n, width)) * 0.7 ** np.arange(width)
    return (points + np.sin(points[:, ::-1]) + 3).astype(dtype)


def errors(gmra: GMRA, points: Array, scales: Sequence[int] | None = None) -> Array:
    """The mean squared error at some scales, or at each."""
    codes = gmra.transform(points)
    return np.array(
        [
            ((gmra.inverse_transform(codes, scale) - points) ** 2).sum(axis=1).mean()
            for scale in (range(gmra.n_scales_) if scales is None else scales)
        ]
    )


# The theory.


@cache
def fit_of_a_surface(surface: Callable[[int], Array]) -> tuple[GMRA, Array]:
    points = surface(40_000)
    return GMRA(n_components=2, random_state=0).fit(points), points


@pytest.mark.parametrize("surface", [sphere, swiss_roll])
def test_the_error_on_a_surface_falls_as_four_to_the_minus_scale(
    surface: Callable[[int], Array],
) -> None:
    """A cut halves the area of a cell and so its radius squared, which bounds the distance of a
    smooth surface from its plane: the squared error falls to a quarter with each scale. From one
    scale to the next it depends on whether the cut goes across the curvature, so the slope is over
    some scales: those where cells are small beside the surface, and leaves are not yet reached. A
    quarter of the points tells the errors of all."""
    gmra, points = fit_of_a_surface(surface)
    found = errors(gmra, points[::4], (3, 9))
    slope = np.log(found[1] / found[0]) / np.log(4) / 6
    assert slope == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize("surface", [sphere, swiss_roll])
def test_the_distance_is_of_the_order_of_the_radius_squared(
    surface: Callable[[int], Array],
) -> None:
    gmra, points = fit_of_a_surface(surface)
    numbers = np.flatnonzero((gmra.nodes_.scale >= 4) & (gmra.nodes_.scale < 10))
    leaves = gmra.apply(points)
    radii = []
    for number in numbers:
        inside = (leaves >= number) & (leaves < gmra.nodes_.ends[number])
        radii.append(np.linalg.norm(points[inside] - gmra.nodes_[number].centre, axis=1).max())
    slope = np.polyfit(np.log(radii), np.log(gmra.nodes_.rms[numbers]), 1)[0]
    assert slope == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-13), (np.float32, 1e-5)])
def test_points_come_back_exactly_where_there_are_enough_directions(
    dtype: Any, bound: float
) -> None:
    points = np.random.default_rng(0).standard_normal((300, 100)).astype(dtype)
    gmra = GMRA(n_components=12, leaf_size=12, random_state=0)
    codes = gmra.fit_transform(points)
    assert gmra.n_scales_ > 5
    found = gmra.inverse_transform(codes)
    assert found.dtype == dtype
    assert abs(found - points).max() < bound
    assert abs(gmra.inverse_transform(codes, 4) - points).max() > 1


def test_a_plane_needs_no_wavelets() -> None:
    rng = np.random.default_rng(0)
    points = rng.standard_normal((500, 3)) @ rng.standard_normal((3, 30)) + 1
    gmra = GMRA(n_components=8, leaf_size=20, random_state=0).fit(points)
    assert gmra.nodes_.n_wavelets.tolist() == [3] + [0] * (len(gmra.nodes_) - 1)
    assert abs(gmra.inverse_transform(gmra.transform(points), 0) - points).max() < 1e-12


def test_the_error_at_the_finest_scale_is_that_of_the_leaves() -> None:
    points = cloud(2000)
    gmra = GMRA(n_components=3, random_state=0).fit(points)
    nodes = gmra.nodes_
    squares = (nodes.rms**2 * nodes.n_points)[nodes.is_leaf].sum()
    assert errors(gmra, points)[-1] == pytest.approx(squares / len(points), rel=1e-9)
    assert nodes.n_points[nodes.is_leaf].sum() == len(points)


def test_errors_fall_with_each_scale() -> None:
    points = cloud(2000)
    found = errors(GMRA(n_components=3, random_state=0).fit(points), points)
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize("n_components", [4, 0.8])
def test_bases_are_orthonormal_and_wavelets_are_what_a_cell_adds(n_components: float) -> None:
    gmra = GMRA(n_components=n_components, random_state=0).fit(cloud(2000))
    nodes = gmra.nodes_
    assert len(nodes) > 30
    for number in range(1, len(nodes)):
        node, parent = nodes[number], nodes[nodes[number].parent]
        for rows in (node.basis, node.wavelets):
            np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-13)
        assert abs(node.wavelets @ parent.basis.T).max(initial=0) < 1e-13
        assert abs(node.translation @ parent.basis.T).max() < 1e-13
        both = np.vstack([parent.basis, node.wavelets])
        np.testing.assert_allclose(node.basis @ both.T @ both, node.basis, atol=1e-12)
        shift = node.centre - parent.centre
        across = shift - shift @ parent.basis.T @ parent.basis
        np.testing.assert_allclose(node.translation, across, atol=1e-12)


def test_each_scale_is_a_projection_of_the_next() -> None:
    points = cloud(400)
    gmra = GMRA(n_components=3, random_state=0).fit(points)
    codes = gmra.transform(points)
    for i in range(0, len(points), 40):
        nodes, number, wanted = gmra.nodes_, gmra.apply(points[i : i + 1])[0], points[i]
        while number >= 0:
            node = nodes[number]
            wanted = node.centre + (wanted - node.centre) @ node.basis.T @ node.basis
            found = gmra.inverse_transform(codes[[i]], node.scale)[0]
            np.testing.assert_allclose(found, wanted, atol=1e-12)
            number = node.parent


def test_a_share_of_energy_decides_about_the_directions() -> None:
    points = cloud(3000)
    gmra = GMRA(n_components=0.9, random_state=0).fit(points)
    nodes, leaves = gmra.nodes_, gmra.apply(points)
    for number in range(len(nodes)):
        inside = points[(leaves >= number) & (leaves < nodes.ends[number])]
        squares = np.linalg.svd(inside - inside.mean(axis=0), compute_uv=False) ** 2
        rest = 1 - np.cumsum(squares) / squares.sum()
        wanted = int(np.argmax(rest <= 0.1)) + 1
        assert wanted <= len(nodes[number].basis) <= wanted + 1


def test_cells_within_the_tolerance_are_not_cut() -> None:
    points = sphere(5000)
    gmra = GMRA(n_components=2, tolerance=0.05, random_state=0).fit(points)
    leaf = gmra.nodes_.is_leaf
    assert (gmra.nodes_.rms[leaf & (gmra.nodes_.n_points > 32)] <= 0.05).all()
    assert (gmra.nodes_.rms[~leaf] > 0.05).all()
    assert len(gmra.nodes_) < 200


@pytest.mark.parametrize("n_components", [4, 0.8])
def test_the_shortest_code_gives_the_finest_scale(n_components: float) -> None:
    points = cloud(1000)
    gmra = GMRA(n_components, random_state=0).fit(points)
    codes = gmra.encode(points)
    np.testing.assert_array_equal(codes.cells, gmra.apply(points))
    found = gmra.inverse_transform(gmra.transform(points))
    np.testing.assert_allclose(gmra.decode(codes), found, atol=1e-12)
    with pytest.raises(ValueError, match="a number that is not of a cell at the finest scale"):
        gmra.decode(codes._replace(cells=codes.cells * 0))


# Cells that do not fit into the memory that is allowed.


@pytest.mark.parametrize("n_components", [3, 0.7])
def test_a_small_budget_gives_a_result_as_good(n_components: float) -> None:
    points = cloud(12_000, 40, np.float32)
    whole = GMRA(n_components, random_state=0).fit(points)
    pieces = GMRA(n_components, random_state=0, memory_nbytes=1 << 20).fit(points)
    assert errors(pieces, points)[-1] == pytest.approx(errors(whole, points)[-1], rel=0.03)
    assert pieces.nodes_.rms[0] == pytest.approx(whole.nodes_.rms[0], rel=1e-3)
    nodes = pieces.nodes_
    counts = np.bincount(pieces.apply(points), minlength=len(nodes))
    assert (counts[nodes.is_leaf] == nodes.n_points[nodes.is_leaf]).mean() > 0.99


def test_pieces_are_cut_again_where_they_are_too_large() -> None:
    points = np.random.default_rng(0).standard_normal((150_000, 30)).astype(np.float32)
    gmra = GMRA(2, random_state=0, memory_nbytes=1 << 20, max_scale=8).fit(points)
    assert gmra.nodes_.n_points[gmra.nodes_.is_leaf].sum() == len(points)


def test_batches_are_the_same_as_an_array() -> None:
    points = cloud(5000, 40)
    settings: dict[str, Any] = {"n_components": 3, "random_state": 0, "memory_nbytes": 1 << 20}
    whole = GMRA(**settings).fit(points)
    batches = GMRA(**settings).fit(points[i : i + 77] for i in range(0, len(points), 77))
    codes = batches.transform(points)
    assert (codes != whole.transform(points)).nnz == 0
    parts = batches.transform(points[i : i + 500] for i in range(0, len(points), 500))
    assert abs(codes - parts).max() < 1e-12


def test_points_that_are_all_equal() -> None:
    gmra = GMRA(random_state=0, memory_nbytes=1 << 20).fit(np.ones((20_000, 40)))
    assert len(gmra.nodes_) == 1
    np.testing.assert_array_equal(
        gmra.inverse_transform(gmra.transform(np.ones((2, 40)))), np.ones((2, 40))
    )
    mostly = np.ones((20_000, 40))
    mostly[::50] = cloud(400, 40)
    gmra = GMRA(random_state=0, memory_nbytes=1 << 20).fit(mostly)
    assert gmra.nodes_.n_points[gmra.nodes_.is_leaf].sum() == len(mostly)


# The conventions of scikit-learn.


@pytest.mark.parametrize("settings", [{}, {"n_components": 0.9, "sparse_output": False}])
def test_scikit_learn_finds_nothing_wrong(settings: dict[str, Any]) -> None:
    """Only its check of other kinds of arrays is skipped: it asks for a variable of SciPy, which
    must be set before SciPy is imported."""
    results = check_estimator(GMRA(**settings), on_skip=None)
    assert {item["check_name"] for item in results if item["status"] == "skipped"} <= {
        "check_array_api_input"
    }


def test_scikit_learn_finds_nothing_wrong_when_scipy_takes_other_arrays() -> None:
    code = (
        "from packhorse.learn import GMRA; import sklearn.utils.estimator_checks as checks; "
        "found = [check for _, check in checks.estimator_checks_generator(GMRA()) "
        "if check.func.__name__ == 'check_array_api_input']; "
        "assert found; [check(GMRA()) for check in found]"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "SCIPY_ARRAY_API": "1"}
    )


def test_the_matrix_is_sparse_and_goes_from_coarse_to_fine() -> None:
    points = cloud(1000)
    gmra = GMRA(n_components=3, random_state=0).fit(points)
    codes = gmra.transform(points)
    assert sparse.issparse(codes)
    assert codes.format == "csr"
    assert codes.shape == (1000, len(gmra.get_feature_names_out()))
    assert (np.diff(gmra.column_scales_) >= 0).all()
    assert codes.nnz < 1000 * 4 * gmra.n_scales_
    dense = GMRA(n_components=3, random_state=0, sparse_output=False).fit_transform(points)
    np.testing.assert_array_equal(codes.toarray(), dense)
    coarse = codes.copy()
    coarse.data[gmra.column_scales_[coarse.indices] > 2] = 0
    np.testing.assert_allclose(
        gmra.inverse_transform(coarse), gmra.inverse_transform(codes, 2), atol=1e-13
    )


def test_it_is_cloned_pickled_and_part_of_a_pipeline() -> None:
    points, labels = cloud(600), np.arange(600) // 300
    points[300:] += 1
    gmra = GMRA(n_components=3, random_state=0)
    model = make_pipeline(clone(gmra), KNeighborsClassifier(3)).fit(points, labels)
    assert model.score(points, labels) > 0.9
    again = pickle.loads(pickle.dumps(gmra.fit(points)))
    assert (again.transform(points) != gmra.transform(points)).nnz == 0


def test_the_same_seed_gives_the_same_result() -> None:
    points = cloud(3000)
    first, second = (GMRA(3, random_state=7, memory_nbytes=1 << 20).fit(points) for _ in "ab")
    assert (first.transform(points) != second.transform(points)).nnz == 0


# Wrong input: one clear line each.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "n_components is 0; it must be an integer from 1, a share"),
        ({"n_components": 1.5}, "n_components is 1.5; it must be"),
        ({"n_components": True}, "n_components is True; it must be"),
        ({"n_components": 21}, "n_components is 21, but 300 points of 20 features have at most 20"),
        ({"tolerance": -1}, "tolerance is -1; it must be a number from 0"),
        ({"leaf_size": 0}, "leaf_size is 0; it must be an integer from 1 or None"),
        ({"max_scale": 1.5}, "max_scale is 1.5; it must be an integer from 0 or None"),
        ({"memory_nbytes": 10}, "memory_nbytes is 10; it must be an integer from 1048576"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GMRA(**settings).fit(cloud())


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(wrong: float) -> None:
    points, gmra = cloud(), GMRA(random_state=0).fit(cloud())
    points[123, 4] = wrong
    for act in (GMRA().fit, gmra.transform, gmra.encode, gmra.apply):
        for X in (points, points.tolist(), (points[i : i + 50] for i in range(0, 300, 50))):
            with pytest.raises(ValueError, match="row 123 of X has NaN or infinity; GMRA needs fi"):
                act(X)


def test_a_sum_that_is_not_finite_is_no_error() -> None:
    points = cloud()
    large = (points * (2e38 / abs(points).max())).astype(np.float32)
    with np.errstate(over="ignore"):
        assert not np.isfinite(large[large > 0].sum())
    assert checked_rows(large[large > 0][:, None], 0, np.float32).all()


def test_fewer_points_than_directions_or_dimensions() -> None:
    with pytest.raises(ValueError, match="n_components is 8, but 5 points of 20 features have at"):
        GMRA(n_components=8).fit(cloud(5))
    few = GMRA(random_state=0).fit(cloud(5))
    np.testing.assert_allclose(few.inverse_transform(few.transform(cloud(5))), cloud(5))


def test_wrong_shapes_are_named() -> None:
    gmra = GMRA(random_state=0).fit(cloud())
    with pytest.raises(ValueError, match="X has 19 features, but GMRA is expecting 20 features"):
        gmra.transform(cloud()[:, :19])
    with pytest.raises(ValueError, match="Z has 3 columns, but transform gives"):
        gmra.inverse_transform(np.ones((2, 3)))
    with pytest.raises(ValueError, match="scale is -1; it must be an integer from 0"):
        gmra.inverse_transform(gmra.transform(cloud()), -1)
    with pytest.raises(ValueError, match="batch 1 of X has 19 columns, but those before have 20"):
        GMRA().fit(iter([cloud(), cloud()[:, :19]]))
    with pytest.raises(ValueError, match=r"scale is 1\.5; it must be an integer from 0"):
        gmra.inverse_transform(gmra.transform(cloud()), 1.5)
    for batches, n_rows in (([], 0), ([cloud()[:1]], 1), ([cloud()[:0]], 0)):
        with pytest.raises(ValueError, match=f"batches of X have {n_rows} rows in all; there must"):
            GMRA().fit(iter(batches))
    for act in (gmra.transform, gmra.encode, gmra.apply):
        with pytest.raises(ValueError, match="X has no batches; there must be one row or more"):
            act(iter([]))


def test_batches_without_rows_are_skipped() -> None:
    points, empty = cloud(), np.empty((0, 20), np.float16)
    gmra = GMRA(random_state=0).fit(iter([empty, points[:100], empty, points[100:]]))
    wanted = GMRA(random_state=0).fit(points)
    assert np.array_equal(gmra.apply(points), wanted.apply(points))


@pytest.mark.parametrize(
    ("cells", "coefficients", "message"),
    [
        ([0.5], [[0, 0]], "codes.cells is float64 of shape"),
        ([[1]], [[0, 0]], "codes.cells is int64 of shape"),
        ([1], [[0]], r"codes.coefficients has the shape \(1, 1\); for these cells it must have"),
        ([1, 2], [[0, 0]], r"codes.coefficients has the shape \(1, 2\); .* have \(2, 2\)"),
        ([0], [[0, 0]], "a number that is not of a cell at the finest scale"),
        ([-1], [[0, 0]], "a number that is not of a cell at the finest scale"),
    ],
)
def test_wrong_codes_are_named(cells: Any, coefficients: Any, message: str) -> None:
    gmra = GMRA(2, random_state=0).fit(cloud())
    with pytest.raises(ValueError, match=message):
        gmra.decode(LeafCodes(np.array(cells), np.array(coefficients, np.float64)))


def test_complex_numbers_are_refused() -> None:
    gmra = GMRA(random_state=0).fit(cloud())
    for act in (GMRA().fit, gmra.transform):
        with pytest.raises(ValueError, match="Complex data not supported"):
            act(cloud() + 1j)
    with pytest.raises(ValueError, match=r"X has complex numbers \(complex128\); GMRA needs real"):
        GMRA().fit(iter([cloud() + 1j]))


def test_the_page_shows_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("gmra.md", tmp_path, monkeypatch)
