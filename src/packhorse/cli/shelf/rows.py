"""The rows that actions on shelves return and the renderer draws; `--json` prints them.

Sizes are in bytes, times in seconds, speeds in uncompressed GB (10^9 bytes) per second. A ratio is
original bytes / packed bytes; 1 if nothing is stored.
"""

from dataclasses import dataclass
from typing import Any

__all__ = [
    "CompactedShelf",
    "ExchangedTensor",
    "ExportedTensors",
    "ImportedTensors",
    "ListedShelf",
    "ListedTensor",
    "ReaderRow",
    "ShelfProblemRow",
    "ShownState",
    "ShownTensor",
    "StateTensor",
    "StatisticsRow",
    "TagRow",
    "VerifiedShelf",
]


@dataclass(frozen=True)
class ListedTensor:
    """A tensor of a shelf; `chunks` is the shape of a chunk, `base` is "previous" if rows are
    stored as deltas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    base: str | None
    nbytes: int
    packed_nbytes: int
    ratio: float


@dataclass(frozen=True)
class TagRow:
    """A tag, with its time in UTC and the number of its commit."""

    name: str
    time: str
    commit: int


@dataclass(frozen=True)
class ReaderRow:
    """A process that reads an older commit, and so keeps the pages of that commit in use."""

    pid: int
    n_commits_behind: int


@dataclass(frozen=True)
class ListedShelf:
    """All tensors of a shelf, or those of a tag.

    `nbytes`, `packed_nbytes` and `ratio` are of the listed tensors. `file_nbytes` is the size of
    the shelf on the disk; `free_nbytes` of it are free for what is written next. These two,
    `n_commits`, `tags` and `readers` are always those of the whole shelf.
    """

    shelf: str
    tag: str | None
    nbytes: int
    packed_nbytes: int
    ratio: float
    file_nbytes: int
    free_nbytes: int
    n_commits: int
    tensors: list[ListedTensor]
    states: list[str]
    tags: list[TagRow]
    readers: list[ReaderRow]


@dataclass(frozen=True)
class StatisticsRow:
    """What one pass over the values of a tensor found.

    `min`, `max` and `mean` are of the finite values, and None without any; those of complex numbers
    are of their magnitudes. The minimum and maximum of integers are exact.
    """

    n_values: int
    n_nan: int
    n_infinite: int
    n_zero: int
    min: float | int | None
    max: float | int | None
    mean: float | None


@dataclass(frozen=True)
class ShownTensor:
    """A tensor with some of its values.

    `index` is as it was given. `selected` is the shape of what it selects, and `values` holds the
    first values of that, in nested lists; NaN, infinities and complex numbers are strings.
    """

    shelf: str
    tag: str | None
    tensor: ListedTensor
    index: str | None
    selected: tuple[int, ...]
    values: Any
    statistics: StatisticsRow | None


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a saved state, by its path in the state."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShownState:
    """A saved state: its tensors, and by their paths the values that are not tensors."""

    shelf: str
    tag: str | None
    name: str
    nbytes: int
    tensors: list[StateTensor]
    values: dict[str, Any]


@dataclass(frozen=True)
class ShelfProblemRow:
    """One problem. `name` is empty if it is not of one tensor; `tag` is None for the present state,
    and `chunk` if it is not of one chunk."""

    name: str
    tag: str | None
    chunk: int | None
    message: str


@dataclass(frozen=True)
class VerifiedShelf:
    """A shelf whose checksums were checked, in its present state and in all tags."""

    shelf: str
    ok: bool
    n_tensors: int
    n_tags: int
    packed_nbytes: int
    seconds: float
    problems: list[ShelfProblemRow]


@dataclass(frozen=True)
class CompactedShelf:
    """A shelf that was compacted; in a dry run, `saved_nbytes` is an estimate."""

    shelf: str
    dry_run: bool
    file_nbytes: int
    saved_nbytes: int
    seconds: float


@dataclass(frozen=True)
class ExchangedTensor:
    """A tensor that was exported or imported; `name` is its name in the shelf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ExportedTensors:
    """Tensors that were written to a file or folder, or would be."""

    shelf: str
    dst: str
    format: str
    dry_run: bool
    nbytes: int
    seconds: float
    gb_per_s: float
    tensors: list[ExchangedTensor]


@dataclass(frozen=True)
class ImportedTensors:
    """The tensors of one source, put into a shelf, or what would be; `replaced` names those that
    were there before. `packed_nbytes` and `ratio` are None in a dry run."""

    shelf: str
    src: str
    format: str
    dry_run: bool
    nbytes: int
    packed_nbytes: int | None
    ratio: float | None
    seconds: float
    gb_per_s: float
    tensors: list[ExchangedTensor]
    replaced: list[str]
