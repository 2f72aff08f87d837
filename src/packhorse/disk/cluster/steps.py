"""What there is to do when many files are packed: jobs, their files, and the steps of the work.

Steps travel to workers as pickles, so they hold places, names and sizes, and no data. All of them
may be done twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeAlias

from packhorse.disk.container import Packed
from packhorse.disk.folder_items import RECORD_NAME, Item, Kind
from packhorse.storage.atomic import is_temporary
from packhorse.storage.locations import Place

__all__ = [
    "PART_NBYTES",
    "Clean",
    "Cut",
    "Finish",
    "Folder",
    "Found",
    "Job",
    "Join",
    "Look",
    "One",
    "Part",
    "Settings",
    "Shard",
    "Step",
    "is_left_over",
    "part_of",
]  # fmt: skip

PART_NBYTES = 1 << 31
_PART = (".packhorse-", ".part")


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all files of a run.

    Attributes:
        verb: "pack", "unpack" or "verify".
        level: the level of packing.
        force: whether an existing output that is not the wanted one may be replaced.
        threads: threads of a task; None for what its worker can spare.
        base: the base; None if there is none.
        whole: whether existing outputs are checked as a whole instead of by a sample.
        part_nbytes: a larger file is packed in parts of about this size.
        max_nbytes: refuse a packed file whose tensors take more; None for no limit.
        is_dry: whether nothing is written.
    """

    verb: str
    level: str = "default"
    force: bool = False
    threads: int | None = None
    base: Place | None = None
    whole: bool = False
    part_nbytes: int = PART_NBYTES
    max_nbytes: int | None = None
    is_dry: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A source that the caller named, and its output.

    Attributes:
        source: a file or a folder.
        output: the file or folder to write; None if nothing is written.
        is_folder: whether they are folders.
    """

    source: Place
    output: Place | None
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a job.

    Attributes:
        job: the number of the job.
        source: its place.
        output: the file to write; None if nothing is written.
        relative: its path in the folder of the job; its name if the job is a file.
        kind: a model file, or a file that is copied.
        nbytes: its size.
        may_replace: whether an existing output that is not the wanted one may be replaced.
        may_write: whether an output that is missing may be written.
    """

    job: int
    source: Place
    output: Place | None
    relative: PurePath
    kind: Kind
    nbytes: int
    may_replace: bool = False
    may_write: bool = True


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a job, after it was listed.

    Attributes:
        job: the number of the job.
        source: its place.
        output: the folder to write; None if nothing is written.
        items: what is in it.
        may_write: whether the output is not complete yet, or may be replaced.
    """

    job: int
    source: Place
    output: Place | None
    items: Sequence[Item]
    may_write: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a job, and its folder if it is one."""

    shards: Sequence[Shard]
    folder: Folder | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """List the files of jobs, by their numbers, and prepare the output folders."""

    jobs: Sequence[tuple[int, Job]]


@dataclass(frozen=True, slots=True)
class One:
    """Handle a file as a whole, or say how to cut it."""

    shard: Shard


@dataclass(frozen=True, slots=True)
class Cut:
    """The answer to `One` for a large file: the runs of tensors to pack by themselves, and the mark
    of the file, by which all parts must be of the same version of it."""

    runs: Sequence[range]
    mark: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Pack a run of the tensors of a file."""

    shard: Shard
    number: int
    run: range
    mark: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Write a packed file from its parts."""

    shard: Shard
    parts: Sequence[Packed]
    mark: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Write the indexes of a folder, and remove what marks it as unfinished."""

    folder: Folder


@dataclass(frozen=True, slots=True)
class Clean:
    """Remove what a failed task has left beside its output."""

    shard: Shard


Step: TypeAlias = Look | One | Part | Join | Finish | Clean


def part_of(output: Place, number: int | None = None) -> str:
    """The name of a part of an output; without a number, how the names of all parts begin."""
    beginning = f"{_PART[0]}{zlib.crc32(os.fsencode(output.name)):08x}-"
    return beginning if number is None else f"{beginning}{number:05}{_PART[1]}"


def is_left_over(path: PurePath | Path) -> bool:
    """Whether a name is that of something that is removed when a folder is complete."""
    name = path.name
    is_part = name.startswith(_PART[0]) and name.endswith(_PART[1])
    return is_part or is_temporary(name) or name == RECORD_NAME
