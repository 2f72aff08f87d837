"""A random workload on a shelf, a model of what was committed, and a ledger of what was said.

The model is plain NumPy arrays. Each step is applied to the model first; then the ledger gets
`next` with the digest of the state to come, the shelf does the same step, and the ledger gets
`done`. So whoever reads the ledger knows which states the shelf may have.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import ml_dtypes
import numpy as np
from disk_record import mark

from packhorse.disk import Shelf

__all__ = ["Ledger", "Model", "Steps", "work", "work_until_killed"]

DTYPES = [np.dtype(name) for name in ("float32", "float64", "int16", "uint8", "bool", "complex64")]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)]
WIDTHS: list[tuple[int, ...]] = [(), (3,), (40,), (30, 20)]
MAX_ROWS = 60
MAX_TENSORS = 6
MAX_TAGS = 3
KINDS_TOGETHER = ["append", "append", "rows", "ids", "in_place", "replace", "create"]
KINDS = [*KINDS_TOGETHER, "append", "append", "rows", "in_place", "several", "several", "several"]
KINDS += ["failing", "resize", "delete", "rename", "tag", "tag", "untag", "rollback", "compact"]


class ModelTensor:
    """An array with the methods of a ShelfTensor that the workload uses."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._digest: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def digest(self) -> str:
        if self._digest is None:
            hashed = hashlib.blake2b(digest_size=8)
            hashed.update(repr((self.dtype.name, self.shape)).encode())
            hashed.update(np.ascontiguousarray(self.array).tobytes())
            self._digest = hashed.hexdigest()
        return self._digest

    def copy(self) -> ModelTensor:
        return ModelTensor(self.array.copy())

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = value
        self._digest = None

    def append(self, rows: np.ndarray) -> None:
        self.array = np.concatenate([self.array, rows])
        self._digest = None

    def resize(self, n_rows: int) -> None:
        more = np.zeros((max(0, n_rows - len(self.array)), *self.shape[1:]), self.dtype)
        self.array = np.concatenate([self.array[:n_rows], more])
        self._digest = None

    def __iadd__(self, value: Any) -> Self:
        self[...] = self.array + np.asarray(value, self.dtype)
        return self

    def __imul__(self, value: Any) -> Self:
        self[...] = self.array * np.asarray(value, self.dtype)
        return self

    def __ixor__(self, value: Any) -> Self:
        self[...] = self.array ^ np.asarray(value, self.dtype)
        return self

    def apply(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self[...] = function(self.array)


class Model:
    """The state of a shelf, in memory.

    Attributes:
        tensors: by name.
        states: nested states, by name.
        kept: the tensors and nested states of each tag.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, ModelTensor] = {}
        self.kept: dict[str, dict[str, ModelTensor]] = {}

    @classmethod
    def read(cls, shelf: Any) -> Model:
        """The state of a shelf."""
        model = cls()
        with shelf.reading():
            model.tensors = {name: ModelTensor(np.array(shelf[name])) for name in shelf}
            for tag in shelf.tags():
                view = shelf.at(tag)
                model.kept[tag] = {name: ModelTensor(np.array(view[name])) for name in view}
        return model

    def digest(self) -> str:
        """A short text that differs between states."""
        states = {"": self.tensors} | {f"tag {tag}": kept for tag, kept in self.kept.items()}
        listed = [
            (state, name, tensors[name].digest())
            for state, tensors in sorted(states.items())
            for name in sorted(tensors)
        ]
        listed += [(state, "", "") for state in sorted(states)]
        return hashlib.blake2b(repr(listed).encode(), digest_size=8).hexdigest()

    def copy(self) -> Model:
        model = Model()
        model.tensors, model.kept = _copies(self.tensors), dict(self.kept)
        return model

    def __getitem__(self, name: str) -> ModelTensor:
        return self.tensors[name]

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.tensors[name] = ModelTensor(np.array(array))

    def __delitem__(self, name: str) -> None:
        del self.tensors[name]

    def create(self, name: str, shape: tuple[int, ...], dtype: Any, **_: Any) -> None:
        self[name] = np.zeros(shape, dtype)

    def rename(self, old: str, new: str) -> None:
        self.tensors[new] = self.tensors.pop(old)

    def tag(self, tag: str) -> None:
        self.kept[tag] = _copies(self.tensors)

    def untag(self, tag: str) -> None:
        del self.kept[tag]

    def rollback(self, tag: str) -> None:
        self.tensors = _copies(self.kept[tag])

    def compact(self) -> None:
        pass

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = self.copy()
        try:
            yield
        except BaseException:
            self.tensors, self.kept = before.tensors, before.kept
            raise


def _copies(tensors: dict[str, ModelTensor]) -> dict[str, ModelTensor]:
    return {name: tensor.copy() for name, tensor in tensors.items()}


class Deliberate(Exception):
    """Ends a transaction that is to have no effect."""


# A step does the same to a Model and to a Shelf.
Step = Callable[[Any], None]


def random_array(rng: random.Random, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Numbers that are no NaN, in part like weights and in part noise."""
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal(shape)
    if dtype == np.bool_:
        return values > 0
    if dtype.kind in "iu":
        return (values * 20).astype(np.int16).astype(dtype)
    return (values / 8).astype(dtype)


class Steps:
    """Chooses steps that fit a model, by a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, model: Model) -> tuple[str, Step]:
        """The next kind of step and the step."""
        if len(model.tensors) < 2:
            return "create", self.create(model)
        return self._choose(model, KINDS)

    def _choose(self, model: Model, kinds: list[str]) -> tuple[str, Step]:
        """A step of one of some kinds; not all kinds fit any model."""
        while True:
            kind = self._rng.choice(kinds)
            step = getattr(self, kind)(model)
            if step is not None:
                return kind, step

    def create(self, model: Model) -> Step:
        rng = self._rng
        if len(model.tensors) >= MAX_TENSORS:
            return self.delete(model)
        name, dtype = self._new_name(model, "x"), rng.choice(DTYPES)
        shape = (rng.choice([0, 1, 7, 33]), *rng.choice(WIDTHS))
        rows = random_array(rng, (rng.randint(1, 20), *shape[1:]), dtype)
        base = rng.choice([None, None, "previous"])
        chunk_nbytes = rng.choice([None, 4096])

        def step(shelf: Any) -> None:
            with shelf.transaction():
                shelf.create(
                    name, shape, dtype, base=base, keyframe_every=4, chunk_nbytes=chunk_nbytes
                )
                shelf[name].append(rows)

        return step

    def append(self, model: Model) -> Step:
        name, tensor = self._any(model)
        if tensor.shape[0] > MAX_ROWS:
            return self.resize(model)
        rows = random_array(self._rng, (self._rng.randint(1, 12), *tensor.shape[1:]), tensor.dtype)
        return lambda shelf: shelf[name].append(rows)

    def rows(self, model: Model) -> Step | None:
        name, tensor = self._any(model)
        n_rows = tensor.shape[0]
        if not n_rows:
            return None
        first = self._rng.randrange(n_rows)
        index = slice(first, self._rng.randint(first + 1, n_rows), self._rng.choice([1, 1, 2]))
        values = random_array(self._rng, tensor.array[index].shape, tensor.dtype)

        def step(shelf: Any) -> None:
            shelf[name][index] = values

        return step

    def ids(self, model: Model) -> Step | None:
        name, tensor = self._any(model)
        n_rows = tensor.shape[0]
        if not n_rows:
            return None
        ids = np.array(self._rng.sample(range(n_rows), min(n_rows, 5)))
        values = random_array(self._rng, (len(ids), *tensor.shape[1:]), tensor.dtype)

        def step(shelf: Any) -> None:
            shelf[name][ids] = values

        return step

    def in_place(self, model: Model) -> Step:
        name, _ = self._any(model)
        kind = self._rng.choice(["add", "multiply", "apply"])

        def step(shelf: Any) -> None:
            x = shelf[name]
            if x.dtype == np.bool_ or x.dtype.kind in "iu":
                x ^= x.dtype.type(1)
            elif kind == "add":
                x += x.dtype.type(0.5)
            elif kind == "multiply":
                x *= x.dtype.type(0.5)
            else:
                x.apply(np.negative)

        return step

    def several(self, model: Model) -> Step:
        """Up to four steps in one transaction; each fits what the ones before it make."""
        trial, chosen = model.copy(), []
        for _ in range(self._rng.randint(2, 4)):
            _, step = self._choose(trial, KINDS_TOGETHER)
            step(trial)
            chosen.append(step)

        def together(shelf: Any) -> None:
            with shelf.transaction():
                for step in chosen:
                    step(shelf)

        return together

    def failing(self, model: Model) -> Step:
        """A transaction that ends by an exception."""
        step = self.several(model)

        def fail(shelf: Any) -> None:
            with suppress(Deliberate), shelf.transaction():
                step(shelf)
                raise Deliberate

        return fail

    def replace(self, model: Model) -> Step:
        name, tensor = self._any(model)
        array = random_array(self._rng, tensor.shape, self._rng.choice(DTYPES))

        def step(shelf: Any) -> None:
            shelf[name] = array

        return step

    def resize(self, model: Model) -> Step:
        name, tensor = self._any(model)
        n_rows = self._rng.randint(0, tensor.shape[0])
        return lambda shelf: shelf[name].resize(n_rows)

    def delete(self, model: Model) -> Step:
        name, _ = self._any(model)
        return lambda shelf: shelf.__delitem__(name)

    def rename(self, model: Model) -> Step:
        name, _ = self._any(model)
        new = self._new_name(model, "y")
        return lambda shelf: shelf.rename(name, new)

    def tag(self, model: Model) -> Step | None:
        tag = f"tag{self._rng.randrange(10**6)}"
        if len(model.kept) >= MAX_TAGS or tag in model.kept:
            return None
        return lambda shelf: shelf.tag(tag)

    def untag(self, model: Model) -> Step | None:
        tag = self._any_tag(model)
        return tag and (lambda shelf: shelf.untag(tag))

    def rollback(self, model: Model) -> Step | None:
        tag = self._any_tag(model)
        return tag and (lambda shelf: shelf.rollback(tag))

    def compact(self, model: Model) -> Step:
        return lambda shelf: shelf.compact()

    def _new_name(self, model: Model, end: str) -> str:
        while True:
            name = f"t{self._rng.randrange(10**6)}/{end}"
            if name not in model.tensors:
                return name

    def _any(self, model: Model) -> tuple[str, ModelTensor]:
        name = self._rng.choice(sorted(model.tensors))
        return name, model.tensors[name]

    def _any_tag(self, model: Model) -> str | None:
        return self._rng.choice(sorted(model.kept)) if model.kept else None


class Ledger:
    """What a workload said.

    Attributes:
        allowed: the digests that the shelf may have.
        running: the kind of step that had begun and not ended, if any.
        n_done: how many steps had ended.
    """

    def __init__(self, lines: list[str]) -> None:
        self.allowed: set[str] = set()
        self.running: str | None = None
        self.n_done = 0
        for line in lines:
            event, kind, digest = line.split()
            self.running = kind if event == "next" else None
            self.allowed = {digest} | (self.allowed if event == "next" else set())
            self.n_done += event == "done"


def work(shelf: Shelf, say: Callable[[str], None], seed: int, n_steps: int | None = None) -> None:
    """Do random steps and say what they are, in lines for a Ledger.

    Args:
        shelf: what to work on.
        say: takes the lines.
        seed: of the steps.
        n_steps: how many; None goes on for ever.
    """
    model = Model.read(shelf)
    steps = Steps(random.Random(seed))
    say(f"done open {model.digest()}")
    for number in itertools.count(1) if n_steps is None else range(1, n_steps + 1):
        kind, step = steps(model)
        step(model)
        digest = model.digest()
        say(f"next {kind} {digest}")
        step(shelf)
        say(f"done {kind} {digest}")
        if number % 16 == 0:
            assert Model.read(shelf).digest() == digest, f"seed {seed}, step {number}: {kind}"


def work_until_killed(folder: str, log: str, seed: int) -> None:
    """Work on a shelf until somebody ends this process.

    Args:
        folder: of the shelf.
        log: the file to which the lines go.
        seed: of the steps.
    """
    report = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with Shelf(folder) as shelf:
        work(shelf, lambda line: os.write(report, f"{line}\n".encode()) and None, seed)


if __name__ == "__main__":  # python shelf_workload.py FOLDER SEED N_STEPS, for the recorder
    with Shelf(sys.argv[1]) as main_shelf:
        work(main_shelf, mark, int(sys.argv[2]), int(sys.argv[3]))
