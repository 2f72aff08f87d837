"""Tags, rollbacks and removals in random orders, against a model in memory; and what they cost."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfView

Content = dict[str, Any]  # arrays, and dicts of arrays for states


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        yield opened
        assert opened.verify() == []


class Undo(Exception):
    """Ends a transaction."""


class Walk:
    """Random steps on a shelf, and the same in memory."""

    def __init__(self, shelf: Shelf, seed: int) -> None:
        self.shelf, self.rng = shelf, random.Random(seed)
        self.now: Content = {}
        self.tags: dict[str, Content] = {}
        self.n_steps = 0

    # Names are few, so that they are often used again.
    def new_name(self) -> str:
        free = {f"{letter}/{i}" for letter in "ab" for i in range(4)} - self.now.keys()
        return self.rng.choice(sorted(free)) if free else self.name()

    def name(self) -> str:
        return self.rng.choice(sorted(self.now)) if self.now else "absent"

    def tensor(self) -> str | None:
        names = [name for name in self.now if isinstance(self.now[name], np.ndarray)]
        return self.rng.choice(sorted(names)) if names else None

    def rows(self, n: int) -> np.ndarray:
        array = np.full((n, 300), self.n_steps, np.int32)
        array[:, 0] = range(n)
        return array

    def make(self) -> None:
        name = self.new_name()
        base = self.rng.choice([None, "previous"])
        array = self.rows(self.rng.randrange(40))
        x = self.shelf.create(
            name, (0, 300), "int32", base=base, chunk_nbytes=4096, keyframe_every=3, replace=True
        )
        x.append(array)
        self.now[name] = array

    def replace(self) -> None:
        name, array = self.name(), self.rows(self.rng.randrange(9))
        self.shelf[name] = self.now[name] = array

    def save(self) -> None:
        name, arrays = self.new_name(), [self.rows(3), self.rows(0), np.array(self.n_steps)]
        self.shelf.save(name, {"arrays": arrays, "step": self.n_steps})
        self.now[name] = {"arrays": arrays, "step": self.n_steps}

    def append(self) -> None:
        name = self.tensor()
        if name is not None:
            more = self.rows(self.rng.randrange(20))
            self.shelf[name].append(more)
            self.now[name] = np.concatenate([self.now[name], more])

    def write(self) -> None:
        name = self.tensor()
        if name is not None and len(self.now[name]):
            at = self.rng.randrange(len(self.now[name]))
            array = self.now[name].copy()
            index: Any = self.rng.choice([at, slice(at, None), (at, slice(5, 9)), (..., 3)])
            self.shelf[name][index] = array[index] = self.n_steps
            self.now[name] = array

    def resize(self) -> None:
        name = self.tensor()
        if name is not None:
            n = self.rng.randrange(30)
            self.shelf[name].resize(n)
            more = np.zeros((max(0, n - len(self.now[name])), 300), np.int32)
            self.now[name] = np.concatenate([self.now[name][:n], more])

    def remove(self) -> None:
        if self.now:
            name = self.name()
            del self.shelf[name]
            del self.now[name]

    def rename(self) -> None:
        if self.now:
            old, new = self.name(), self.new_name()
            if new not in self.now:
                self.shelf.rename(old, new)
                self.now[new] = self.now.pop(old)

    def together(self) -> None:
        before, fails = dict(self.now), self.rng.random() < 0.4
        with suppress(Undo), self.shelf.transaction():
            for _ in range(self.rng.randrange(1, 6)):
                self.n_steps += 1
                self.rng.choice(self.WRITES)(self)
            same(self.shelf, self.now)
            if fails:
                raise Undo
        if fails:
            self.now = before

    def tag(self) -> None:
        name = f"tag {self.rng.randrange(6)}"
        if name not in self.tags:
            self.shelf.tag(name)
            self.tags[name] = dict(self.now)

    def untag(self) -> None:
        if self.tags:
            name = self.rng.choice(sorted(self.tags))
            self.shelf.untag(name)
            del self.tags[name]

    def roll_back(self) -> None:
        if self.tags:
            name = self.rng.choice(sorted(self.tags))
            self.shelf.rollback(name)
            self.now = dict(self.tags[name])

    def compact(self) -> None:
        if self.rng.random() < 0.3:
            self.shelf.compact()

    WRITES: tuple[Callable[["Walk"], None], ...] = (
        make, replace, save, append, append, write, write, resize, remove, rename, rename
    )  # fmt: skip
    STEPS: tuple[Callable[["Walk"], None], ...] = (
        *WRITES, together, together, together, tag, tag, tag, untag, untag, roll_back, roll_back,
        compact,
    )  # fmt: skip

    def step(self) -> None:
        self.n_steps += 1
        self.rng.choice(self.STEPS)(self)

    def check(self) -> None:
        assert self.shelf.verify() == []
        same(self.shelf, self.now)
        assert sorted(self.shelf.tags()) == sorted(self.tags)


def same(view: ShelfView, content: Content) -> None:
    assert view.keys() == sorted(content)
    for name, expected in content.items():
        if isinstance(expected, dict):
            found = view.load(name)
            assert found["step"] == expected["step"]
            assert all(map(np.array_equal, found["arrays"], expected["arrays"]))
        else:
            assert np.array_equal(view[name], expected), name


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk(tmp_path: Path, seed: int) -> None:
    with Shelf(tmp_path / "data.shelf") as shelf:
        walk = Walk(shelf, seed)
        for _ in range(70):
            walk.step()
            walk.check()
        for tag, content in walk.tags.items():
            same(shelf.at(tag), content)
    with Shelf(tmp_path / "data.shelf") as shelf:
        walk.shelf = shelf
        for tag in [*walk.tags]:
            shelf.untag(tag)
            del walk.tags[tag]
            walk.check()
        for name in list(shelf):
            del shelf[name]
        assert shelf.verify() == []
        shelf.compact()
        assert shelf.info().file_nbytes < 40_000


def used_nbytes(shelf: Shelf) -> int:
    info = shelf.info()
    return info.file_nbytes - info.free_nbytes


def test_a_tag_costs_what_changes_after_it(shelf: Shelf) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4096, 256)).astype(np.uint8)
    x = shelf.create("x", noise.shape, "uint8", chunk_nbytes=1 << 16)
    x[...] = noise
    full = used_nbytes(shelf)
    assert full > 1 << 20
    for i in range(20):
        shelf.tag(f"same {i}")
    assert used_nbytes(shelf) < full + 20_000
    x[:256] = noise[256:512]  # a chunk
    assert 1 << 16 <= used_nbytes(shelf) - full < (1 << 16) + 30_000
    x[:256] = noise[512:768]  # again; no tag shows what was there
    assert used_nbytes(shelf) - full < (1 << 16) + 30_000
    x[1000] = 0  # a patch shares the chunk
    assert used_nbytes(shelf) - full < (1 << 16) + 40_000
    with shelf.transaction():
        shelf.rename("x", "y")
        shelf["x"] = np.zeros(3)
    del shelf["y"]
    assert used_nbytes(shelf) < full + 40_000  # what no tag shows is gone
    for i in range(19):
        shelf.untag(f"same {i}")
    assert np.array_equal(shelf.at("same 19")["x"], noise)
    shelf.rollback("same 19")
    assert used_nbytes(shelf) < full + 20_000
    assert np.array_equal(shelf["x"], noise)
    shelf.untag("same 19")
    del shelf["x"]
    assert used_nbytes(shelf) < 80_000


def test_what_a_tag_shows_stays(shelf: Shelf) -> None:
    shelf["x"], shelf["z"] = np.arange(5), np.arange(3)
    shelf.save("state", {"w": np.arange(4)})
    shelf.tag("then")
    then, x = shelf.at("then"), shelf["x"]
    x.append([7])
    del shelf["state"]
    shelf.rename("z", "y")
    shelf["state"] = np.zeros(2)
    assert then.keys() == ["state", "x", "z"] == list(then)
    assert len(then) == 3
    assert "z" in then
    assert "y" not in then
    assert then["x"].numpy().tolist() == [0, 1, 2, 3, 4]
    assert then["x"].tag == "then"
    assert then.load("state")["w"].tolist() == [0, 1, 2, 3]
    assert repr(then["x"]) == "ShelfTensor('x', I64, (5,), tag='then')"
    assert repr(then).endswith("data.shelf', tag='then')")
    info = then.info()
    assert [tensor.name for tensor in info.tensors] == ["x", "z"]
    assert info.states == ["state"]
    assert [tag.name for tag in info.tags] == ["then"]
    with pytest.raises(TypeError, match="'state' is a nested state"):
        then["state"]
    with shelf.transaction():
        x[0] = 9
        assert then["x"][0] == 0
        assert shelf.at("then")["x"][0] == 0
    shelf["copy"] = then["x"]
    assert shelf["copy"].numpy().tolist() == [0, 1, 2, 3, 4]
    shelf["x"] = then["x"]
    assert shelf["x"].numpy().tolist() == [0, 1, 2, 3, 4]
    shelf["x"] += then["x"]
    assert shelf["x"].numpy().tolist() == [0, 2, 4, 6, 8]


def test_a_tag_is_used_again(shelf: Shelf) -> None:
    handles = []
    for i in range(3):
        shelf["x"] = np.array([i])
        shelf.tag("now")
        handles.append(shelf.at("now")["x"])
        assert [handle[0] for handle in handles] == [i] * (i + 1)
        shelf.untag("now")
        with pytest.raises(KeyError, match="there is no tag 'now'"):
            handles[0][0]


def test_tags_are_in_order_of_time(shelf: Shelf) -> None:
    for name in ("z", "a", "m"):
        shelf.tag(name)
    shelf.rollback("z")
    shelf.tag("b")
    assert shelf.tags() == ["z", "a", "m", "b"]
    assert [tag.commit for tag in shelf.info().tags] == [0, 1, 2, 4]


@pytest.mark.parametrize("call", ["tag", "untag", "rollback"])
def test_tags_are_no_part_of_a_transaction(shelf: Shelf, call: str) -> None:
    shelf["x"] = np.zeros(3)
    shelf.tag("then")
    with shelf.transaction():
        shelf["x"][0] = 1
        message = rf"data.shelf: {call}\(\) inside a transaction; leave it first"
        with pytest.raises(RuntimeError, match=message):
            getattr(shelf, call)("then" if call != "tag" else "now")
        with pytest.raises(RuntimeError, match=r"compact\(\) inside a transaction; leave it first"):
            shelf.compact()
    assert shelf["x"][0] == 1


def test_a_rollback_inside_reading_is_seen_afterwards(shelf: Shelf) -> None:
    shelf["x"] = np.zeros(3)
    shelf.tag("then")
    shelf["x"] = np.ones(3)
    with shelf.reading():
        assert shelf["x"][0] == 1
        shelf.rollback("then")
        shelf.tag("again")
        assert shelf["x"][0] == 1
        assert shelf.tags() == ["then"]
    assert shelf["x"][0] == 0
    assert shelf.tags() == ["then", "again"]
