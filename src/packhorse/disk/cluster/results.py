"""What packing, unpacking or verifying many files returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packhorse.disk.results import Problem
from packhorse.storage.locations import Place

__all__ = ["FileReport", "ManyResult"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was done with one file.

    Attributes:
        source: the file that was read; a folder, if the folder as a whole failed.
        output: the file that was written; None for `verify_many`.
        status: "packed", "unpacked", "copied" or "verified"; "skipped", because the wanted output
            was there; "planned" in a dry run; "damaged", if verifying found problems; "failed".
        nbytes: the size of the original file; 0 if it is not known.
        packed_nbytes: the size of the packed file; 0 if it is not known.
        n_tensors: how many tensors it has.
        n_delta: how many of them are differences from a base.
        n_parts: how many tasks packed it, without the one that joins the parts.
        seconds: how long its tasks took, added up.
        worker: the address of the worker that wrote it; empty for this process.
        problems: what verifying found.
        error: why it failed; None if it did not.
    """

    source: Place
    output: Place | None
    status: str
    nbytes: int = 0
    packed_nbytes: int = 0
    n_tensors: int = 0
    n_delta: int = 0
    n_parts: int = 1
    seconds: float = 0.0
    worker: str = ""
    problems: tuple[Problem, ...] = ()
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether it neither failed nor is damaged."""
        return self.error is None and not self.problems


@dataclass(frozen=True, slots=True)
class ManyResult:
    """What was done with many files.

    Attributes:
        files: a report for each file, in the order of the sources.
        seconds: how long it took, by the clock.
    """

    files: tuple[FileReport, ...]
    seconds: float

    @property
    def original_nbytes(self) -> int:
        """The total size of the original files."""
        return sum(file.nbytes for file in self.files)

    @property
    def packed_nbytes(self) -> int:
        """The total size of the packed files."""
        return sum(file.packed_nbytes for file in self.files)

    @property
    def ok(self) -> bool:
        """Whether every file is."""
        return all(file.ok for file in self.files)

    @property
    def failed(self) -> tuple[FileReport, ...]:
        """The files that failed or are damaged."""
        return tuple(file for file in self.files if not file.ok)

    def __iter__(self) -> Iterator[FileReport]:
        return iter(self.files)
