"""Runs a fit step by step, and keeps on the shelf how far it is.

A fit that was killed goes on after its last commit, if the points and the settings are the same.
Then its result is the same bit for bit, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from packhorse.errors import CompatibilityError
from packhorse.learn.growth import Growth, Plan
from packhorse.learn.nodes import Nodes, finished
from packhorse.learn.notes import cut_parts, read_stack
from packhorse.learn.tensors import Rows, Shelf, Tensors, as_arrays, checked_rows, float_dtype

__all__ = ["gather", "read", "run"]

_VERSION = 1
_TEMPORARY = ("part-", "cuts", "sums", "bases", "points")
_PARTS = ("nodes/", "part-", "cuts", "sums", "bases", "state")  # all but the points that are read
_HASHED_ROWS = 256


def gather(batches: Iterable[Any], shelf: Tensors, name: str) -> Rows:
    """Puts batches of points into one tensor.

    If an interrupted call has put some there, the first batches must be the same again, and are
    skipped.

    Args:
        batches: matrices of the same width.
        shelf: where the tensor is made.
        name: the beginning of its name.

    Raises:
        ValueError: a batch has a wrong shape or a number that is not finite, or all batches have
            less than two rows.
    """
    path = f"{name}/points"
    n_seen = 0
    for number, batch in enumerate(batches):
        rows = np.asarray(as_arrays(batch))
        if rows.ndim == 2 and not len(rows):
            continue
        if path not in shelf:
            if rows.ndim == 2 and rows.size:
                shelf.create(path, (0, rows.shape[1]), float_dtype(rows.dtype))
            else:
                raise ValueError(
                    f"batch {number} of X has the shape {rows.shape}; it must be a matrix"
                )
        tensor = as_arrays(shelf[path])
        n_there, width = tensor.shape
        if rows.ndim != 2 or rows.shape[1] != width:
            columns = f"{rows.shape[1]} columns" if rows.ndim == 2 else f"the shape {rows.shape}"
            raise ValueError(
                f"batch {number} of X has {columns}, but those before have {width} columns"
            )
        rows = checked_rows(rows, n_seen, tensor.dtype)
        n_seen += len(rows)
        if n_seen > n_there:
            tensor.append(rows[len(rows) - (n_seen - n_there) :])
    if n_seen < 2:
        raise ValueError(f"the batches of X have {n_seen} rows in all; there must be two or more")
    points: Rows = as_arrays(shelf[path])
    return points


def run(growth: Growth, settings: dict[str, Any], shelf: Shelf | None) -> None:
    """Does a fit, or the rest of it.

    Args:
        growth: the fit.
        settings: of the estimator, which the shelf keeps too.
        shelf: that of the fit; None if it is memory.

    Raises:
        ValueError: a fit of that name was interrupted which had other points or settings.
    """
    if shelf is None:
        growth.begin()
        while growth.stack:
            growth.step()
        return
    state = _state_of(shelf, growth.name)
    points = _digest(growth.source)
    keep = partial(_keep, growth, settings, points)
    try:
        if state is None or state["is_done"]:
            growth.writer.note(lambda shelf: _remove(shelf, growth.name))
            growth.begin()
            keep()
            growth.writer.commit()
        else:
            _check_same(growth, state, settings, points)
            _go_on(growth, shelf, state)
        while growth.stack:
            if growth.step():
                keep()
            growth.writer.commit()
        growth.writer.wait()
    finally:
        growth.stop()
        growth.writer.drop()


def _keep(growth: Growth, settings: dict[str, Any], points: str) -> None:
    """Writes what is needed to go on after a step; at the end, removes it."""
    state = {
        "is_done": not growth.stack,
        "settings": settings,
        "plan": asdict(growth.plan) | {"dtype": growth.plan.dtype.name},
        "points": points,
        "stack": growth.notes.saved(growth.stack),
        "n_parts": growth.n_parts,
        "n_nodes": len(growth.nodes),
        "n_cuts": growth.notes.n_cuts,
        "n_bases": growth.notes.n_bases,
    }
    text = json.dumps(state, default=_plain)

    def write(shelf: Shelf) -> None:
        shelf.save(f"{growth.name}/state", {"version": _VERSION, "fit": text})
        if state["is_done"]:
            _remove(shelf, growth.name, _TEMPORARY)

    growth.writer.note(write)


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python."""
    return value.item()


def _go_on(growth: Growth, shelf: Shelf, state: dict[str, Any]) -> None:
    """Takes up a fit that was interrupted."""
    growth.plan = _plan_of(state)
    growth.stack = read_stack(shelf, growth.name, state["stack"])
    growth.n_parts = state["n_parts"]
    growth.notes.n_cuts, growth.notes.n_bases = state["n_cuts"], state["n_bases"]
    with shelf.transaction():
        cut_parts(shelf, growth.name, growth.stack)
        growth.nodes.go_on(shelf, state["n_nodes"])


def read(shelf: Shelf, name: str) -> tuple[dict[str, Any], Nodes, Plan]:
    """What a fit has left on a shelf.

    Args:
        shelf: the shelf.
        name: the beginning of the names of its tensors.

    Returns:
        The settings of the estimator, the cells, and what the fit depended on.

    Raises:
        ValueError: there is no such fit, or it was interrupted.
    """
    state = _state_of(shelf, name)
    if state is None:
        raise ValueError(f"the shelf has no fit of the name {name!r}")
    if not state["is_done"]:
        raise ValueError(
            f"the fit {name!r} was interrupted; call fit again with the same points, and it goes on"
        )
    return state["settings"], finished(shelf, name), _plan_of(state)


def _state_of(shelf: Shelf, name: str) -> dict[str, Any] | None:
    path = f"{name}/state"
    if path not in shelf:
        return None
    state = shelf.load(path)
    if state.get("version") != _VERSION:
        raise CompatibilityError(
            f"{path} is of version {state.get('version')}; this release reads version {_VERSION}"
        )
    return json.loads(state["fit"])  # type: ignore[no-any-return]


def _plan_of(state: dict[str, Any]) -> Plan:
    return Plan(**(state["plan"] | {"dtype": np.dtype(state["plan"]["dtype"])}))


def _remove(shelf: Shelf, name: str, parts: tuple[str, ...] = _PARTS) -> None:
    """Removes what a fit has put on the shelf, and nothing else that the name begins."""
    for part in parts:
        for path in list(shelf.keys(f"{name}/{part}")):
            rest = path.removeprefix(f"{name}/{part}")
            if part.endswith("/") or rest.isdecimal() or not rest:
                del shelf[path]


def _check_same(growth: Growth, state: dict[str, Any], settings: dict[str, Any], pts: str) -> None:
    """Refuses to go on with another fit."""
    before = _plan_of(state)
    seed = growth.plan.seed if settings["random_state"] is not None else before.seed
    other = [
        what
        for what, same in {
            "points": pts == state["points"],
            "settings": replace(growth.plan, seed=seed) == before,
        }.items()
        if not same
    ]
    if other:
        raise ValueError(
            f"the fit {growth.name!r} on the shelf was interrupted, and had other "
            f"{' and '.join(other)}: give the same again, or another name, or remove it "
            f"(for key in list(shelf.keys({growth.name + '/'!r})): del shelf[key])"
        )


def _digest(points: Rows) -> str:
    """A hash of the shape and of some points: those at both ends."""
    digest = blake2b(f"{tuple(points.shape)} {points.dtype}".encode(), digest_size=16)
    for run in (slice(0, _HASHED_ROWS), slice(max(points.shape[0] - _HASHED_ROWS, 0), None)):
        digest.update(np.ascontiguousarray(points[run]).tobytes())
    return digest.hexdigest()
