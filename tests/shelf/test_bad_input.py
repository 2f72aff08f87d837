"""What a caller can do wrong: one clear line each, and the shelf is as it was."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """A shelf, which must be whole and unchanged in the end."""
    with Shelf(tmp_path / "data.shelf", timeout=0.1) as opened:
        opened["x"] = np.arange(12.0).reshape(4, 3)
        opened["scalar"] = np.float32(1)
        opened.save("state", {"w": np.ones(2)})
        opened.tag("begin")
        n_commits = opened.info().n_commits
        yield opened
    with Shelf(tmp_path / "data.shelf", "r") as opened:
        assert opened.verify() == []
        assert opened.info().n_commits == n_commits
        assert opened.keys() == ["scalar", "state", "x"]
        assert opened["x"].numpy().tolist() == np.arange(12.0).reshape(4, 3).tolist()


Call = Callable[[Shelf], object]

SHAPES: list[tuple[Any, type[Exception], str]] = [
    ((2, -1), ValueError, r"the shape \(2, -1\) has a negative size"),
    (-1, ValueError, "negative size"),
    ((2.7, 3), TypeError, r"the shape is \(2.7, 3\); it must have integers only"),
    ("abc", TypeError, "the shape is 'abc'; it must have integers only"),
    (None, TypeError, "the shape is None"),
    ((2, None), TypeError, "integers only"),
    ((1 << 63,), ValueError, r"has more than 2\*\*63 bytes"),
    ((0, 1 << 61), ValueError, r"has more than 2\*\*63 bytes"),
    ((1 << 31, 1 << 31), ValueError, r"has more than 2\*\*63 bytes"),
    ((1,) * 65, ValueError, "the shape has 65 axes; it may have 64"),
]


@pytest.mark.parametrize(("shape", "kind", "message"), SHAPES, ids=lambda value: str(value)[:20])
def test_wrong_shapes(shelf: Shelf, shape: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shelf.create("x", shape, "float64", replace=True)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"base": "next"}, ValueError, "base is 'next'; it must be 'previous' or None"),
    ({"keyframe_every": 0}, ValueError, "keyframe_every is 0; it must be at least 1"),
    ({"keyframe_every": 2.5}, TypeError, "keyframe_every is 2.5; it must be an integer"),
    ({"keyframe_every": "3"}, TypeError, "keyframe_every is '3'"),
    ({"chunk_nbytes": 4095}, ValueError, "chunk_nbytes is 4095; it must be from 4096 to 16777216"),
    ({"chunk_nbytes": 5000.5}, TypeError, "chunk_nbytes is 5000.5; it must be an integer"),
    ({"replace": False}, ValueError, "there is 'x' already; name another, or pass replace=True"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=str)
def test_wrong_options_of_create(
    shelf: Shelf, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        shelf.create("x", (2, 2), "float64", **{"replace": True, **options})


SIZES: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "'x' cannot have -1 rows"),
    (2.0, TypeError, "n_rows is 2.0; it must be an integer"),
    (None, TypeError, "n_rows is None"),
    (1 << 63, ValueError, r"more than 2\*\*63 bytes"),
    (1 << 59, ValueError, r"more than 2\*\*63 bytes"),
]


@pytest.mark.parametrize(("n_rows", "kind", "message"), SIZES, ids=str)
def test_wrong_sizes(shelf: Shelf, n_rows: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shelf["x"].resize(n_rows)
