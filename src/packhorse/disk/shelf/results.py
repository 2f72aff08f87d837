"""What a shelf tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ReaderInfo", "ShelfInfo", "ShelfProblem", "TagInfo", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a shelf.

    Attributes:
        name: its name.
        dtype: safetensors' name of the dtype.
        shape: its shape.
        chunks: the shape of a chunk.
        base: "previous" if rows are coded against a keyframe row, otherwise None.
        nbytes: the bytes of its elements.
        packed_nbytes: the bytes of its chunks on the shelf.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    base: str | None
    nbytes: int
    packed_nbytes: int

    @property
    def ratio(self) -> float:
        """`nbytes` divided by `packed_nbytes`; 1 if nothing is stored."""
        return self.nbytes / self.packed_nbytes if self.packed_nbytes else 1.0


@dataclass(frozen=True, slots=True)
class TagInfo:
    """A tag of a shelf.

    Attributes:
        name: its name.
        time: when it was made, in UTC, as ISO 8601.
        commit: the number of the commit whose state it shows.
    """

    name: str
    time: str
    commit: int


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A process that holds a state of a shelf. The bytes that were replaced since then are kept.

    Attributes:
        pid: its number.
        n_commits_behind: how many commits there were since the state.
    """

    pid: int
    n_commits_behind: int


@dataclass(frozen=True, slots=True)
class ShelfInfo:
    """What is on a shelf.

    Attributes:
        path: the folder.
        nbytes: the bytes of all elements of the newest state, also of nested states.
        packed_nbytes: the bytes of its chunks on the shelf.
        file_nbytes: how long the file is.
        free_nbytes: how much of it is free for new chunks; `compact` gives this back.
        n_commits: how many commits there were.
        tags: the tags, the oldest first.
        readers: the processes that hold a state now.
        tensors: the tensors, by name.
        states: the names of the nested states.
    """

    path: Path
    nbytes: int
    packed_nbytes: int
    file_nbytes: int
    free_nbytes: int
    n_commits: int
    tags: list[TagInfo]
    readers: list[ReaderInfo]
    tensors: list[TensorInfo]
    states: list[str]

    @property
    def n_tensors(self) -> int:
        """How many tensors there are, without those of nested states."""
        return len(self.tensors)


@dataclass(frozen=True, slots=True)
class ShelfProblem:
    """Something that is damaged on a shelf.

    Attributes:
        name: the name of the tensor; empty if it is none's.
        tag: the tag whose state has it; None for the newest state.
        chunk: the number of the chunk in the tensor; None if it is no chunk.
        message: what is wrong.
    """

    name: str
    tag: str | None
    chunk: int | None
    message: str

    def __str__(self) -> str:
        return self.message
